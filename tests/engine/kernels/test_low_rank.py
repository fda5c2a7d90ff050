"""Products with adapters: each row's own, in one order of sums, and nothing for rows that have none."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import KINDS
from engine.kernels.low_rank import PackedAdapter, add_low_rank, reference
from worlds.random_tensors import drawn
from worlds.threads import threads

SHAPES = [(64, 80, 8), (48, 16, 1), (40, 23, 3), (16, 200, 130)]
"""Input features, output features, rank; some fill no last sixteen lanes."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def part(in_features: int, out_features: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = drawn(rank, in_features, seed=1) / in_features**0.5
    return first, drawn(out_features, rank, seed=2) / rank**0.5


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_get_their_own_adapters_product(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    in_features, out_features, rank = shape
    first, second = part(*shape)
    one = PackedAdapter(3, {1: (first, second)})
    other = PackedAdapter(3, {1: (first.flip(0), -2 * second.flip(1)), 2: (first, second)})
    rows = drawn(9, in_features, seed=3, dtype=dtype)
    # A layer may be some columns of a wider product.
    output = drawn(9, out_features + 5, seed=4, dtype=dtype)[:, 2:-3]
    before = output.clone()
    adapters = torch.tensor([0, one.address, other.address] * 3)
    add_low_rank(rows, output, adapters, place=1)
    for index, factor in enumerate((0.0, 1.0, -2.0)):
        expected = reference(rows, before, first, factor * second)[index::3]
        error = (output[index::3].float() - expected.float()).abs().max()
        assert error <= _TOLERANCE[dtype] * expected.float().abs().max()
    assert torch.equal(output[::3], before[::3])
    assert not torch.equal(output[1::3], before[1::3])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_its_bits_in_any_company(shape: tuple[int, int, int]) -> None:
    in_features, out_features, _ = shape
    adapter = PackedAdapter(1, {0: part(*shape)})
    rows = drawn(70, in_features, seed=5, dtype=torch.bfloat16)
    together = drawn(70, out_features, seed=6, dtype=torch.bfloat16)
    alone = together.clone()
    adapters = torch.full((70,), adapter.address)
    with threads(2):
        add_low_rank(rows, together, adapters, place=0)
    for row in range(70):
        part_of = slice(row, row + 1)
        add_low_rank(rows[part_of], alone[part_of], adapters[part_of], place=0)
    assert torch.equal(alone, together)


def test_layers_that_an_adapter_leaves_alone_keep_their_bits() -> None:
    adapter = PackedAdapter(2, {0: part(64, 80, 8)})
    output = drawn(4, 80, seed=7)
    before = output.clone()
    add_low_rank(drawn(4, 64, seed=8), output, torch.full((4,), adapter.address), place=1)
    assert torch.equal(output, before)
