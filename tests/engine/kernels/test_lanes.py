"""Sixteen floats at a time, against torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from compiled.records import Counter, Int64s
from engine.kernels import KINDS, LANES, STORED_KINDS, tiles
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Floats

SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3.3e38, -1e-8]
FLOAT8 = torch.float8_e4m3fn


class Pair(NamedTuple):
    source: Floats
    target: Floats
    count: int


kernel_of = cache(Kernel)


def mapped(function: Callable[[Any], None], source: torch.Tensor, like: torch.Tensor) -> Any:
    """Returns a tensor like ``like``, filled by ``function``."""
    target = torch.empty_like(like)
    kernel_of(function).run(Pair(source, target, source.numel()))
    return target


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(LANES, generator=torch.Generator().manual_seed(seed))


def copy(a: Pair) -> None:
    for at in range(0, a.count, LANES):
        v.store(a.target, at, v.load(a.source, at))


def widen(a: Pair) -> None:
    v.widen(a.source, a.count, a.target)


@pytest.mark.parametrize("dtype", list(KINDS))
def test_what_is_loaded_and_stored_is_rounded_to_the_nearest_even(dtype: torch.dtype) -> None:
    ties = torch.arange(LANES) * 2.0**-9 + 1.0  # half of bf16's steps
    for row in (drawn(1), drawn(2, 1e5), ties, torch.tensor(SPECIAL * 2)):
        stored = mapped(copy, row, row.to(dtype))
        assert torch.equal(stored.nan_to_num(7.0), row.to(dtype).nan_to_num(7.0))
        assert torch.equal(stored.isnan(), row.isnan())
        loaded = mapped(copy, stored, row)
        assert torch.equal(loaded.nan_to_num(7.0), stored.float().nan_to_num(7.0))


def test_every_float_of_8_bits_is_what_torch_has() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    floats = codes.view(FLOAT8).float()
    numbers = ~floats.isnan()
    for how in (copy, widen):
        got = mapped(how, codes.view(FLOAT8), floats)
        assert torch.equal(got.isnan(), floats.isnan())
        assert torch.equal(got[numbers].view(torch.int32), floats[numbers].view(torch.int32))
    assert torch.equal(mapped(copy, floats, codes.view(FLOAT8)).view(torch.uint8), codes)


def test_floats_of_8_bits_are_rounded_as_torch_rounds_and_never_beyond_the_largest() -> None:
    every = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
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
    expected = rows.clamp(-448, 448).to(FLOAT8)
    got = mapped(copy, rows, expected)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def copy_some(a: Pair) -> None:
    v.store_some(a.target, v.load_some(a.source, a.count), a.count)


@pytest.mark.parametrize("dtype", list(STORED_KINDS))
def test_some_of_sixteen_are_read_and_written_alone(dtype: torch.dtype) -> None:
    for count in range(LANES + 1):
        target = torch.full((LANES,), 7.0)
        kernel_of(copy_some, Pair).run(Pair(drawn(count).to(dtype)[:count], target, count))
        assert torch.equal(target[:count], drawn(count).to(dtype).float()[:count])
        assert torch.equal(target[count:], torch.full((LANES - count,), 7.0))


def exponentials(a: Pair) -> None:
    v.store(a.target, 0, v.exp(v.load(a.source, 0)))


def tangents(a: Pair) -> None:
    v.store(a.target, 0, v.tanh(v.load(a.source, 0)))


def silus(a: Pair) -> None:
    v.store(a.target, 0, v.silu(v.load(a.source, 0)))


def gelus(a: Pair) -> None:
    v.store(a.target, 0, v.gelu_tanh(v.load(a.source, 0)))


def gelu_tanh(rows: torch.Tensor) -> torch.Tensor:
    return F.gelu(rows, approximate="tanh")


def test_exponentials_are_those_of_float32_and_nothing_far_below() -> None:
    for seed in range(50):
        row = -drawn(seed, 10.0).abs()
        torch.testing.assert_close(mapped(exponentials, row, row), row.exp(), rtol=3e-7, atol=0)
    row = torch.tensor([0.0, -0.0, -88.0, -3e38, -torch.inf, torch.nan, -87.0, -1e-30] * 2)
    got = mapped(exponentials, row, row)
    assert got[:5].tolist() == [1, 1, 0, 0, 0]
    assert got[5].isnan()
    assert got[7] == 1


def test_hyperbolic_tangents() -> None:
    for seed in range(20):
        row = drawn(seed, 3.0)
        torch.testing.assert_close(mapped(tangents, row, row), row.tanh(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("mine", "torchs"), [(silus, F.silu), (gelus, gelu_tanh)])
def test_activations_are_those_of_float32_whatever_their_place(
    mine: Callable[[Any], None], torchs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for seed in range(20):
        for scale in (0.01, 1.0, 4.0, 30.0):
            row = drawn(seed, scale)
            got, expected = mapped(mine, row, row), torchs(row.double()).float()
            # Where they come near 0 from below, what is left of a 1 that was taken from a 1.
            torch.testing.assert_close(got, expected, rtol=4e-7, atol=3e-7)
    for shift in range(1, LANES):
        assert torch.equal(mapped(mine, row.roll(shift), row), got.roll(shift))
    ends = torch.tensor([3e38, 1e20, 200.0, 90.0, -90.0, -200.0, -1e20, -3e38])
    far = torch.cat([ends, torch.tensor([0.0, -0.0, 1e-40, 1e-10, -1e-10, 0.5, 0.5, 0.5])])
    got = mapped(mine, far, far)
    torch.testing.assert_close(got, torchs(far), rtol=2e-7, atol=1e-35)
    assert torch.equal(got[:4], ends[:4])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0] * 4)
    got, expected = mapped(mine, special, special), torchs(special)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0).where(special != 1.0, got))


def turn(a: Pair) -> None:
    tiles.transpose(a.source, a.count // 16, a.target, 32)


@pytest.mark.parametrize("dtype", list(STORED_KINDS))
@pytest.mark.parametrize("columns", [16, 32, 48, 96])
def test_sixteen_rows_are_transposed(dtype: torch.dtype, columns: int) -> None:
    """Several columns at a time where several lie in 32 bits, and one by one what is left."""
    rows = torch.randn(16, columns).to(dtype)
    got = torch.zeros(columns, 32)
    kernel_of(turn, Pair).run(Pair(rows, got, 16 * columns))
    assert torch.equal(got[:, :16], rows.float().T)


def four(a: Pair) -> None:
    tiles.interleave(a.source, a.count // 4, a.target)


def test_four_rows_are_interleaved() -> None:
    rows = torch.randn(4, 48)
    assert torch.equal(mapped(four, rows, torch.empty(48, 4)), rows.T)


def middle(a: Pair) -> None:
    v.store(a.target, 0, v.keep(v.load(a.source, 0), 3, 9))


def test_lanes_that_are_not_kept_are_minus_infinity() -> None:
    got = mapped(middle, row := drawn(4), row)
    assert torch.equal(got[3:9], row[3:9])
    assert (torch.cat([got[:3], got[9:]]) == -torch.inf).all()


def in_one(a: Pair) -> None:
    row = v.load(a.source, 0)
    a.target[0] = v.largest_of(v.larger(row, v.splat(-9.0)))
    a.target[1] = v.largest_or_nan_of(row)
    a.target[2] = v.sum_of(row)


def test_the_largest_of_lanes_with_and_without_numbers_that_are_none() -> None:
    row = torch.arange(16.0)
    assert mapped(in_one, row, torch.empty(3)).tolist() == [15, 15, 120]
    row[3] = torch.nan
    got = mapped(in_one, row, torch.empty(3))
    assert got[0] == 15
    assert got[1:].isnan().all()


class Runs(NamedTuple):
    times: Int64s
    count: int
    num_threads: int
    next_run: Counter = 0


def take_runs(a: Runs) -> None:
    for first, end in v.shared_runs(a.next_run, a.count, a.num_threads):
        for number in range(first, end):
            v.fetch_add(a.times + number, 1)


take_all_runs = Kernel(take_runs)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 32, 100])
def test_runs_hold_each_number_once_whoever_comes(
    count: int, num_threads: int, num_workers: int
) -> None:
    times = torch.zeros(count + 1, dtype=torch.int64)
    take_all_runs.run(Runs(times, count, num_threads), num_workers)
    assert times.tolist() == [1] * count + [0]


def take_by_threes(a: Runs) -> None:
    for number in v.shared(a.next_run, a.count, 3):
        v.fetch_add(a.times + number, 1)


take_all_by_threes = Kernel(take_by_threes)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_several_together_are_taken_once(count: int, num_workers: int) -> None:
    times = torch.zeros(count + 1, dtype=torch.int64)
    take_all_by_threes.run(Runs(times, count, 1), num_workers)
    assert times.tolist() == [1] * count + [0]


def first_run(a: Runs) -> None:
    for first, end in v.shared_runs(a.next_run, a.count, a.num_threads):
        a.times[0] = end - first
        return


def test_the_first_run_is_long() -> None:
    size = torch.zeros(1, dtype=torch.int64)
    Kernel(first_run).run(Runs(size, 128, 2))
    assert size.item() == 48
