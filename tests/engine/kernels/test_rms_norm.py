"""Norms of rows are those of the formula (``tests/engine/model/test_fusing`` says that bits are kept)."""

from __future__ import annotations

import os
import subprocess
import sys

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


NORM = """
import torch
from engine.kernels.rms_norm import reference, rms_norm
rows, weight = torch.randn(3, 1, 64).half(), torch.randn(64)
torch.testing.assert_close(rms_norm(rows, weight, 1e-5, True), reference(rows, weight, 1e-5, True))
"""


def test_floats_of_16_bits_are_read_where_no_instructions_do() -> None:
    """On a CPU of before 2012, or a small one of 2021: without F16C, which is imitated."""
    cpu = {"NUMBA_CPU_NAME": "westmere", "NUMBA_CPU_FEATURES": "+sse4.2"}
    done = subprocess.run([sys.executable, "-c", NORM], env=os.environ | cpu, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
