"""The target's hidden states, as heads keep them: of rows not run yet, and behind full blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.transfer import upload

_MAX_KEPT_ROWS = 4096
"""States of one text that are kept for rows that were not run yet; of longer stretches the newest."""
_LEAST_ROWS = 256


class StateMemory:
    """Memory for states of all texts together, so that a step's are copied there in one go. It grows by
    doubling, and is let go of when nothing is kept."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # [capacity, size]
        self._free: list[int] = []

    @torch.inference_mode()
    def add(self, states: Tensor) -> list[int]:
        """Copies ``states`` ``[num_rows, size]``; returns where they are now."""
        rows = self._with_room(states)
        cut = len(self._free) - len(states)
        places = self._free[cut:]
        del self._free[cut:]
        rows.index_copy_(0, upload(places, states.device), states)
        return places

    @torch.inference_mode()
    def read(self, places: Sequence[int]) -> Tensor:
        """Returns a copy of states, ``[num_places, size]``. Something was added."""
        assert self._rows is not None
        return self._rows.index_select(0, upload(places, self._rows.device, torch.int64))

    def free(self, places: Iterable[int]) -> None:
        self._free += places
        if self._rows is not None and len(self._free) == len(self._rows):
            self._rows, self._free = None, []

    def _with_room(self, states: Tensor) -> Tensor:
        held = 0 if self._rows is None else len(self._rows)
        if self._rows is not None and len(states) <= len(self._free):
            return self._rows
        size = max(_LEAST_ROWS, 2 * held, held + len(states))
        grown = states.new_empty(size, states.shape[1])
        if self._rows is not None:
            grown[:held] = self._rows
        self._rows = grown
        self._free += range(size - 1, held - 1, -1)
        return grown


@dataclass(slots=True)
class TextStates:
    """One text's states of positions ``first ..``, without a gap: where they are in ``memory``."""

    memory: StateMemory
    first: int = 0
    places: list[int] = field(default_factory=list)

    @property
    def known(self) -> range:
        return range(self.first, self.first + len(self.places))

    def add(self, first: int, places: Sequence[int]) -> None:
        """Adds those of newly committed rows; a gap or a step back starts anew."""
        if first != self.known.stop:
            self.clear()
            self.first = first
        self.places += places
        self._drop_first(len(self.places) - _MAX_KEPT_ROWS)

    def before(self, position: int, count: int) -> Tensor:
        """Returns the states before ``position .. position + count - 1``, zeros where unknown, in memory
        of their own. Something is known."""
        start, known = position - 1, self.known
        low, high = max(start, known.start), min(start + count, known.stop)
        if (low, high) == (start, start + count):
            return self.memory.read(self.places[low - known.start : high - known.start])
        states = self.memory.read(self.places[low - known.start : max(low, high) - known.start])
        rows = states.new_zeros(count, states.shape[1])
        if low < high:
            rows[low - start : high - start] = states
        return rows

    def drop(self, position: int) -> None:
        """Rows before ``position`` were run: their states are not asked for again."""
        self._drop_first(position - 1 - self.first)

    def clear(self) -> None:
        self._drop_first(len(self.places))

    def _drop_first(self, count: int) -> None:
        count = min(count, len(self.places))
        if count > 0:
            self.memory.free(self.places[:count])
            del self.places[:count]
            self.first += count


class Stretch(NamedTuple):
    """So many consecutive tokens of a text, from a position on, and the text's blocks."""

    first: int
    num_tokens: int
    block_table: Sequence[int]


class BlockEnds:
    """The states of blocks' last tokens, under the blocks' ids: the first row after a cached prefix reads
    one. Which text a block's is of is remembered by ``drafters.model.block_contents``."""

    def __init__(self, num_blocks: int, block_size: int, blank: Tensor) -> None:
        """``blank``: a state, for size, type and device."""
        self._size = block_size
        self.num_bytes, self.dtype = len(blank) * blank.element_size(), blank.dtype
        """Size and type of a state."""
        self._states = blank.new_zeros(num_blocks, len(blank))

    @torch.inference_mode()
    def keep(self, stretches: Iterable[Stretch], hidden: Tensor) -> None:
        """``hidden``: states of the tokens of all stretches, one after the other; those of last tokens
        are kept."""
        rows: list[int] = []
        block_ids: list[int] = []
        start = 0
        for first, count, block_table in stretches:
            for index in range(first // self._size, (first + count) // self._size):
                rows.append(start + (index + 1) * self._size - 1 - first)
                block_ids.append(block_table[index])
            start += count
        if rows:
            where = upload([rows, block_ids], hidden.device)
            self._states.index_copy_(0, where[1], hidden.index_select(0, where[0]))

    def state(self, block_id: int) -> Tensor:
        """Returns the memory of the state behind a block, ``[size]``."""
        return self._states[block_id]

    def before(self, position: int, block_table: Sequence[int]) -> Tensor | None:
        """Returns the state before the first token of a block; None for other tokens."""
        index, offset = divmod(position, self._size)
        return None if offset or not index else self._states[block_table[index - 1]]
