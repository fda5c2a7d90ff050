"""Loops over rows, compiled by numba for the machine they run on.

``lanes`` is what they are written in, ``records`` what they are told, ``compiled`` how they are compiled
and run by torch's own threads; a kernel's file begins with what it computes, in plain Python. Kernels are
imported where they are used: numba takes a while.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

LANES = 16
"""Floats that kernels take at a time: what rows' features and keys are multiples of."""
KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of rows' floats in memory."""
STORED_KINDS = (*KINDS, torch.float8_e4m3fn)
"""Types that keys and values may lie in."""
MOST_RANK = 512
"""The largest rank of an adapter in a layer."""
HOSTS = frozenset({"cpu"})
"""Types of devices whose memory the host reads as it is. There a step may look at numbers when it likes,
and compiled kernels do; on others it is made of operations whose shapes the host knows."""


class Scratch:
    """Floats for what kernels compute on the way, the first of which begins a line of a cache: sixteen
    that lie in two lines take twice the time."""

    def __init__(self) -> None:
        self._floats = torch.zeros(0)

    def of(self, size: int) -> torch.Tensor:
        """Returns at least so many. They are made anew only where more are wanted than ever before."""
        if len(self._floats) < size:
            floats = torch.zeros(size + LANES)
            self._floats = floats[-floats.data_ptr() // 4 % LANES :][:size]
        return self._floats


_NUMBERS_FOR_A_TEAM = 1 << 16
"""Work on fewer numbers is over sooner than a team has begun."""


class Threads(int):
    """How many threads work on so many ``numbers`` is worth."""

    numbers: int


def threads_for(numbers: int) -> Threads:
    """Returns how many threads so many numbers are worth."""
    found = Threads(torch.get_num_threads() if numbers >= _NUMBERS_FOR_A_TEAM else 1)
    found.numbers = numbers
    return found


def threads_for_each(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the same of each of several numbers."""
    return np.where(numbers >= _NUMBERS_FOR_A_TEAM, torch.get_num_threads(), 1)


@cache
def find_kernel(name: str) -> Any:
    """Returns the module of this folder."""
    return import_module(f"{__name__}.{name}")


def is_host(device: torch.device) -> bool:
    return device.type in HOSTS


def are_read(rows: torch.Tensor) -> bool:
    """Whether compiled kernels read these floats in their own type, where they are."""
    return is_host(rows.device) and rows.dtype in KINDS


def host_kernel(name: str, device: torch.device) -> Any:
    """Returns the compiled kernel for tensors on ``device``; None: torch's operations do it there."""
    return find_kernel(name) if is_host(device) else None


# --- for those who write down which kernels run, to run them again ---


class Renewal(NamedTuple):
    """Tells how a kernel's arguments are renewed before it is run again: ``key`` says to the step's plan
    which number goes to ``place``, and in how many threads it runs. ``held`` owns memory that the other
    arguments point to: who may run the kernel again keeps it."""

    key: Hashable
    place: int
    held: object = None


class Renews(Protocol):
    """Renews what recorded kernels are told: the plan of a step whose backend ``can_capture``."""

    def renewed(self, key: Hashable) -> tuple[int, int]:
        """Returns the number that this step puts in a kernel's arguments, and in how many threads it
        runs. ``key``: of the kernel's ``Renewal``."""

    def wants_team(self, key: Hashable) -> bool:
        """Whether that kernel alone has work enough for a team to begin."""

    def keep(self) -> Callable[[], None]:
        """Returns what puts back all that the step reads and overwrites, so that it can be run again."""


class Watcher(Protocol):
    def note_kernel(
        self, address: int, arguments: array[int], num_threads: int, renewal: Renewal | None
    ) -> bool:
        """Is called before each run, with where the machine code is and a copy of what it is told.
        Returns whether it is to run."""


class _Watched(threading.local):
    watcher: Watcher | None = None


watched = _Watched()
"""Has the watcher of the kernels that this thread runs."""


@contextmanager
def watch_kernels(watcher: Watcher) -> Iterator[None]:
    before, watched.watcher = watched.watcher, watcher
    try:
        yield
    finally:
        watched.watcher = before
