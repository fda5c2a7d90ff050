"""Linear layers in 8 bits: weights per output channel, inputs per row, sums in integers (W8A8).

A row is quantised by its own largest value and multiplied in integer arithmetic; nothing is rounded
before a sum is complete. So a row's result has the same bits in whatever company it is computed, without
spans of row counts or padding. And it is the cheapest product that CPUs with VNNI or AMX have: half the
bytes of bf16, and further rows at a fraction of a first one's time.

oneDNN computes it (``torch.ops.onednn``), from unsigned inputs with zero point 128: signed ones take a
reference path. Few rows are multiplied with the same packed weights by a kernel of our own, which reads
them at twice the speed and has the same bits. Weights as in compressed-tensors' format "int-quantized":
symmetric, a scale per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels import find_kernel

if TYPE_CHECKING:
    from engine.kernels.int8_rows import Gate

_ZERO_POINT = 128
_LARGEST = 127
MOST_IN_FEATURES = (2**31 - 1) // (_ZERO_POINT * _LARGEST)
"""Longer sums could leave 32 bits."""
_SMALLEST_SCALE = 1e-12
_QUANTIZING = (_LARGEST, _SMALLEST_SCALE, _ZERO_POINT + 0.5)
"""Largest value, smallest scale, and what is added before the fraction is cut off."""
_KERNEL = "int8_product"
Kernel = Literal["whole sums", "float sums", "none"]
_FEW_ROWS = 96
"""Of more than so many, oneDNN's product is faster where there is AMX."""
_CHANNELS_AT_ONCE = 4096
"""Weights are quantised in slices, which bounds the memory that takes."""
_CHECKED_ROWS = 16
_PROBED_ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, 100, 256)


class Int8Weight(NamedTuple):
    """``values`` ``[out_features, in_features]`` int8 times ``scales`` ``[out_features]`` float32."""

    values: torch.Tensor
    scales: torch.Tensor


class Int8Rows(NamedTuple):
    """``values`` ``[rows, in_features]`` uint8, less 128, times ``scales`` ``[rows, 1]`` float32."""

    values: torch.Tensor
    scales: torch.Tensor


@torch.no_grad()
def quantize_weight(weight: torch.Tensor) -> Int8Weight:
    """By the largest value of each output channel, symmetric.

    ``weight``: ``[out_features, in_features]``.
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], device=weight.device)
    parts = (each.split(_CHANNELS_AT_ONCE) for each in (weight.detach(), values, scales))
    for part, quantized, scale in zip(*parts, strict=True):
        exact = part.float()
        scale.copy_(exact.abs().amax(1) / _LARGEST).clamp_min_(_SMALLEST_SCALE)
        quantized.copy_((exact / scale[:, None]).round_())
    return Int8Weight(values, scales)


def quantize_rows(rows: torch.Tensor, gate: Gate | None = None) -> Int8Rows:
    """Symmetric, by the largest value of each row; ``rows`` ``[rows, in_features]``, or twice as many
    features that ``gate`` makes one half of, which takes compiled kernels.

    In one pass where that has been compiled, else by torch, with the same bits: both round once for each
    operation.
    """
    kernel = find_kernel("int8_rows")
    if kernel is not None and kernel.can_quantize(rows):
        return Int8Rows(*kernel.quantize_rows(rows, *_QUANTIZING, gate))
    assert gate is None
    rows = rows.float()
    scales = (rows.abs().amax(1, keepdim=True) / _LARGEST).clamp_min_(_SMALLEST_SCALE)
    values = (rows / scales).add_(_QUANTIZING[2]).to(torch.uint8)  # cut off: so the half rounds
    return Int8Rows(values, scales)


class Int8Product:
    """Products of rows with the weights of layers that read one input, side by side.

    ``biases``: one, or None, for each of ``weights``. ``dtype``: of the result. ``kernel``: how few rows
    are multiplied; None: as has oneDNN's bits on this machine.
    """

    def __init__(
        self,
        weights: Sequence[Int8Weight],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        kernel: Kernel | None = None,
    ) -> None:
        values = torch.cat([each.values for each in weights])
        self.out_features, self.in_features = values.shape
        self.scales = torch.cat([each.scales for each in weights])
        self.bias = _joined(biases, weights)
        self.dtype = dtype
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(values, None)
        kernel = kernel or find_agreeing_kernel(self.in_features, self.out_features)
        self._for_few_rows = None if kernel == "none" else self._read_packed(values, kernel)

    def _read_packed(self, values: torch.Tensor, kernel: Kernel) -> Any:
        added = values.sum(1, dtype=torch.int32) * -_ZERO_POINT
        address = torch.ops.mkldnn.data_ptr(self._packed)
        weights = find_kernel(_KERNEL).PackedWeights
        return weights(
            self.in_features, address, self.scales, added, self.bias, kernel == "whole sums"
        )

    @property
    def num_bytes(self) -> int:
        return self.out_features * (self.in_features + self.scales.element_size())

    def __call__(self, rows: torch.Tensor, gate: Gate | None = None) -> torch.Tensor:
        """``rows`` as ``quantize_rows`` takes them; returns ``[rows, out_features]``."""
        if self._for_few_rows is not None and len(rows) <= _FEW_ROWS:
            result: torch.Tensor = self._for_few_rows.times(rows, self.dtype, _QUANTIZING, gate)
            return result
        return self.of_int8(quantize_rows(rows, gate))

    def of_int8(self, rows: Int8Rows) -> torch.Tensor:
        sums = _product(rows.values, self._packed, self.scales, self._zero_points)
        kernel = find_kernel("row_scales")
        if kernel is not None and kernel.can_scale(self.out_features, self.dtype):
            scaled: torch.Tensor = kernel.scale_rows(sums, rows.scales, self.bias, self.dtype)
            return scaled
        if self.bias is not None:
            return sums.mul_(rows.scales).add_(self.bias).to(self.dtype)
        return torch.mul(sums, rows.scales, out=torch.empty_like(sums, dtype=self.dtype))


def _product(
    rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor
) -> torch.Tensor:
    """``[rows, out_features]`` float32, scaled by channel."""
    result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, _ZERO_POINT, packed, scales, zero_points,
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
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


class SharedProduct:
    """Computed when the first of its layers is called, and kept until all have read it.

    A layer that is called with another input than the one before it computes the product anew.
    """

    def __init__(self, product: Int8Product, num_layers: int) -> None:
        self.product = product
        self._num_layers = num_layers
        self._inputs: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        self._num_read = 0

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` ``[.., in_features]``; returns ``[.., out_features]`` of all layers."""
        result = self._result
        if result is None or inputs is not self._inputs:
            flat = inputs.reshape(-1, inputs.shape[-1])
            result = self.product(flat).view(*inputs.shape[:-1], -1)
            self._inputs, self._result, self._num_read = inputs, result, 0
        self._num_read += 1
        if self._num_read == self._num_layers:
            self._inputs = self._result = None
        return result


