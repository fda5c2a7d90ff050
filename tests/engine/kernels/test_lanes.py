"""Sixteen floats at a time, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numba import njit

from engine.kernels import FLOAT8, KINDS, LANES, STORED_KINDS, lanes, tiles

SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3.3e38, -1e-8]


compiled = cache(njit)


def mapped(function: Callable[[int, int], None], source: torch.Tensor, like: torch.Tensor) -> Any:
    """What ``function(source, target)`` leaves in a tensor like ``like``."""
    target = torch.empty_like(like)
    compiled(function)(source.data_ptr(), target.data_ptr())
    return target


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(LANES, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", list(KINDS))
def test_what_is_loaded_and_stored_is_rounded_to_the_nearest_even(dtype: torch.dtype) -> None:
    kind = KINDS[dtype]

    def copy(source: int, target: int) -> None:
        lanes.store(kind, target, lanes.load32(source))

    def back(source: int, target: int) -> None:
        lanes.store32(target, lanes.load(kind, source))

    ties = torch.arange(LANES) * 2.0**-9 + 1.0  # half of bf16's steps
    for row in (drawn(1), drawn(2, 1e5), ties, torch.tensor(SPECIAL * 2)):
        stored = mapped(copy, row, row.to(dtype))
        assert torch.equal(stored.nan_to_num(7.0), row.to(dtype).nan_to_num(7.0))
        assert torch.equal(stored.isnan(), row.isnan())
        loaded = mapped(back, stored, row)
        assert torch.equal(loaded.nan_to_num(7.0), stored.float().nan_to_num(7.0))


def test_every_float_of_8_bits_is_what_torch_has() -> None:
    codes = torch.arange(256, dtype=torch.uint8)

    def decode(source: int, target: int) -> None:
        for at in range(0, 256, 16):
            lanes.store32(target + 4 * at, lanes.load(FLOAT8, source + at))

    def widen(source: int, target: int) -> None:
        lanes.widen(FLOAT8, source, 256, source, target)

    def encode(source: int, target: int) -> None:
        for at in range(0, 256, 16):
            lanes.store(FLOAT8, target + at, lanes.load32(source + 4 * at))

    floats = codes.view(torch.float8_e4m3fn).float()
    numbers = ~floats.isnan()
    for how in (decode, widen):
        got = mapped(how, codes, floats)
        assert torch.equal(got.isnan(), floats.isnan())
        assert torch.equal(got[numbers].view(torch.int32), floats[numbers].view(torch.int32))
    assert torch.equal(mapped(encode, floats, codes), codes)


def test_floats_of_8_bits_are_rounded_as_torch_rounds_and_never_beyond_the_largest() -> None:
    def encode(source: int, target: int) -> None:
        for at in range(0, 4096, 16):
            lanes.store(FLOAT8, target + at, lanes.load32(source + 4 * at))

    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (every[1:] + every[:-1]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(1500, generator=generator)
    drawn *= 2.0 ** torch.randint(-12, 9, (1500,), generator=generator)
    some = torch.cat(
        [near, -near, drawn, torch.tensor([1e-40, 0.0, -0.0, 500.0, -1e30, torch.inf])]
    )
    rows = torch.zeros(4096)
    rows[: len(some)] = some
    expected = rows.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(mapped(encode, rows, expected), expected)


def test_exponentials_are_those_of_float32_and_nothing_far_below() -> None:
    def exponential(source: int, target: int) -> None:
        lanes.store32(target, lanes.exp(lanes.load32(source)))

    for seed in range(50):
        row = -drawn(seed, 10.0).abs()
        torch.testing.assert_close(mapped(exponential, row, row), row.exp(), rtol=3e-7, atol=0)
    row = torch.tensor([0.0, -0.0, -88.0, -3e38, -torch.inf, torch.nan, -87.0, -1e-30] * 2)
    got = mapped(exponential, row, row)
    assert got[:5].tolist() == [1, 1, 0, 0, 0]
    assert got[5].isnan()
    assert got[7] == 1


def test_hyperbolic_tangents() -> None:
    def tangent(source: int, target: int) -> None:
        lanes.store32(target, lanes.tanh(lanes.load32(source)))

    for seed in range(20):
        row = drawn(seed, 3.0)
        torch.testing.assert_close(mapped(tangent, row, row), row.tanh(), rtol=1e-5, atol=1e-7)


def silus(source: int, target: int) -> None:
    lanes.store32(target, lanes.silu(lanes.load32(source)))


def gelus(source: int, target: int) -> None:
    lanes.store32(target, lanes.gelu_tanh(lanes.load32(source)))


def gelu_tanh(rows: torch.Tensor) -> torch.Tensor:
    return F.gelu(rows, approximate="tanh")


ACTIVATIONS = [
    pytest.param(silus, F.silu, id="silu"),
    pytest.param(gelus, gelu_tanh, id="gelu_tanh"),
]
Activation = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(("mine", "torchs"), ACTIVATIONS)
def test_activations_are_those_of_float32(
    mine: Callable[[int, int], None], torchs: Activation
) -> None:
    for seed in range(20):
        for scale in (0.01, 1.0, 4.0, 30.0):
            row = drawn(seed, scale)
            got, expected = mapped(mine, row, row), torchs(row.double()).float()
            # Where they come near 0 from below, what is left of a 1 that was taken from a 1.
            torch.testing.assert_close(got, expected, rtol=4e-7, atol=3e-7)


@pytest.mark.parametrize(("mine", "torchs"), ACTIVATIONS)
def test_activations_of_what_is_far_from_0_or_no_number(
    mine: Callable[[int, int], None], torchs: Activation
) -> None:
    ends = torch.tensor([3e38, 1e20, 200.0, 90.0, -90.0, -200.0, -1e20, -3e38])
    far = torch.cat([ends, torch.tensor([0.0, -0.0, 1e-40, 1e-10, -1e-10, 0.5, 0.5, 0.5])])
    got = mapped(mine, far, far)
    torch.testing.assert_close(got, torchs(far), rtol=2e-7, atol=1e-35)
    assert torch.equal(got[:4], ends[:4])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0] * 4)
    got, expected = mapped(mine, special, special), torchs(special)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0).where(special != 1.0, got))


@pytest.mark.parametrize(("mine", "torchs"), ACTIVATIONS)
def test_an_activation_does_not_depend_on_its_place(
    mine: Callable[[int, int], None],
    torchs: Activation,  # noqa: ARG001
) -> None:
    row = drawn(3, 4.0)
    expected = mapped(mine, row, row)
    for shift in range(1, LANES):
        turned = row.roll(shift)
        assert torch.equal(mapped(mine, turned, row), expected.roll(shift))


@pytest.mark.parametrize("dtype", list(STORED_KINDS))
@pytest.mark.parametrize("columns", [16, 32, 48, 96])
def test_sixteen_rows_are_transposed(dtype: torch.dtype, columns: int) -> None:
    """Several columns at a time where several lie in 32 bits, and one by one what is left."""
    kind, size = STORED_KINDS[dtype], dtype.itemsize

    def turn(source: int, target: int) -> None:
        tiles.transpose(kind, source, 104 * size, columns, source, target, 128)

    rows = torch.randn(16, 104).to(dtype)
    got = mapped(turn, rows, torch.zeros(columns, 32))
    assert torch.equal(got[:, :16], rows[:, :columns].float().T)


def test_four_rows_are_interleaved() -> None:
    def interleave(source: int, target: int) -> None:
        tiles.interleave(source, 48, target)

    rows = torch.randn(4, 48)
    assert torch.equal(mapped(interleave, rows, torch.empty(48, 4)), rows.T)


def test_lanes_that_are_not_kept_are_minus_infinity() -> None:
    def middle(source: int, target: int) -> None:
        lanes.store32(target, lanes.keep(lanes.load32(source), 3, 9))

    got = mapped(middle, row := drawn(4), row)
    assert torch.equal(got[3:9], row[3:9])
    assert (torch.cat([got[:3], got[9:]]) == -torch.inf).all()


def test_the_largest_of_lanes_with_and_without_numbers_that_are_none() -> None:
    def both(source: int, target: int) -> None:
        row = lanes.load32(source)
        lanes.write_float(target, lanes.largest_of(lanes.larger(row, lanes.splat(-9.0))))
        lanes.write_float(target + 4, lanes.largest_or_nan_of(row))
        lanes.write_float(target + 8, lanes.sum_of(row))

    row = torch.arange(16.0)
    assert mapped(both, row, torch.empty(3)).tolist() == [15, 15, 120]
    row[3] = torch.nan
    got = mapped(both, row, torch.empty(3))
    assert got[0] == 15
    assert got[1:].isnan().all()
