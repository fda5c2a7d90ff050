"""How a step's walks through rows with a state are laid out, for those that make them and for kernels.
Numbers that name nothing are -1, ``NOWHERE``."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One step of a walk. ``row``: of the batch; NOWHERE: its inputs lie at the place ``read``.
    ``keep``: the place that its inputs are copied to. ``parent``: the entry that it follows; NOWHERE:
    the walk's start. ``source``, ``buffer``: where the state before it lies, and where it leaves its
    own; they may be the same. ``store``, ``snapshot``: slots that take its state."""

    row: int
    read: int
    keep: int
    parent: int
    source: int
    buffer: int
    store: int
    snapshot: int


class Walk(NamedTuple):
    """Entries ``first`` to ``end - 1``, from the state in the slot ``source`` (NOWHERE: zeros), which is
    put into buffer 0. ``num_buffers`` that it uses."""

    first: int
    end: int
    source: int
    num_buffers: int
