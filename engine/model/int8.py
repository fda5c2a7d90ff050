"""Linear layers in 8 bits: weights and inputs by groups of features, sums in integers (W8A8).

Each 32 features of a row share a scale, so that one value far above all others, as trained models have
them in some channels, coarsens the steps of its own group alone; with a scale per row SmolLM2's
distributions move five times as far (docs/quantization.md). Weights have a scale per output channel, and
by how much each group of 32 is smaller.

Sums within a group are sums of integers; groups are added in ascending order, with one rounding each. So
a row's result has the same bits in whatever company it is computed: one loop of our own for few rows and
many (``engine.kernels.int8_product``), on every CPU with VNNI.

Checkpoints in compressed-tensors' format "int-quantized" keep their own scheme: a scale per channel, and
inputs by one scale per row, which is a single group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels import KINDS

if TYPE_CHECKING:
    from engine.kernels.int8_product import Gate

GROUP = 32
"""Features of an input, and of a channel's weights, that share a scale."""
_LARGEST = 127
MOST_IN_FEATURES = (2**31 - 1) // _LARGEST**2
"""Longer sums of a single group could leave 32 bits."""
_SMALLEST_SCALE = 1e-12
_CHANNELS_AT_ONCE = 4096
"""Weights are quantised in slices, which bounds the memory that takes."""


class Int8Weight(NamedTuple):
    """``values`` ``[out_features, in_features]`` int8 times ``scales`` ``[out_features]`` float32, times
    ``group_scales`` ``[out_features, groups]`` float16 of ``GROUP`` features each, if there are such."""

    values: torch.Tensor
    scales: torch.Tensor
    group_scales: torch.Tensor | None = None


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, group: int = GROUP) -> Int8Weight:
    """Rounds ``weight`` ``[out_features, in_features]`` symmetrically, by the largest value of each
    output channel and of each ``group`` of features in it."""
    out_features, in_features = weight.shape
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(out_features)
    group_scales = torch.empty(out_features, -(-in_features // group), dtype=torch.float16)
    parts = (each.split(_CHANNELS_AT_ONCE) for each in (weight, values, scales, group_scales))
    for part, quantized, scale, by_group in zip(*parts, strict=True):
        exact = F.pad(part.float(), (0, -in_features % group)).unflatten(1, (-1, group))
        largest = exact.abs().amax(2)  # [channels, groups]
        scale.copy_(largest.amax(1) / _LARGEST).clamp_min_(_SMALLEST_SCALE)
        by_group.copy_(largest / (_LARGEST * scale[:, None]))
        steps = (scale[:, None] * by_group.float()).clamp_min_(_SMALLEST_SCALE)
        whole = (exact / steps[:, :, None]).round_().clamp_(-_LARGEST, _LARGEST)
        quantized.copy_(whole.flatten(1)[:, :in_features])
    return Int8Weight(values, scales, group_scales)


def quantize_by_channel(weight: torch.Tensor) -> Int8Weight:
    """Rounds by the largest value of each output channel alone, as checkpoints in 8 bits hold it."""
    values, scales, _ = quantize_weight(weight, weight.shape[1])
    return Int8Weight(values, scales)


class Int8Product:
    """Products of rows with the weights of layers that read one input, side by side.

    ``weights``: all with scales of groups, or all without. ``biases``: one, or None, for each of them.
    ``dtype``: of the result. Raises ValueError for weights without such scales that are too long.
    """

    def __init__(
        self,
        weights: Sequence[Int8Weight],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> None:
        from engine.kernels.int8_product import PackedWeights

        values = torch.cat([each.values for each in weights])
        scales = torch.cat([each.scales for each in weights])
        by_group = [each.group_scales for each in weights if each.group_scales is not None]
        self.out_features, self.in_features = values.shape
        self.dtype = dtype
        if not by_group and self.in_features > MOST_IN_FEATURES:
            raise ValueError(f"8 bits: a sum of {self.in_features} products may leave 32 bits")
        whole_row = self.in_features + -self.in_features % GROUP
        self._packed = PackedWeights(
            values,
            scales,
            torch.cat(by_group) if by_group else None,
            _joined(biases, weights),
            GROUP if by_group else whole_row,
        )
        self._num_layers = len(weights)
        self._inputs: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        self._num_read = 0

    @property
    def num_bytes(self) -> int:
        return int(self._packed.num_bytes)

    def __call__(self, rows: torch.Tensor, gate: Gate | None = None) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``, or twice as many features that ``gate`` makes one half
        of; returns ``[num_rows, out_features]``."""
        rows = rows if rows.dtype in KINDS else rows.float()
        result: torch.Tensor = self._packed.times(rows, self.dtype, gate)
        return result

    def shared(self, inputs: torch.Tensor) -> torch.Tensor:
        """Takes the ``inputs`` ``[.., in_features]`` of one of the layers; returns ``[.., out_features]``
        of all of them, computed when the first one asks and kept until all have. A layer that has
        another input than the one before it computes the product anew."""
        result = self._result
        if result is None or inputs is not self._inputs:
            flat = inputs.reshape(-1, inputs.shape[-1])
            result = self(flat).view(*inputs.shape[:-1], -1)
            self._inputs, self._result, self._num_read = inputs, result, 0
        self._num_read += 1
        if self._num_read == self._num_layers:
            self._inputs = self._result = None
        return result


def _joined(
    biases: Sequence[torch.Tensor | None], weights: Sequence[Int8Weight]
) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    parts = zip(biases, weights, strict=True)
    return torch.cat(
        [torch.zeros_like(w.scales) if b is None else b.detach().float() for b, w in parts]
    )


@cache
def is_exact() -> bool:
    """Whether this machine computes what integer arithmetic says. Without VNNI there is no loop for it;
    with it, the largest sums that there are come out right, or nothing is computed in 8 bits."""
    from engine.kernels.int8_product import can_multiply

    if not can_multiply():
        return False
    rows = torch.full((3, 2 * GROUP), float(_LARGEST))
    rows[1], rows[2, ::2] = -_LARGEST, -_LARGEST
    values = torch.full((3, 2 * GROUP), _LARGEST, dtype=torch.int8)
    values[1] = -_LARGEST
    values[2, 1::2] = 0
    product = Int8Product([Int8Weight(values, torch.ones(3))], [None], torch.float32)
    return torch.equal(product(rows), rows @ values.float().T)
