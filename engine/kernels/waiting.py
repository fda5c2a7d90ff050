"""How a thread of a team waits for the others."""

from __future__ import annotations

import ctypes
from functools import cache

from numba import njit

from engine.kernels.lanes import call_int, read_shared

_SPINS = 1 << 14
"""A thread that has waited for so long lets others run: somebody may want its core."""


@njit
def wait_until(counter: int, least: int, release: int) -> None:
    """Until the counter at an address has reached ``least``. ``release``: of ``releasing``."""
    spins = 0
    while read_shared(counter) < least:
        spins += 1
        if spins >= _SPINS and release != 0:
            call_int(release)


@cache
def function_address(name: str) -> int:
    """Of a C function that the process has loaded; 0: there is none."""
    loaded = ctypes.CDLL(None)
    if not hasattr(loaded, name):
        return 0
    return ctypes.cast(loaded[name], ctypes.c_void_p).value or 0


def releasing() -> int:
    """Where the function is that lets other threads run; 0: there is none."""
    return function_address("sched_yield")
