"""Times layers' products in exact mode and with weights in 4 bits, and checks that rows keep their
bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from engine.kernels.triton.code_ops import look_up, product
from engine.kernels.triton.packed_codes import pack
from engine.model.layers import PackedWeight
from engine.model.linear import DeviceWeight, cancelling, keeps_bits
from engine.weights.rounding.gptq import round_to_nearest

SHAPES = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
"""Inputs and outputs of the layers of 8 billion parameters' models."""
ROW_COUNTS = (1, 8, 32, 64, 256, 1024)
TOY_SHAPES = ((1040, 24),)
TOY_ROW_COUNTS = (1, 4, 5)
_TOLERANCE = 2.0**-6
"""Relative to the largest value: a step of bfloat16 and more."""
_REPEATS = 9
_MORE_THAN_CACHES = 1 << 29
"""Bytes of weights that take turns, several times the largest cache."""

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProductResult:
    """A layer's product by our program. ``dtype``: of its weights, or "4 bits". ``keeps_bits``: a row has
    the same bits in calls of any of the probed sizes. ``error``: against float64, relative to the largest
    value. ``seconds``: of so many rows; ``fast_seconds``: of torch's library and a weight in bf16, whose
    bits follow the number of rows."""

    in_features: int
    out_features: int
    dtype: str
    keeps_bits: bool
    error: float
    seconds: dict[int, float]
    fast_seconds: dict[int, float]

    @property
    def holds(self) -> bool:
        return self.error < _TOLERANCE and self.keeps_bits

    def ratio(self, num_rows: int) -> float:
        return self.seconds[num_rows] / self.fast_seconds[num_rows]


class InFourBits:
    """A weight rounded to 4 bits, groups of 32 with scales and zero points."""

    def __init__(self, weight: torch.Tensor) -> None:
        rounded = round_to_nearest(weight, (1.0,))
        self._packed = pack([rounded], *weight.shape)

    @property
    def weight(self) -> torch.Tensor:
        """See ``PackedWeight``."""
        channels = torch.arange(self._packed.out_features, device=self._packed.blocks.device)
        return look_up(self._packed, channels, torch.float32)

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight``."""
        return product(rows, self._packed, rows.dtype)


def _in_bf16(weight: torch.Tensor) -> DeviceWeight:
    return DeviceWeight(weight.clone(), None)


_MAKERS: dict[str, tuple[float, Callable[[torch.Tensor], PackedWeight]]] = {
    "bfloat16": (2.0, _in_bf16),
    "4 bits": (0.6, InFourBits),
}
"""Bytes of a weight, and what makes one of a matrix."""


@torch.inference_mode()
def check_products(
    device: torch.device,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> list[ProductResult]:
    """Layers' products of rows in bf16, which need Triton there."""
    return [_check(device, shape, tuple(row_counts), name) for name in _MAKERS for shape in shapes]


def _check(
    device: torch.device, shape: tuple[int, int], row_counts: tuple[int, ...], name: str
) -> ProductResult:
    dtype, most = torch.bfloat16, max(row_counts)
    weight, probe = cancelling(*shape, dtype, device)
    num_bytes, make = _MAKERS[name]
    packed = make(weight)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(most, shape[0], generator=generator).to(device, dtype)
    expected = rows[:4].double() @ packed.weight.double().T
    error = (packed.times(rows[:4]).double() - expected).abs().max() / expected.abs().max()
    ours = [make(weight).times for _ in range(_num_copies(weight, num_bytes))]
    theirs = [partial(F.linear, weight=weight.clone()) for _ in range(_num_copies(weight, 2.0))]
    parts = {count: rows[:count] for count in row_counts}
    return ProductResult(
        in_features=shape[0],
        out_features=shape[1],
        dtype=name,
        keeps_bits=keeps_bits(packed, probe[: 2 * most], most),
        error=float(error),
        seconds={count: _seconds(ours, part) for count, part in parts.items()},
        fast_seconds={count: _seconds(theirs, part) for count, part in parts.items()},
    )


def _num_copies(weight: torch.Tensor, num_bytes: float) -> int:
    """Returns how many copies of the weight exceed a device's caches, so that it reads them from memory,
    as in a model."""
    if weight.device.type != "cuda":
        return 1
    return max(1, round(_MORE_THAN_CACHES / (weight.numel() * num_bytes)))


def _seconds(products: Sequence[Product], rows: torch.Tensor) -> float:
    """Median of several rounds, by product. On a device a round is a graph, as steps are: what the
    host needs to launch a product is not in it."""

    def multiply() -> None:
        for each in products:
            each(rows)

    multiply()
    if rows.device.type != "cuda":
        start = time.perf_counter()
        multiply()
        return (time.perf_counter() - start) / len(products)
    torch.cuda.synchronize(rows.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    times = []
    for _ in range(_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return median(times) / len(products)