class Int8Linear(nn.Module):
    """In ``nn.Linear``'s place: ``out_features`` columns, from ``first`` on, of a product that it may
    share with the layers that read its input."""

    def __init__(self, shared: SharedProduct, first: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = shared.product.in_features, out_features
        self.shared = shared
        self._first = first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.shared.of(inputs)
        if result.shape[-1] == self.out_features:
            return result
        return result.narrow(-1, self._first, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


class StoredInt8Linear(nn.Module):
    """A layer as a checkpoint in 8 bits brings it, before ``quantize_model`` gives it a product.

    ``weight`` ``[out_features, in_features]`` int8, ``weight_scale`` ``[out_features, 1]``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty(out_features, 1, dtype=torch.float32)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
            if bias
            else None
        )

    def stored(self) -> Int8Weight:
        return Int8Weight(self.weight.detach(), self.weight_scale.detach().float().flatten())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As if the weights were of the inputs' type; for forwards before the layer is replaced."""
        return F.linear(inputs, (self.weight * self.weight_scale).to(inputs.dtype), self.bias)


def is_exact(in_features: int, out_features: int) -> bool:
    """Whether this machine computes what integer arithmetic says, and a row's bits are the same alone, at
    every place and among any number of rows.

    Without VNNI, oneDNN adds pairs of products in 16 bits, where large ones are cut off: the probe's rows
    and weights take their largest values.
    """
    if find_agreeing_kernel(in_features, out_features) != "none":
        return True
    return _is_exact(in_features, out_features, "none")


@cache
def find_agreeing_kernel(in_features: int, out_features: int) -> Kernel:
    """How few rows are multiplied by our own kernel, with which ``is_exact`` says yes; or that they are
    not. oneDNN adds what the zero point makes of a sum before it becomes a float, or, with AMX, after."""
    kernel = find_kernel(_KERNEL)
    if kernel is None or not kernel.can_multiply(in_features, out_features):
        return "none"
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return "none"
    weight = torch.zeros(out_features, in_features, dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    num_bytes = kernel.packed_bytes(in_features, out_features)
    if not packed.is_mkldnn or torch.ops.mkldnn._nbytes(packed) < num_bytes:
        return "none"  # packed in some other way
    ways: tuple[Kernel, ...] = ("whole sums", "float sums")
    return next((way for way in ways if _is_exact(in_features, out_features, way)), "none")


@cache
def _is_exact(in_features: int, out_features: int, kernel: Kernel) -> bool:
    rows, weight = _probes(in_features, out_features)
    product = Int8Product(
        [Int8Weight(weight, torch.ones(out_features))], [None], torch.float32, kernel
    )
    inputs = rows.float()
    every = product(inputs)
    return _are_sums(every[:_CHECKED_ROWS], rows[:_CHECKED_ROWS], weight) and all(
        torch.equal(product(inputs[start : start + count]), every[start : start + count])
        for count in _PROBED_ROWS
        for start in ((0,) if count > 1 else range(8))
    )


def _are_sums(got: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Those beyond 24 bits are rounded, each in one way."""
    parts = zip(got.split(_CHANNELS_AT_ONCE, 1), weight.split(_CHANNELS_AT_ONCE), strict=True)
    return all(
        # Doubles hold them exactly.
        torch.allclose(part.double(), rows.double() @ few.double().T, rtol=1e-6, atol=64.0)
        for part, few in parts
    )


def _probes(in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights, some with the largest sums that there are, and with odd ones near them."""
    generator = torch.Generator().manual_seed(0)
    size = (max(_PROBED_ROWS), in_features)
    rows = torch.randint(-_LARGEST, _LARGEST + 1, size, generator=generator)
    weight = torch.randint(
        -_LARGEST,
        _LARGEST + 1,
        (out_features, in_features),
        generator=generator,
        dtype=torch.int8,
    )
    rows[:2, ::2] = weight[:2, ::2] = _LARGEST
    for values in (rows[2:6], weight[2:6]):
        few = torch.randint(0, 2, values.shape, generator=generator)
        values.copy_(_LARGEST - few)
    rows[:, 0] = _LARGEST  # so that a row's scale is 1
    return rows, weight
