"""Sums, softmax and largest numbers of rows are near torch's, and the same in any company."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.row_numbers import largest, softmax, sums

WIDTHS = (1, 5, 16, 60, 256, 1000)


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_results_are_near_torchs(width: int, dtype: torch.dtype) -> None:
    rows = drawn(dtype, 3, 7, width)
    mean = rows.double().mean(-1, keepdim=True).to(dtype)
    torch.testing.assert_close(sums(rows, width), mean, rtol=1e-2, atol=1e-6)
    shares = softmax(rows, torch.float32)
    torch.testing.assert_close(shares, rows.float().softmax(-1), rtol=1e-5, atol=1e-7)
    assert softmax(rows, dtype).dtype == dtype


def test_a_sum_is_a_float32s() -> None:
    rows = drawn(torch.float32, 9, 777)
    exact = rows.double().sum(-1, keepdim=True)
    assert bool(((sums(rows) - exact).abs() <= 2e-7 * rows.abs().sum(-1, keepdim=True)).all())


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_same_bits_alone_and_in_any_layout(width: int) -> None:
    rows = drawn(torch.float32, 200, width)
    apart = torch.stack([rows, rows], -1)[..., 0]
    assert not width > 1 or not apart.is_contiguous()
    for function in (sums, lambda each: softmax(each, torch.float32)):
        together = function(rows)
        assert torch.equal(together, torch.cat([function(row) for row in rows.split(1)]))
        assert torch.equal(together, function(apart))


def test_what_is_minus_infinity_has_no_share_and_what_is_no_number_shows() -> None:
    rows = torch.tensor([[1.0, -torch.inf, 2.0], [torch.nan, 1.0, 2.0], [-torch.inf] * 3])
    got, expected = softmax(rows, torch.float32), rows.softmax(-1)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_come_first_and_of_equal_ones_the_first(width: int, dtype: torch.dtype) -> None:
    rows = drawn(dtype, 4, 9, width)
    for count in {1, min(width, 8), width if width < 99 else 1}:
        values, places = largest(rows, count)
        expected = rows.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(values, expected.values[..., :count])
        assert torch.equal(places, expected.indices[..., :count])


def test_places_are_within_the_row_whatever_it_holds() -> None:
    rows = torch.tensor([[torch.nan] * 4, [torch.nan, 1.0, torch.nan, 2.0], [-torch.inf] * 4])
    _, places = largest(rows, 3)
    assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in places.tolist())
