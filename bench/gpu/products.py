"""What do products cost that keep a row's bits, and do they?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from engine.model.linear import (
    Call,
    LinearProduct,
    PackedLinear,
    cancelling,
    fastest_call,
    library_product,
    products_for,
    stable_span,
)

SHAPES = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
"""Inputs and outputs of the layers of 8 billion parameters' models."""
ROW_COUNTS = (1, 4, 16, 64, 256, 1024)
TOY_SHAPES = ((1040, 24),)
TOY_ROW_COUNTS = (1, 4, 5)
_TOLERANCE = 2.0**-6
"""Relative to the largest value: a step of bfloat16 and more."""
_REPEATS = 9


@dataclass(frozen=True, slots=True)
class ProductResult:
    """``span``: row counts whose calls give a row the same bits, as the probe found them; None: not even
    calls of 4 do. ``error``: against float64, relative to the largest value. ``seconds``: of so many
    rows, in calls of that span; ``fast_seconds``: by the library, in one call. ``is_chosen``: exact mode
    takes it here."""

    product: str
    in_features: int
    out_features: int
    dtype: str
    span: tuple[int, int] | None
    error: float
    seconds: dict[int, float]
    fast_seconds: dict[int, float]
    is_chosen: bool

    @property
    def is_own(self) -> bool:
        return self.product != library_product.__name__

    @property
    def holds(self) -> bool:
        """Ours has to keep bits in calls of any size; of the library's it is a finding."""
        keeps = self.span is not None and self.span[0] == 1
        return self.error < _TOLERANCE and (keeps or not self.is_own)

    def ratio(self, num_rows: int) -> float:
        return self.seconds[num_rows] / self.fast_seconds[num_rows]


@torch.inference_mode()
def check_products(
    device: torch.device,
    products: Sequence[LinearProduct] | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> list[ProductResult]:
    """Layers' products in bf16 by each of ``products``, or by each that exact mode chooses from."""
    named = products_for(device) if products is None else products
    return [
        result for shape in shapes for result in _check(device, named, shape, tuple(row_counts))
    ]


def _check(
    device: torch.device,
    products: Sequence[LinearProduct],
    shape: tuple[int, int],
    row_counts: tuple[int, ...],
) -> list[ProductResult]:
    dtype, most = torch.bfloat16, max(row_counts)
    weight, probe = cancelling(*shape, dtype, device)
    linear = nn.Linear(*shape, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    bound = [(each, PackedLinear(linear, Call(None, each))) for each in products]
    probe = probe[: 2 * most]
    spans = [stable_span(call, probe, most) for _, call in bound]
    steady = [
        (Call(span, product), call)
        for span, (product, call) in zip(spans, bound, strict=True)
        if span is not None
    ]
    chosen = fastest_call(steady, probe, most)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(most, shape[0], generator=generator).to(device, dtype)
    expected = rows[:4].double() @ weight.double().T
    fast = PackedLinear(linear)
    results = []
    for span, (product, _) in zip(spans, bound, strict=True):
        layer = PackedLinear(linear, Call(span, product))
        error = (layer(rows[:4]).double() - expected).abs().max() / expected.abs().max()
        results.append(
            ProductResult(
                product=product.__name__,
                in_features=shape[0],
                out_features=shape[1],
                dtype=str(dtype).removeprefix("torch."),
                span=None if span is None else (span.least, span.most),
                error=float(error),
                seconds={count: _seconds(layer, rows[:count]) for count in row_counts},
                fast_seconds={count: _seconds(fast, rows[:count]) for count in row_counts},
                is_chosen=chosen is not None and chosen.product is product,
            )
        )
    return results


def _seconds(layer: nn.Module, rows: torch.Tensor) -> float:
    """Median of several calls, after one."""
    layer(rows)
    times = []
    for _ in range(_REPEATS if rows.device.type == "cuda" else 1):
        _wait(rows.device)
        start = time.perf_counter()
        layer(rows)
        _wait(rows.device)
        times.append(time.perf_counter() - start)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
