"""Kernels are compiled once for a machine, and run by torch's own threads."""

from __future__ import annotations

import ctypes
import time
from threading import Thread
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numba import njit

from compiled.records import Counter, Float64s, Int64s, Within
from engine.kernels import KINDS, LANES, compiled, grouped_product, sequence
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import NOWHERE, Float32s, Floats, layout_of


class Tasks(NamedTuple):
    done: Int64s
    num_tasks: int
    next_task: Counter = 0


def count_tasks(a: Tasks) -> None:
    """Adds one to the place of each task, and to the one after them for each thread."""
    v.fetch_add(a.done + a.num_tasks, 1)
    for task in v.shared(a.next_task, a.num_tasks):
        a.done[task] += 1


def run(num_threads: int = 1) -> list[int]:
    done = torch.zeros(51, dtype=torch.int64)
    Kernel(count_tasks).run(Tasks(done, 50), num_threads)
    return [int(each) for each in done]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_is_done_once_in_any_number_of_threads(num_threads: int) -> None:
    assert run(num_threads) == [1] * 50 + [num_threads]


def test_without_a_team_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_team", lambda: None)
    assert run(4) == [1] * 51


class Fields(NamedTuple):
    rows: Floats
    output: Floats
    weight: Float32s
    doubles: Float64s
    scale: float
    first: int
    is_weighed: bool
    calls: Counter = 7


def read_fields(a: Fields) -> None:
    value = v.load(a.rows + a.first, 0) * v.splat(np.float32(a.scale))
    if a.is_weighed and not v.is_none(a.weight):
        value = value * v.splat(a.weight[1])
    v.store(a.output, LANES, value)
    a.doubles[2] = a.doubles[0] - v.fetch_add(a.calls, 1)


@pytest.mark.parametrize("output", list(KINDS))
@pytest.mark.parametrize("dtype", list(KINDS))
def test_fields_are_read_by_name_for_tensors_of_any_type(
    dtype: torch.dtype, output: torch.dtype
) -> None:
    rows, weight = torch.randn(20).to(dtype), torch.randn(3)
    for is_weighed, factor in ((True, weight[1]), (False, 1.0)):
        target, doubles = torch.zeros(32, dtype=output), torch.tensor([0.1, 0.0, 0.0]).double()
        told = Fields(rows, target, weight, doubles, 0.75, 3, is_weighed)
        Kernel(read_fields).run(told)
        expected = (rows[3:19].float() * 0.75 * factor).to(output)
        assert torch.equal(target[LANES:], expected)
        assert not target[:LANES].any()
        assert doubles[2] == doubles[0] - 7
    told = Fields(rows, target, NOWHERE, doubles, 0.75, 3, True)
    Kernel(read_fields).run(told)
    assert torch.equal(target[LANES:], (rows[3:19].float() * 0.75).to(output))


class Part(NamedTuple):
    first: int
    floats: Floats
    calls: Counter = 2


class Whole(NamedTuple):
    one: Within[Part]
    other: Within[Part]
    total: Int64s
    scale: float


def read_part(part: Part, scale: float) -> int:
    """Scales sixteen floats in place; returns how often it was called before."""
    floats = part.floats + part.first
    v.store(floats, 0, v.load(floats, 0) * v.splat(np.float32(scale)))
    return v.fetch_add(part.calls, 1)


_read_part = njit(read_part)


def read_parts(a: Whole) -> None:
    for _ in range(3):
        a.total[0] += _read_part(a.one, a.scale)
    a.total[0] += 10 * _read_part(a.other, a.scale)


def test_records_within_have_fields_and_tensors_of_their_own() -> None:
    one, other, total = torch.ones(20), torch.ones(20).half(), torch.zeros(1, dtype=torch.int64)
    Kernel(read_parts).run(Whole(Part(4, one), Part(1, other, 5), total, 0.5))
    assert one.tolist() == [1.0] * 4 + [0.125] * 16
    assert other.tolist() == [1.0] + [0.5] * 16 + [1.0] * 3
    assert int(total) == 2 + 3 + 4 + 10 * 5
    places = layout_of(Whole).places
    assert (places["other.calls"], places["scale"]) == (5, 7)


def test_records_within_are_in_front_and_have_none() -> None:
    class Behind(NamedTuple):
        count: int
        part: Within[Part]

    class Twice(NamedTuple):
        whole: Within[Whole]

    for declaration in (Behind, Twice):
        with pytest.raises(TypeError, match="not in front"):
            layout_of(declaration)


class Spinning(NamedTuple):
    begun_and_over: Int64s
    counter: Counter = 0


def spin(a: Spinning) -> None:
    """Sets the first number; ends when the second is set."""
    v.fetch_add(a.begun_and_over, 1)
    while v.read_shared(a.begun_and_over + 1) == 0:
        pass


@pytest.mark.parametrize("loop", [grouped_product.multiply, sequence.run_all])
def test_long_kernels_let_other_threads_go_on(loop: Kernel) -> None:
    assert loop.loop(())._kind._flags_ == ctypes.CFUNCTYPE(None)._flags_
    flags = torch.zeros(2, dtype=torch.int64)
    spinning = Kernel(spin, is_long=True)
    thread = Thread(target=spinning.run, args=(Spinning(flags),))
    thread.start()
    deadline = time.monotonic() + 60
    while flags[0] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    flags[1] = 1  # which this thread could not do, if the other held the interpreter
    thread.join(60)
    assert not thread.is_alive()
