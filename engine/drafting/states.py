"""The target's hidden states, as heads keep them: of rows not run yet, and behind full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.transfer import upload

_MAX_KEPT_ROWS = 4096
"""States kept for rows that were not run yet; of longer stretches the newest."""


@dataclass(slots=True)
class TextStates:
    """One request's states of positions ``first ..``, without a gap."""

    first: int = 0
    parts: list[Tensor] = field(default_factory=list)  # each [num_rows, size]

    @property
    def known(self) -> range:
        return range(self.first, self.first + sum(len(part) for part in self.parts))

    def add(self, first: int, hidden: Tensor) -> None:
        """Adds those of newly committed rows; a gap or a step back starts anew."""
        if first != self.known.stop:
            self.first, self.parts = first, []
        self.parts.append(hidden)
        while len(self.known) - len(self.parts[0]) >= _MAX_KEPT_ROWS:
            self.first += len(self.parts.pop(0))

    def before(self, position: int, count: int) -> Tensor:
        """Returns the states before ``position .. position + count - 1``, zeros where unknown. They may
        be the very ones that are kept. Something was added."""
        start, known = position - 1, self.known
        low, high = max(start, known.start), min(start + count, known.stop)
        states = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        if (low, high) == (start, start + count):
            return states[low - known.start : high - known.start]
        rows = states.new_zeros(count, states.shape[1])
        if low < high:
            rows[low - start : high - start] = states[low - known.start : high - known.start]
        return rows

    def drop(self, position: int) -> None:
        """Rows before ``position`` were run: their states are not asked for again."""
        while self.parts and self.first + len(self.parts[0]) < position:
            self.first += len(self.parts.pop(0))


class BlockEnds:
    """The states of blocks' last tokens, under the blocks' ids: the first row after a cached prefix reads
    one. Which text a block's is of is remembered by ``drafters.model.block_contents``."""

    def __init__(self, num_blocks: int, block_size: int, blank: Tensor) -> None:
        """``blank``: a state, for size, type and device."""
        self._size = block_size
        self._states = blank.new_zeros(num_blocks, len(blank))

    @torch.inference_mode()
    def keep(self, first: int, hidden: Tensor, block_table: Sequence[int]) -> None:
        """``hidden``: states of tokens from position ``first`` on; those of last tokens are kept."""
        ends = range(first // self._size, (first + len(hidden)) // self._size)
        if ends:
            block_ids = upload([block_table[index] for index in ends], hidden.device)
            offset = (ends.start + 1) * self._size - 1 - first
            self._states[block_ids] = hidden[offset :: self._size]

    def before(self, position: int, block_table: Sequence[int]) -> Tensor | None:
        """Returns the state before the first token of a block; None for other tokens."""
        index, offset = divmod(position, self._size)
        return None if offset or not index else self._states[block_table[index - 1]]
