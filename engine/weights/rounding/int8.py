"""Weights rounded to 8 bits by groups of features.

Each 32 features of an output channel share a scale, as each 32 features of an input do
(``engine.model.product``), so that one value far above all others, as trained models have them in some
channels, coarsens the steps of its own group alone; with a scale per row SmolLM2's distributions move
five times as far (docs/quantization.md). A channel has a scale, and each of its groups a number by how
much it is smaller.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from engine.kernels.grouped_weight import GroupedWeight

ZERO_POINT = 128
"""Subtracted from codes, which are unsigned."""
GROUP = 32
"""Features of an input, and of a channel's weights, that share a scale."""
_LARGEST = 127
MOST_IN_FEATURES = (2**31 - 1) // _LARGEST**2
"""Longer sums of a single group could leave 32 bits."""
_SMALLEST_SCALE = 1e-12
_CHANNELS_AT_ONCE = 4096
"""Weights are quantised in slices, which bounds the memory that takes."""


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, group: int = GROUP) -> GroupedWeight:
    """Rounds ``weight`` ``[out_features, in_features]`` symmetrically, by the largest value of each
    output channel and of each ``group`` of features in it."""
    out_features, in_features = weight.shape
    empty = weight.new_empty
    codes = empty(weight.shape, dtype=torch.uint8)
    scales = empty(out_features, dtype=torch.float32)
    group_scales = empty(out_features, -(-in_features // group), dtype=torch.float16)
    parts = (each.split(_CHANNELS_AT_ONCE) for each in (weight, codes, scales, group_scales))
    for part, quantized, scale, by_group in zip(*parts, strict=True):
        exact = F.pad(part.float(), (0, -in_features % group)).unflatten(1, (-1, group))
        largest = exact.abs().amax(2)  # [channels, groups]
        scale.copy_(largest.amax(1) / _LARGEST).clamp_min_(_SMALLEST_SCALE)
        by_group.copy_(largest / (_LARGEST * scale[:, None]))
        steps = (scale[:, None] * by_group.float()).clamp_min_(_SMALLEST_SCALE)
        whole = (exact / steps[:, :, None]).round_().clamp_(-_LARGEST, _LARGEST)
        quantized.copy_(whole.flatten(1)[:, :in_features] + ZERO_POINT)
    return GroupedWeight(codes, 8, ZERO_POINT, group, group_scales, channel_scales=scales)


def quantize_by_channel(weight: torch.Tensor) -> GroupedWeight:
    """Rounds by the largest value of each output channel alone, for inputs with one scale for each row,
    as checkpoints in 8 bits hold it. Raises ValueError for weights that are too long."""
    if weight.shape[1] > MOST_IN_FEATURES:
        raise ValueError(f"8 bits: a sum of {weight.shape[1]} products may leave 32 bits")
    return quantize_weight(weight, weight.shape[1])._replace(scales=None)


@cache
def is_exact() -> bool:
    """Whether this machine has the instruction for products of bytes and computes what integer arithmetic
    says: the largest sums that there are come out right. Without the instruction the sums are the same,
    and take longer."""
    from engine.kernels.integers import has_integer_products

    return has_integer_products() and computes_whole_numbers()


@cache
def computes_whole_numbers() -> bool:
    """Whether products of this machine are what integer arithmetic says."""
    from engine.kernels.grouped_product import product
    from engine.kernels.integers import can_multiply
    from engine.kernels.packing import pack

    if not can_multiply():
        return False
    rows = torch.full((3, 2 * GROUP), float(_LARGEST))
    rows[1], rows[2, ::2] = -_LARGEST, -_LARGEST
    values = torch.full((3, 2 * GROUP), _LARGEST)
    values[1] = -_LARGEST
    values[2, 1::2] = 0
    codes = (values + ZERO_POINT).to(torch.uint8)
    weight = GroupedWeight(codes, 8, ZERO_POINT, 2 * GROUP, None, channel_scales=torch.ones(3))
    packed = pack([weight], *codes.shape)
    return torch.equal(product(rows, packed, torch.float32), rows @ values.float().T)
