"""What do products of layers cost in exact mode, and do rows keep their bits?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from engine.model.linear import DeviceWeight, cancelling, keeps_bits

SHAPES = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
"""Inputs and outputs of the layers of 8 billion parameters' models."""
ROW_COUNTS = (1, 4, 16, 64, 256, 1024)
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
    """A layer's product by our program. ``keeps_bits``: a row has the same bits in calls of any of the
    probed sizes. ``error``: against float64, relative to the largest value. ``seconds``: of so many rows;
    ``fast_seconds``: of torch's library, whose bits follow the number of rows."""

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


@torch.inference_mode()
def check_products(
    device: torch.device,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> list[ProductResult]:
    """Layers' products in bf16, which need Triton there."""
    return [_check(device, shape, tuple(row_counts)) for shape in shapes]


def _check(
    device: torch.device, shape: tuple[int, int], row_counts: tuple[int, ...]
) -> ProductResult:
    dtype, most = torch.bfloat16, max(row_counts)
    weight, probe = cancelling(*shape, dtype, device)
    packed = DeviceWeight(weight, None)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(most, shape[0], generator=generator).to(device, dtype)
    expected = rows[:4].double() @ weight.double().T
    error = (packed.times(rows[:4]).double() - expected).abs().max() / expected.abs().max()
    copies = [weight] + [weight.clone() for _ in range(_num_copies(weight) - 1)]
    ours = [DeviceWeight(copy, None).times for copy in copies]
    theirs = [partial(F.linear, weight=copy) for copy in copies]
    parts = {count: rows[:count] for count in row_counts}
    return ProductResult(
        in_features=shape[0],
        out_features=shape[1],
        dtype=str(dtype).removeprefix("torch."),
        keeps_bits=keeps_bits(packed, probe[: 2 * most], most),
        error=float(error),
        seconds={count: _seconds(ours, part) for count, part in parts.items()},
        fast_seconds={count: _seconds(theirs, part) for count, part in parts.items()},
    )


def _num_copies(weight: torch.Tensor) -> int:
    """Of the weight, so that a device reads them from its memory, as it does in a model, and not from a
    cache."""
    if weight.device.type != "cuda":
        return 1
    return max(1, _MORE_THAN_CACHES // (weight.numel() * weight.element_size()))


def _seconds(products: Sequence[Product], rows: torch.Tensor) -> float:
    """Median of several rounds, by product. On a device a round is a graph, as steps are: what the
    host needs to launch a product is not in it."""

    def multiply() -> None:
        for product in products:
            product(rows)

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
