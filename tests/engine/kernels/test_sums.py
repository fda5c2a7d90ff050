"""Sums of tensors have torch's bits."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.sums import add_all, can_add, sum_arguments


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("shape", [(1, 16), (3, 80), (70, 4096)])
def test_sums_are_rounded_as_torch_rounds_them(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    left[0, 3], left[0, 4], right[0, 4] = torch.nan, torch.inf, -torch.inf
    assert can_add(left, right)
    output = torch.empty_like(left)
    told, num_threads = sum_arguments(left, right, output)
    add_all.run(told.buffer_info()[0], num_threads)
    assert torch.equal(output.nan_to_num(7.0), (left + right).nan_to_num(7.0))


def test_others_are_left_to_torch() -> None:
    plain = torch.zeros(4, 16)
    assert not can_add(plain, torch.zeros(16))
    assert not can_add(plain, plain.bfloat16())
    assert not can_add(plain.T, plain.T)
    assert not can_add(plain.double(), plain.double())
    assert not can_add(torch.zeros(3, 5), torch.zeros(3, 5))
