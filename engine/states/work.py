"""Turns a step's rows into the walks that operations with a state take through them.

A request's walk starts from a slot's state, absorbs the inputs of rows kept by earlier steps, then the
step's own rows: each from its parent's state. States on the way are held in buffers, as few as the tree
has open branches; only the requested ones are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.batch import RequestRows
from engine.kernels.walk_layout import Entry, Walk
from kvpool.state_slots import NOWHERE, StateRows


class StateWork(NamedTuple):
    """A step's walks, ``[num_walks, 4]`` and ``[num_entries, 8]`` int64. All rows below ``num_rows`` are
    in one entry each; those behind are padding."""

    walks: NDArray[np.int64]
    entries: NDArray[np.int64]
    num_rows: int

    @property
    def most_buffers(self) -> int:
        return int(self.walks[:, 3].max(initial=1))


def state_work(requests: Sequence[RequestRows]) -> StateWork:
    walks: list[Walk] = []
    entries: list[Entry] = []
    num_rows = 0
    for each in requests:
        first = len(entries)
        states = each.states or StateRows()
        num_buffers = _walk(each, states, entries)
        walks.append(Walk(first, len(entries), states.source, num_buffers))
        num_rows += each.num_rows
    shaped = np.array(walks, dtype=np.int64).reshape(-1, len(Walk._fields))
    return StateWork(
        shaped, np.array(entries, dtype=np.int64).reshape(-1, len(Entry._fields)), num_rows
    )


def _walk(request: RequestRows, states: StateRows, entries: list[Entry]) -> int:
    """Adds a request's entries. Returns how many buffers they need."""
    parent = NOWHERE
    known = range(request.first_row, request.first_row + request.num_known)
    kept = states.known_places or [NOWHERE] * len(known)
    chain = [(NOWHERE, place, NOWHERE) for place in states.replayed]
    chain += [(row, NOWHERE, keep) for row, keep in zip(known, kept, strict=True)]
    for count, (row, place, keep) in enumerate(chain, start=1):
        store = states.target if count == len(chain) else NOWHERE
        snapshot = states.snapshots.get(count, NOWHERE)
        entries.append(Entry(row, place, keep, parent, 0, 0, store, snapshot))
        parent = len(entries) - 1
    return _nodes(request, states.places, entries, parent)


def _nodes(request: RequestRows, places: Sequence[int], entries: list[Entry], root: int) -> int:
    """Adds those of the draft nodes. A node that is its parent's last child takes its buffer."""
    parents, first = request.parents, len(entries)
    last_child = {parent: node for node, parent in enumerate(parents)}
    buffers = {NOWHERE: 0}
    free: list[int] = []
    num_buffers = 1
    first_row = request.first_row + request.num_known - request.num_stored
    for node, parent in enumerate(parents):
        source = buffers[parent]
        if last_child[parent] == node:
            buffer = source
        elif free:
            buffer = free.pop()
        else:
            buffer, num_buffers = num_buffers, num_buffers + 1
        place = places[node] if places else NOWHERE
        is_stored = node < request.num_stored
        row = NOWHERE if is_stored else first_row + node
        read, keep = (place, NOWHERE) if is_stored else (NOWHERE, place)
        above = root if parent == NOWHERE else first + parent
        entries.append(Entry(row, read, keep, above, source, buffer, NOWHERE, NOWHERE))
        if node in last_child:
            buffers[node] = buffer
        else:
            free.append(buffer)
    return num_buffers
