"""Which rows each expert is multiplied with on a device, and what a row's experts add up to.

As ``engine.kernels.routes`` has it, in shapes that the host knows, so that graphs capture it. Pairs of
one expert come in blocks; there are as many blocks as there could be, and those that no expert needs are
empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.kernels.triton import Variant
from engine.kernels.triton.ops import lanes
from engine.kernels.triton.row_ops import launch_of

ROWS_OF_BLOCK = 16
"""Pairs of a block where experts have few, and half as many as where they have more."""
_FEW_PAIRS, _MANY_PAIRS = 128, 2048
_FEATURES = 1024


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
    from engine.kernels.triton.expert_programs import lay_pairs

    num_pairs = chosen.numel()
    size = ROWS_OF_BLOCK if num_pairs <= ROWS_OF_BLOCK * num_experts else 2 * ROWS_OF_BLOCK
    num_blocks = num_pairs // size + min(num_pairs, num_experts)
    pairs, experts, blocks = (
        chosen.new_empty(sizes, dtype=torch.int64)
        for sizes in ((num_pairs,), (num_pairs,), (3, num_blocks))
    )
    constants, launch = laying_variant(num_pairs, num_experts, size)
    if num_pairs:
        with torch.cuda.device_of(chosen):
            lay_pairs[(num_experts + 1,)](
                *(chosen.contiguous(), pairs, blocks, experts, num_pairs, num_blocks),
                **constants,
                **launch,
            )
    return Routes(pairs, blocks, experts, size)


def laying_variant(num_pairs: int, num_experts: int, size: int) -> Variant:
    constants = {"NUM_EXPERTS": num_experts, "BINS": lanes(num_experts + 1), "SIZE": size}
    pairs = _FEW_PAIRS if num_pairs <= _FEW_PAIRS else _MANY_PAIRS
    return Variant(constants | {"PAIRS": pairs}, launch_of(4, 1))


def adding_variant(num_chosen: int) -> Variant:
    return Variant({"NUM_CHOSEN": num_chosen, "FEATURES": _FEATURES}, launch_of(4, 1))


def weighted_sum(
    outputs: torch.Tensor, weights: torch.Tensor, routes: Routes, dtype: torch.dtype
) -> torch.Tensor:
    """``outputs`` ``[num_pairs, features]``, ``weights`` ``[num_rows, num_chosen]``. Returns
    ``[num_rows, features]``: experts are added in the order in which they were chosen."""
    from engine.kernels.triton.expert_programs import add_outputs

    del routes
    (num_rows, num_chosen), num_features = weights.shape, outputs.shape[-1]
    total = outputs.new_empty(num_rows, num_features, dtype=dtype)
    constants, launch = adding_variant(num_chosen)
    if num_rows:
        with torch.cuda.device_of(outputs):
            add_outputs[(num_rows, -(-num_features // constants["FEATURES"]))](
                *(outputs.contiguous(), weights.contiguous(), total, num_features),
                **constants,
                **launch,
            )
    return total
