"""Kernels are compiled once for a machine, and run by torch's own threads."""

from __future__ import annotations

import ctypes
import time
from array import array
from pathlib import Path
from threading import Thread

import pytest

from engine.kernels import compiled, int8_product, sequence
from engine.kernels.compiled import Kernel
from engine.kernels.lanes import fetch_add, read_int, read_shared, write_int


def count_tasks(p: int) -> None:
    """Arguments: next task, number of tasks, workers, then a place for each task."""
    fetch_add(p + 16, 1)
    while True:
        task = fetch_add(p, 1)
        if task >= read_int(p + 8):
            break
        write_int(p + 24 + 8 * task, task + 1)


def run(kernel: Kernel, num_threads: int) -> list[int]:
    told = array("q", [0, 50, 0, *[0] * 50])
    kernel.run(told.buffer_info()[0], num_threads)
    return list(told)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_is_done_once_in_any_number_of_threads(num_threads: int) -> None:
    done = run(Kernel(count_tasks, 53), num_threads)
    assert done[2] == num_threads
    assert done[3:] == list(range(1, 51))


def test_without_a_team_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_team", lambda: None)
    done = run(Kernel(count_tasks, 53), 4)
    assert done[2] == 1
    assert done[3:] == list(range(1, 51))


def spin(p: int) -> None:
    """Arguments: 1 when it has begun; it ends when the second is set."""
    fetch_add(p, 1)
    while read_shared(p + 8) == 0:
        pass


@pytest.mark.parametrize("name", ["multiply", "run_all"])
def test_long_kernels_let_other_threads_go_on(name: str) -> None:
    module = {"multiply": int8_product, "run_all": sequence}[name]
    assert getattr(module, name)._kind is ctypes.CFUNCTYPE
    told = array("q", [0, 0])
    kernel = Kernel(spin, 2, is_long=True)
    thread = Thread(target=kernel.run, args=(told.buffer_info()[0],))
    thread.start()
    deadline = time.monotonic() + 60
    while told[0] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    told[1] = 1  # which this thread could not do, if the other held the interpreter
    thread.join(60)
    assert not thread.is_alive()


def test_machine_code_is_kept_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run(Kernel(count_tasks, 53), 1)
    (kept,) = tmp_path.rglob("*count_tasks*.nbi")
    assert kept.is_relative_to(tmp_path / "slipstream" / "kernels")


def test_a_place_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slipstream").write_text("a file, not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(Kernel(count_tasks, 53), 1)[3:] == list(range(1, 51))
