"""Rows are copied as numbers name them, and side by side."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.rows import Recorded, can_copy, recorded_rows, recorded_side, reference


def run(recorded: Recorded) -> None:
    recorded.kernel.run(recorded.arguments, recorded.num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("width", [4, 64, 1728])
def test_rows_that_numbers_name_are_copied(dtype: torch.dtype, width: int) -> None:
    source = torch.arange(9 * width).view(9, width).to(dtype)
    numbers = torch.tensor([8, 0, 3, 3, -1, -9] * 20)
    assert can_copy(source, width, numbers)
    output = torch.empty(len(numbers), width, dtype=dtype)
    run(recorded_rows(source, numbers, width, output))
    assert torch.equal(output, reference(source, numbers))


def test_what_bits_mean_does_not_matter() -> None:
    source = torch.tensor([[torch.nan, -0.0, torch.inf, 1e-42]])
    numbers, output = torch.tensor([0]), torch.empty(1, 4)
    run(recorded_rows(source, numbers, 4, output))
    assert output.view(torch.int32).tolist() == source.view(torch.int32).tolist()


def test_numbers_out_of_range_read_nothing_else() -> None:
    """A recording trusts the numbers that it is given later."""
    source = torch.arange(12.0).view(3, 4)
    numbers, output = torch.tensor([1 << 40, -(1 << 40)]), torch.empty(2, 4)
    run(recorded_rows(source, numbers, 4, output))
    assert output.tolist() == [source[2].tolist(), source[0].tolist()]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 70))
def test_parts_lie_side_by_side(widths: list[int], num_rows: int) -> None:
    parts = [torch.randn(1, num_rows, 4 * width).bfloat16() for width in widths]
    output = torch.full((1, num_rows, 4 * sum(widths)), -7.0, dtype=torch.bfloat16)
    first = 0
    for part in parts:
        assert can_copy(part, part.shape[-1])
        run(recorded_side(part, output, first))
        first += part.shape[-1]
    assert torch.equal(output, torch.cat(parts, -1))


def test_others_are_left_to_torch() -> None:
    plain, numbers = torch.zeros(4, 16), torch.tensor([0, 1])
    assert can_copy(plain, 16, numbers)
    assert not can_copy(plain.T, 4, numbers)
    assert not can_copy(plain.bfloat16()[:, :3].contiguous(), 3, numbers)
    assert not can_copy(plain, 16, numbers.int())
    assert not can_copy(plain, 16, torch.tensor([0, 1, 2, 3])[::2])
    assert not can_copy(torch.zeros(0, 16), 16, numbers)
    assert not can_copy(torch.zeros(8, dtype=torch.int32)[1:5], 4, numbers)
    assert not can_copy(torch.zeros(4, 0), 0, numbers)
