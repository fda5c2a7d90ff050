"""How a thread of a team waits for the others."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from numba import njit

from engine.kernels.lanes import call_int, read_shared

_SPINS = 1 << 14
"""A thread that has waited for so long lets others run: somebody may want its core."""


@njit
def wait_until(counter: Any, least: int, release: int) -> None:
    """Returns when what ``counter`` points to has reached ``least``. ``release``: of ``releasing``."""
    spins = 0
    while read_shared(counter) < least:
        spins += 1
        if spins >= _SPINS and release != 0:
            call_int(release)


@cache
def function_address(name: str) -> int:
    """Returns where a C function is that the process has loaded, or 0."""
    loaded = ctypes.CDLL(None)
    if not hasattr(loaded, name):
        return 0
    return ctypes.cast(loaded[name], ctypes.c_void_p).value or 0


def releasing() -> int:
    """Returns where the function is that lets other threads run, or 0."""
    return function_address("sched_yield")
