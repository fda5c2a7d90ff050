"""Which rows each expert is multiplied with on a device, and what a row's experts add up to.

As ``engine.kernels.routes`` has it, by operations whose shapes the host knows, so that graphs capture
them. Pairs of one expert come in blocks; there are as many blocks as there could be, and those that no
expert needs are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ROWS_OF_BLOCK = 16
"""Pairs of a block where experts have few, and half as many as where they have more."""


class Routes(NamedTuple):
    """``pairs`` ``[num_pairs]``: by experts; ``blocks`` ``[3, num_blocks]``: an expert, and where its
    pairs of this block begin and end; ``experts`` ``[num_pairs]``: of each pair, the first for one that
    has none."""

    pairs: torch.Tensor
    blocks: torch.Tensor
    experts: torch.Tensor
    rows_of_block: int


def route(chosen: torch.Tensor, num_experts: int) -> Routes:
    """``chosen`` ``[num_rows, num_chosen]`` int64, a row's experts; others than ``num_experts`` are
    none."""
    experts = chosen.reshape(-1)
    is_there = (experts >= 0) & (experts < num_experts)
    num_pairs = len(experts)
    size = ROWS_OF_BLOCK if num_pairs <= ROWS_OF_BLOCK * num_experts else 2 * ROWS_OF_BLOCK
    known = experts.where(is_there, num_experts)
    sorted_experts, pairs = known.sort(stable=True)
    every = torch.arange(num_experts + 1, device=chosen.device)
    starts = torch.searchsorted(sorted_experts, every)
    blocks_of_each = (starts.diff() + size - 1) // size
    ends_of_blocks = blocks_of_each.cumsum(0)
    num_blocks = num_pairs // size + min(num_pairs, num_experts)
    block = torch.arange(num_blocks, device=chosen.device)
    owner = torch.searchsorted(ends_of_blocks, block, right=True)
    expert = owner.clamp(max=num_experts - 1)
    before = (ends_of_blocks - blocks_of_each)[expert]
    first = starts[expert] + (block - before) * size
    end = torch.minimum(first + size, starts[expert + 1])
    end = end.where(owner < num_experts, first)
    return Routes(pairs, torch.stack([expert, first, end]), experts.where(is_there, 0), size)


def weighted_sum(
    outputs: torch.Tensor, weights: torch.Tensor, routes: Routes, dtype: torch.dtype
) -> torch.Tensor:
    """``outputs`` ``[num_pairs, features]``, ``weights`` ``[num_rows, num_chosen]``. Returns
    ``[num_rows, features]``: experts are added in the order in which they were chosen."""
    del routes
    parts = outputs.view(*weights.shape, -1).float() * weights.float()[..., None]
    total = parts[:, 0]
    for choice in range(1, parts.shape[1]):
        total = total + parts[:, choice]
    return total.to(dtype)
