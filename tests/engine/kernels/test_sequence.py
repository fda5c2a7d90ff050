"""Kernels one after another in one team: each begins when the one before it is done."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from compiled.records import Counter, Int64s
from engine.kernels import lanes as v
from engine.kernels import sequence
from engine.kernels.compiled import Kernel, releasing
from engine.kernels.sequence import run_sequence

COUNT = 64


class Circle(NamedTuple):
    source: Int64s
    target: Int64s
    next_place: Counter = 0
    unused: int = 0


def add_neighbours(a: Circle) -> None:
    """Each number of the target becomes the sum of the source's numbers next to it, in a circle."""
    for place in v.shared(a.next_place, COUNT):
        left, right = (place + COUNT - 1) % COUNT, (place + 1) % COUNT
        a.target[place] = a.source[left] + a.source[right]


ADD = Kernel(add_neighbours)


def summed(num_threads: list[int]) -> torch.Tensor:
    """Returns the planes of so many kernels, each of which reads those that the one before it wrote."""
    planes = torch.zeros(len(num_threads) + 1, COUNT, dtype=torch.int64)
    planes[0] = torch.arange(COUNT) % 5 - 2
    pairs = zip(planes, planes[1:], strict=False)
    told = [ADD.layout.pack(Circle(*pair))[0] for pair in pairs]
    code = ADD.loop(()).address
    nodes = [
        (code, each.buffer_info()[0], count) for each, count in zip(told, num_threads, strict=True)
    ]
    run_sequence(torch.tensor(nodes), max(num_threads))
    return planes[-1]


def expected(count: int) -> torch.Tensor:
    plane = torch.arange(COUNT) % 5 - 2
    for _ in range(count):
        plane = plane.roll(1) + plane.roll(-1)
    return plane


@pytest.mark.parametrize("num_threads", [[1] * 40, [2] * 40, [1, 3, 1, 1, 2] * 8, [4, 1] * 20])
def test_each_reads_what_the_one_before_it_wrote(num_threads: list[int]) -> None:
    for _ in range(20):
        assert torch.equal(summed(num_threads), expected(40))


def test_without_openmp_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "releasing", lambda: 0)
    assert torch.equal(summed([1] * 10), expected(10))


def test_one_that_waits_long_lets_others_run() -> None:
    """More threads than cores: who spins holds the core of the one it waits for."""
    assert releasing() != 0
    for _ in range(5):
        assert torch.equal(summed([8] * 40), expected(40))
