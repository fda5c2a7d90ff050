"""Sums of tensors have torch's bits."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.sums import can_add, recorded_sum, reference


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("shape", [(1, 16), (3, 80), (70, 4096)])
def test_sums_are_rounded_as_torch_rounds_them(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    left[0, 3], left[0, 4], right[0, 4] = torch.nan, torch.inf, -torch.inf
    assert can_add(left, right)
    output = torch.empty_like(left)
    kernel, told, num_threads = recorded_sum(left, right, output)
    kernel.run(told, num_threads)
    for expected in (left + right, reference(left, right)):
        assert torch.equal(output.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_others_are_left_to_torch() -> None:
    plain = torch.zeros(4, 16)
    assert not can_add(plain, torch.zeros(16))
    assert not can_add(plain, plain.bfloat16())
    assert not can_add(plain.T, plain.T)
    assert not can_add(plain.double(), plain.double())
    assert not can_add(torch.zeros(3, 5), torch.zeros(3, 5))
