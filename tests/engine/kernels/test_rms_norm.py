"""Norms of rows are those of the formula (``tests/engine/model/test_fusing`` says that bits are kept)."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.rms_norm import reference, rms_norm


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("num_features", [16, 48, 576])
@pytest.mark.parametrize("dtype", list(KINDS))
def test_rows_are_divided_by_their_root_mean_square(
    dtype: torch.dtype, num_features: int, is_rounded: bool
) -> None:
    rows, weight = (3 * torch.randn(5, 2, num_features)).to(dtype), torch.randn(num_features)
    got = rms_norm(rows, weight, 1e-5, is_rounded)
    expected = reference(rows, weight, 1e-5, is_rounded)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=4 * step, atol=step)
