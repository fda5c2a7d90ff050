"""Rows in 8 bits: the compiled pass has the bits of torch's operations."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.int8_rows import can_quantize
from engine.model import int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 1040), (300, 512)])
def test_one_pass_has_the_bits_of_operations_one_by_one(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    rows[0, : shape[1] // 2] = 0
    rows[-1] = 0
    assert can_quantize(rows)
    values, scales = int8.quantize_rows(rows)
    monkeypatch.setattr(int8, "find_kernel", lambda _: None)
    expected = int8.quantize_rows(rows)
    assert torch.equal(values, expected.values)
    assert torch.equal(scales, expected.scales)


def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice() -> None:
    rows = torch.randn(3, 64)
    alone = int8.quantize_rows(rows[2:])
    rows[1, 5] = torch.nan
    values, scales = int8.quantize_rows(rows)
    assert scales.isnan().flatten().tolist() == [False, True, False]
    assert torch.equal(values[2:], alone.values)


def test_rows_in_a_wider_tensor_are_read_where_they_lie() -> None:
    wide = torch.randn(5, 96)
    part = wide[:, 32:64]
    assert can_quantize(part)
    for got, expected in zip(
        int8.quantize_rows(part), int8.quantize_rows(part.clone()), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 24), torch.zeros(2, 64).double(), torch.zeros(64, 2).T]
)
def test_others_are_left_to_torch(rows: torch.Tensor) -> None:
    assert not can_quantize(rows)
    assert int8.quantize_rows(rows).values.eq(128).all()
