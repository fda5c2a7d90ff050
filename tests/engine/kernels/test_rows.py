"""Rows, and numbers of each row, are copied as numbers name them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import KINDS
from engine.kernels.rows import recorded_rows, reference


def run(
    source: torch.Tensor, dim: int, numbers: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    found = recorded_rows(source, dim, numbers, output)
    assert found is not None
    found.kernel.run(found.arguments, found.num_threads)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("width", [4, 64, 1728])
def test_rows_that_numbers_name_are_copied(dtype: torch.dtype, width: int) -> None:
    source = torch.arange(9 * width).view(9, width).to(dtype)
    numbers = torch.tensor([8, 0, 3, 3, -1, -9] * 20)
    output = torch.empty(len(numbers), width, dtype=dtype)
    assert torch.equal(run(source, 0, numbers, output), reference(source, numbers))


def test_what_bits_mean_does_not_matter() -> None:
    source = torch.tensor([[torch.nan, -0.0, torch.inf, 1e-42]])
    numbers, output = torch.tensor([0]), torch.empty(1, 4)
    run(source, 0, numbers, output)
    assert output.view(torch.int32).tolist() == source.view(torch.int32).tolist()


def test_numbers_out_of_range_read_nothing_else() -> None:
    """A recording trusts the numbers that it is given later."""
    source = torch.arange(12.0).view(3, 4)
    numbers, output = torch.tensor([1 << 40, -(1 << 40)]), torch.empty(2, 4)
    run(source, 0, numbers, output)
    assert output.tolist() == [source[2].tolist(), source[0].tolist()]


@given(st.integers(2, 9), st.lists(st.integers(0, 16), min_size=1, max_size=40))
def test_numbers_of_each_row_are_picked(num_rows: int, picked: list[int]) -> None:
    for dtype in KINDS:
        source, numbers = torch.randn(num_rows, 17).to(dtype), torch.tensor(picked)
        output = torch.empty(num_rows, len(picked), dtype=dtype)
        assert torch.equal(run(source, 1, numbers, output), source[:, numbers])


def test_others_are_left_to_torch() -> None:
    plain, numbers, output = torch.zeros(4, 16), torch.tensor([0, 1]), torch.zeros(2, 16)
    assert recorded_rows(plain, 0, numbers, output) is not None
    assert recorded_rows(plain.T, 0, numbers, plain[:2, :4].contiguous()) is None
    assert recorded_rows(plain[:, :3].contiguous(), 0, numbers, output) is None
    assert recorded_rows(plain, 0, numbers.int(), output) is None
    assert recorded_rows(plain, 0, torch.tensor([0, 1, 2, 3])[::2], output) is None
    assert recorded_rows(torch.zeros(0, 16), 0, numbers, output) is None
    assert recorded_rows(torch.zeros(33, dtype=torch.int32)[1:], 0, numbers, output) is None
    assert recorded_rows(torch.zeros(2, 4, 4), 1, numbers, output) is None
    assert recorded_rows(plain, 1, -numbers, plain[:, :2].contiguous()) is None
