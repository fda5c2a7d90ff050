"""Compiles loops once for this machine, and runs them in the threads that torch computes with.

A kernel takes one argument, a record (``records``). What several threads share out among them they take
by an atomic counter in it, so that a thread that is held up holds nobody else up.

The threads are those of the OpenMP that torch has loaded, through the entry point that compilers call:
further threads of our own would find torch's still spinning on their cores.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, types

from drafters.compiled import kept, version_of
from engine import noise_numbers
from engine.kernels import Renewal, watched
from engine.kernels.records import Dtypes, Record, layout_of

logger = logging.getLogger(__name__)


class Kernel:
    """``body`` as machine code, compiled when it is first wanted, which takes an ``argument`` of a type.
    ``is_long``: other threads of the interpreter go on meanwhile, also where it runs in one thread."""

    def __init__(self, body: Callable[[Any], None], argument: Any, is_long: bool) -> None:
        self._body, self._argument = body, argument
        # What is over sooner than letting go of the interpreter and taking it again does not.
        self._kind = ctypes.CFUNCTYPE if is_long else ctypes.PYFUNCTYPE
        self._code: Any = None
        self._call: Any = None

    def compile(self) -> None:
        """Raises what numba raises."""
        if self._code is not None:
            return
        with kept(kernels_version(), self._body, self._argument) as keep:
            self._code = cfunc(types.void(self._argument), cache=keep)(self._body)
        self._call = self._kind(None, ctypes.c_void_p)(self._code.address)

    @property
    def address(self) -> int:
        """The address of the machine code."""
        self.compile()
        return int(self._code.address)

    def run(self, told: array[int], num_threads: int = 1, renewal: Renewal | None = None) -> None:
        """Runs it. What ``told`` points to has to outlive the call. ``renewal``: for those who watch, and
        run it again; None: nothing changes then."""
        if self._code is None:
            self.compile()
        if watched.watcher is not None:
            watched.watcher.note_kernel(self.address, told[:], num_threads, renewal)
        team = _team() if num_threads > 1 else None
        if team is None:
            self._call(told.buffer_info()[0])
        else:
            team(self._code.address, told.buffer_info()[0], num_threads, 0)


class Loop:
    """``body`` as a kernel of arguments that ``declaration`` declares, one for each combination of types
    of their tensors, compiled when it is first wanted. ``is_long`` as a ``Kernel`` takes it."""

    def __init__(
        self, body: Callable[[Any], None], declaration: Any, is_long: bool = False
    ) -> None:
        self._body, self._declaration, self._is_long = body, declaration, is_long
        self.layout = layout_of(declaration)
        self._kernels: dict[Dtypes, Kernel] = {}

    def kernel(self, dtypes: Dtypes) -> Kernel:
        """Returns the kernel for tensors of ``Floats`` of these types."""
        found = self._kernels.get(dtypes)
        if found is None:
            found = Kernel(self._body, Record(self._declaration, dtypes), self._is_long)
            self._kernels[dtypes] = found
        return found

    def run(self, arguments: Any, num_threads: int = 1, kind: Any = None) -> None:
        """``arguments``: an instance of the declaration, whose tensors outlive the call; ``kind``: the
        format of its ``Formatted``, if it has one."""
        told, dtypes = self.layout.pack(arguments)
        self.kernel(dtypes if kind is None else (*dtypes, kind)).run(told, num_threads)


@cache
def _team() -> Any:
    """Returns OpenMP's way to run a function in all threads of a team, or None."""
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        logger.info("no OpenMP is loaded that runs compiled kernels: they run in one thread")
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.restype = None
    return found


@cache
def kernels_version() -> str:
    """Returns the name of this version of all kernels."""
    return version_of([*sorted(Path(__file__).parent.glob("*.py")), Path(noise_numbers.__file__)])


_NUMBERS_FOR_A_TEAM = 1 << 16
"""Work on fewer numbers is over sooner than a team has begun."""


def threads_for(count: int) -> int:
    """Returns how many threads so many numbers are worth."""
    return torch.get_num_threads() if count >= _NUMBERS_FOR_A_TEAM else 1


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
