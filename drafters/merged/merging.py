"""Requests whose drafts are grown by the compiled loops, and what they learn into."""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from compiled.records import Memory, address_of
from drafters.base import GREEDY, DraftRequest, DraftSampling, Observation, ReadingState
from drafters.copying.alignment import Alignment, Desk
from drafters.copying.suffix_index import Histories
from drafters.merged.chance_loops import NUM_WEIGHTS
from drafters.merged.grow_loops import MOST_GUESSES, MOST_NEARLY, grow, hear
from drafters.merged.records import Guess, Merged, Rows, Seen
from drafters.merged.row_loops import (
    MOST_FREQUENT,
    NUM_LEVELS,
    NUM_TOP,
    ROW_CELLS,
    move_rows,
)
from drafters.merged.weights import first_weights
from drafters.tree import EMPTY, DraftTree

MAX_TENANTS = 16
MAX_ROWS = 65_536
_FIRST_ROWS = 1_024
_NODES = 16
_USUAL_LOGITS = (-0.4, -2.7, -3.5, -3.9, -4.3, -4.7, -5.1, -5.3)
"""Replace the logits of top tokens if none are given."""
_LONGEST = 4
"""Tokens of the longest context of a row."""
_DOUBLE, _BITS = struct.Struct("d"), struct.Struct("q")


class Table:
    """A tenant's rows of top tokens. Memory: 76 bytes for each of at most ``MAX_ROWS``."""

    def __init__(self) -> None:
        self._frequent = array("i", bytes(8 * MOST_FREQUENT))
        self._make(_FIRST_ROWS)

    def _make(self, size: int) -> None:
        self._cells = array("i", bytes(4 * ROW_CELLS * size))
        self.told = Memory(Rows)
        self.told["cells"], self.told["size"] = address_of(self._cells), size
        self.told["frequent"] = address_of(self._frequent)

    def make_room(self, num_rows: int) -> None:
        """For so many more rows, up to the most there may be."""
        while (
            self.told["size"] < MAX_ROWS
            and 2 * (self.told["num_used"] + num_rows) > self.told["size"]
        ):
            before = self._cells, self.told  # until all is moved
            self._make(2 * self.told["size"])
            move_rows.compile()(before[1].address, self.told.address)


class Merging:
    """Room to draft in, tenants' texts and tables, and weights, which are no texts."""

    def __init__(self) -> None:
        self.grow, self.hear = grow.compile(), hear.compile()
        move_rows.compile()
        self.desk = Desk()
        self.histories = Histories()
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self.shared = first_weights()
        self.seen = Memory(Seen)
        self._context = array("i", bytes(4 * _LONGEST))
        self.context = address_of(self._context)

    def open(self, token_ids: Sequence[int], cache_salt: str) -> MergedText:
        """Returns a new request."""
        return MergedText(self, token_ids, cache_salt)

    def advance(self) -> None:
        """Indexes a little of the tenants' finished texts that wait."""
        self.histories.advance()

    def table(self, cache_salt: str) -> Table:
        table = self._tables.setdefault(cache_salt, Table())
        self._tables.move_to_end(cache_salt)
        while len(self._tables) > MAX_TENANTS:
            self._tables.popitem(last=False)
        return table


