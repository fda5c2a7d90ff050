"""torch's functions that kernels compute instead, in every way in which models call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels import KINDS
from engine.model.linear import pack_linears
from engine.model.row_functions import replaced

SERVED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "sigmoid": (Tensor.sigmoid, (), {}),
    "silu": (F.silu, (), {}),
    "gelu": (F.gelu, (), {"approximate": "tanh"}),
    "softplus": (F.softplus, (), {}),
    "mean": (Tensor.mean, (-1,), {"keepdim": True}),
    "means": (torch.mean, (), {"dim": 2}),
    "sum": (Tensor.sum, (), {"dim": [-1], "keepdim": True}),
    "softmax": (F.softmax, (), {"dim": -1, "dtype": torch.float32}),
    "softmax of a type": (torch.softmax, (2,), {}),
    "top": (torch.topk, (3,), {"dim": -1, "sorted": False}),
}
LEFT: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "gelu": (F.gelu, (), {}),
    "softplus": (F.softplus, (2.0,), {}),
    "all": (Tensor.sum, (), {}),
    "named otherwise": (Tensor.sum, (), {"axis": -1}),
    "columns": (Tensor.mean, (-2,), {}),
    "double": (Tensor.sum, (-1,), {"dtype": torch.float64}),
    "softmax": (F.softmax, (), {"dim": 0}),
    "smallest": (torch.topk, (2,), {"largest": False}),
    "too many": (torch.topk, (65,), {}),
    "relu": (F.relu, (), {}),
}


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", SERVED)
def test_results_are_torchs_within_rounding(name: str, dtype: torch.dtype) -> None:
    func, args, kwargs = SERVED[name]
    values = drawn(dtype, 2, 5, 100)
    got, expected = replaced(func, (values, *args), kwargs), func(values, *args, **kwargs)
    if name == "top":  # which of equal ones, and in which order, is torch's choice
        assert torch.equal(values.gather(-1, got.indices), got.values)
        got, expected = got.values, expected.values.sort(-1, descending=True).values
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_torch(name: str) -> None:
    func, args, kwargs = LEFT[name]
    assert replaced(func, (drawn(torch.float32, 2, 5, 100), *args), kwargs) is None


def test_what_is_to_be_in_place_is() -> None:
    values = drawn(torch.float32, 3, 20)
    expected = F.silu(values)
    got = replaced(F.silu, (values,), {"inplace": True})
    assert got.data_ptr() == values.data_ptr()
    torch.testing.assert_close(values, expected)


def test_numbers_without_kernels_are_left_to_torch() -> None:
    for values in (torch.ones(3), torch.ones(2, 3, dtype=torch.int64), torch.ones(0, 3)):
        given = values if values.dim() > 1 else values.double()
        assert replaced(Tensor.sum, (given, -1), {}) is None
    assert replaced(Tensor.sigmoid, (torch.tensor(1.0),), {}) is None


class Gated(nn.Module):
    """A norm and a gate, as hybrids write them."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, rows: Tensor) -> Tensor:
        shares = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        return rows * shares * self.compute(rows)


@torch.inference_mode()
@pytest.mark.parametrize(
    "compute",
    [torch.sigmoid, F.silu, F.gelu, F.mish, F.softplus, partial(F.softplus, beta=2.0)],
    ids=["sigmoid", "silu", "gelu", "mish", "softplus", "of another slope"],
)
def test_a_row_has_the_bits_of_the_first_forward_in_every_other(
    compute: Callable[[Tensor], Tensor],
) -> None:
    """Which modules are to be watched the first forward finds out."""
    model, rows = nn.Sequential(Gated(compute)), drawn(torch.float32, 70, 37)
    assert pack_linears(model, 256, exact=True) == set()
    first = model(rows)
    assert torch.equal(model(rows), first)
    for count in (1, 2, 5, 33):
        assert torch.equal(model(rows[:count]), first[:count])
        assert torch.equal(model(rows[-count:]), first[70 - count :])
