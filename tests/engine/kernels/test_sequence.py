"""Kernels one after another in one team: each begins when the one before it is done."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from engine.kernels import sequence
from engine.kernels.compiled import Kernel
from engine.kernels.lanes import argument, fetch_add, read_int, write_int
from engine.kernels.sequence import NODE_INTS, run_sequence
from engine.kernels.waiting import releasing

COUNT = 64


def add_neighbours(p: int) -> None:
    """Each number of the second array becomes the sum of the first's numbers next to it, in a circle."""
    while True:
        index = fetch_add(p, 1)
        if index >= COUNT:
            break
        left, right = (index + COUNT - 1) % COUNT, (index + 1) % COUNT
        source = argument(p, 1)
        write_int(
            argument(p, 2) + 8 * index, read_int(source + 8 * left) + read_int(source + 8 * right)
        )


KERNEL = Kernel(add_neighbours, 3)


def summed(num_threads: list[int]) -> list[int]:
    """By so many kernels, each reading what the one before it wrote."""
    planes = np.zeros((len(num_threads) + 1, COUNT), dtype=np.int64)
    planes[0] = np.arange(COUNT) % 5 - 2
    told = [
        array("q", [0, planes[i].ctypes.data, planes[i + 1].ctypes.data])
        for i in range(len(num_threads))
    ]
    nodes = array("q")
    for each, count in zip(told, num_threads, strict=True):
        nodes.extend((KERNEL.address, each.buffer_info()[0], count))
    run_sequence(torch.tensor(nodes).view(-1, NODE_INTS), max(num_threads))
    return planes[-1].tolist()


def expected(count: int) -> list[int]:
    plane = np.arange(COUNT) % 5 - 2
    for _ in range(count):
        plane = np.roll(plane, 1) + np.roll(plane, -1)
    return plane.tolist()


@pytest.mark.parametrize("num_threads", [[1] * 40, [2] * 40, [1, 3, 1, 1, 2] * 8, [4, 1] * 20])
def test_each_reads_what_the_one_before_it_wrote(num_threads: list[int]) -> None:
    for _ in range(20):
        assert summed(num_threads) == expected(40)


def test_without_openmp_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "releasing", lambda: 0)
    assert summed([1] * 10) == expected(10)


def test_one_that_waits_long_lets_others_run() -> None:
    """More threads than cores: who spins holds the core of the one it waits for."""
    assert releasing() != 0
    for _ in range(5):
        assert summed([8] * 40) == expected(40)