class MergedText(ReadingState):
    """One request: its text, and what it has learned."""

    num_top_tokens = NUM_TOP

    def __init__(self, merging: Merging, token_ids: Sequence[int], cache_salt: str) -> None:
        history = merging.histories.of(cache_salt)
        self._merging = merging
        self._alignment = Alignment(token_ids, history, merging.desk)
        self._table = merging.table(cache_salt)
        self._own = array("d", bytes(8 * NUM_WEIGHTS))
        self._nearly = array("i", bytes(8 * MOST_NEARLY))
        self._num_nodes = 0
        self._drafted_at = -1
        self._sampling = GREEDY
        told = self._told = Memory(Merged)
        told["own"], told["nearly"] = address_of(self._own), address_of(self._nearly)
        told["shared"] = address_of(merging.shared[0])
        self._make_room(_NODES)
        self.finish = self._alignment.finish

    def _make_room(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._guesses = Memory(Guess, (num_nodes + 1) * MOST_GUESSES)
        self._counts = array("q", bytes(8 * (num_nodes + 1)))
        self._survivals = array("d", bytes(8 * num_nodes))
        told = self._told
        told["guesses"], told["counts"] = self._guesses.address, address_of(self._counts)
        told["survivals"] = address_of(self._survivals)

    def read_prompt(self, num_tokens: int) -> int:
        return self._alignment.read(num_tokens)

    def _sample(self, sampling: DraftSampling) -> None:
        self._sampling = sampling
        self._told["temperature"] = _bits(sampling.temperature)
        self._told["key"] = sampling.key
        shared = self._merging.shared[sampling.temperature > 0]
        self._told["shared"] = address_of(shared)

    def propose(self, request: DraftRequest) -> DraftTree:
        merging, told, text = self._merging, self._told, request.token_ids
        self._alignment.extend(text)
        sampling, known, num_nodes = request.sampling, self._sampling, request.max_nodes
        if sampling.temperature != known.temperature or sampling.key != known.key:
            self._sample(sampling)
        if num_nodes > self._num_nodes:
            self._make_room(num_nodes)
        merging.desk.make_room(num_nodes, MOST_GUESSES)
        told["rows"] = self._table.told.address
        self._drafted_at = len(text)
        told["least"] = _bits(request.least_survival)
        count = merging.grow(
            self._alignment.told().address,
            merging.desk.told.address,
            told.address,
            num_nodes,
            request.shape.width,
            request.depth,
        )
        if count == 0:
            return EMPTY
        token_ids, parents, features = merging.desk.drafted(count)
        survivals = self._survivals[:count].tolist()
        return DraftTree(token_ids, parents, [0] * count, survivals=survivals)

    def observe(self, seen: Observation) -> None:
        text, emitted = seen.token_ids, seen.emitted_token_ids
        start = len(text) - len(emitted)
        if self._drafted_at != start:
            self._told["num_expanded"] = 0
        tree = seen.tree
        num_rows = len(tree.token_ids) + 1
        first = max(0, start - _LONGEST)
        tail = array("i", text[first:])
        told = self._merging.seen
        tokens, parents = array("i", tree.token_ids), array("i", tree.parents)
        is_emitted = array("i", bytes(4 * num_rows))
        for row in seen.path:
            is_emitted[row] = 1
        tops, logs, num_top = _flat(seen)
        lists: list[array[Any]] = [tokens, parents, is_emitted, tops, logs]
        told.fill(*map(address_of, lists), num_rows, num_top, len(emitted))
        if tops:
            self._table.make_room(NUM_LEVELS * num_rows)
        self._told["rows"] = self._table.told.address
        self._merging.hear(
            self._told.address, told.address, address_of(tail), start - first, self._merging.context
        )
        self._alignment.extend(text)


def _bits(value: float) -> int:
    """Returns a number as a record's field holds it."""
    bits: int
    (bits,) = _BITS.unpack(_DOUBLE.pack(value))
    return bits


def _flat(seen: Observation) -> tuple[array[int], array[float], int]:
    """Returns the top tokens of all rows, their logits, and how many there are of each row."""
    tops, logs = array("i"), array("d")
    if seen.top_token_ids is None:
        return tops, logs, 0
    given = seen.top_logits or [_USUAL_LOGITS] * len(seen.top_token_ids)
    if {*map(len, seen.top_token_ids), *map(len, given)} == {NUM_TOP}:
        joined = chain.from_iterable
        return array("i", joined(seen.top_token_ids)), array("d", joined(given)), NUM_TOP
    for row, values in zip(seen.top_token_ids, given, strict=True):
        missing = NUM_TOP - len(row)
        tops.extend(row[:NUM_TOP] if missing <= 0 else [*row, *[-1] * missing])
        logs.extend(values[:NUM_TOP] if len(values) >= NUM_TOP else [*values, *[0.0] * missing])
    return tops, logs, NUM_TOP
