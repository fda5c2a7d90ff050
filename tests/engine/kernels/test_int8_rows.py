"""Rows in 8 bits: records have the bits of torch's operations. Gated ones: values are torch's but for a
step of their type, and bits the same in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.int8_rows import (
    ACTIVATIONS,
    Gate,
    gate_rows,
    quantize_rows,
    read_records,
    reference,
)
from worlds.threads import threads

GROUPS = [32, 64, 96]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 1040), (300, 512)])
def test_records_have_the_bits_of_operations_one_by_one(
    dtype: torch.dtype, shape: tuple[int, int], group: int
) -> None:
    rows = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    rows[0, : shape[1] // 2] = 0
    rows[-1] = 0
    rows[0, -1] = 1e-20  # so small that its scale is the smallest
    got = read_records(quantize_rows(rows, group), group)
    assert all(torch.equal(*pair) for pair in zip(got, reference(rows, group), strict=True))


# --- gated ---

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}
TORCHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
}
GATES = [Gate(activation, is_first) for activation in ACTIVATIONS for is_first in (True, False)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(2))).to(dtype)


def gated_by_torch(rows: torch.Tensor, gate: Gate) -> torch.Tensor:
    halves = rows.chunk(2, 1)
    first, second = halves if gate.is_first else halves[::-1]
    return TORCHS[gate.activation](first) * second


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (7, 2080), (300, 512)])
def test_gated_values_are_torchs_but_for_a_step(
    shape: tuple[int, int], dtype: torch.dtype, gate: Gate
) -> None:
    rows = drawn(*shape, dtype=dtype)
    got, expected = gate_rows(rows, gate), gated_by_torch(rows, gate)
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    # Of the activation, which is rounded before it is a factor; below 0 it may be what 1 - 1 left.
    factor = rows.chunk(2, 1)[1 if gate.is_first else 0].float().abs()
    tolerance = 2 * STEP[dtype] * expected.float().abs() + 1e-6 * factor + SMALLEST[dtype]
    assert ((got.float() - expected.float()).abs() <= tolerance).all()
    if dtype != torch.float32:  # values next to a step's edge are few
        assert (got == expected).float().mean() > 0.97


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rows_are_quantised_as_if_gated_before(dtype: torch.dtype, gate: Gate) -> None:
    rows = drawn(70, 416, dtype=dtype)
    rows[3] = 0
    assert torch.equal(quantize_rows(rows, 32, gate), quantize_rows(gate_rows(rows, gate), 32))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_row_has_the_same_bits_alone_and_among_others(
    dtype: torch.dtype, gate: Gate
) -> None:
    rows = drawn(300, 512, dtype=dtype)
    every, records = gate_rows(rows, gate), quantize_rows(rows, 32, gate)
    for row in (0, 1, 150, 299):
        alone = slice(row, row + 1)
        assert torch.equal(gate_rows(rows[alone], gate), every[alone])
        assert torch.equal(quantize_rows(rows[alone], 32, gate), records[alone])


# --- as they are, or gated ---

EVERY_WAY = pytest.mark.parametrize("gate", [None, *GATES])


def made(rows: torch.Tensor, gate: Gate | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What is quantised, and its records."""
    return gate_rows(rows, gate) if gate else rows.clone(), quantize_rows(rows, 32, gate)


@EVERY_WAY
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_do_not_change_rows(num_threads: int, gate: Gate | None) -> None:
    rows = drawn(300, 2048)
    expected = made(rows, gate)
    with threads(num_threads):
        for _ in range(20):
            assert all(torch.equal(*pair) for pair in zip(made(rows, gate), expected, strict=True))


@EVERY_WAY
def test_rows_in_a_wider_tensor_are_read_where_they_lie(gate: Gate | None) -> None:
    part = drawn(10, 160)[::2, 32:96]
    before = part.clone()
    for got, expected in zip(made(part, gate), made(before, gate), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(part, before)


@EVERY_WAY
@pytest.mark.parametrize("column", [5, 40])
def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice(
    column: int, gate: Gate | None
) -> None:
    rows = drawn(3, 64)
    values, records = made(rows, gate)
    rows[1, column] = torch.nan
    got, after = made(rows, gate)
    width = got.shape[1]
    assert got.isnan().nonzero().tolist() == [[1, column % width]]
    groups = read_records(after, 32).scales.isnan()
    assert groups.nonzero().tolist() == [[1, column % width // 32]]
    for now, alone in ((got, values), (after, records)):
        assert torch.equal(now[::2], alone[::2])
