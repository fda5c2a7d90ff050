"""Rows of an integer product, scaled as torch scales them."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.row_scales import can_scale, scale_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_rows_have_the_bits_of_torch(num_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    sums = torch.randn(num_rows, 1040, generator=generator) * 100
    sums[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    scales = torch.rand(num_rows, 1, generator=generator)
    bias = torch.randn(1040, generator=generator) if has_bias else None
    expected = sums * scales if bias is None else sums * scales + bias
    found = scale_rows(sums, scales, bias, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.nan_to_num(7.0), expected.to(dtype).nan_to_num(7.0))
    assert torch.equal(found.isnan(), expected.isnan())


def test_what_does_not_fit_sixteen_lanes_is_torchs() -> None:
    assert can_scale(1040, torch.bfloat16)
    assert not can_scale(1041, torch.bfloat16)
    assert not can_scale(1040, torch.float64)
