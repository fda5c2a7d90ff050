"""Kernels: loops that run in the threads that torch computes with.

A kernel takes one argument, a record. What several threads share out among them they take by an atomic
counter in it, so that a thread that is held up holds nobody else up.

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
from typing import Any, NamedTuple, get_type_hints

from compiled.cache import version_of
from compiled.loops import Loop
from engine.kernels import Renewal, watched
from engine.kernels.integers import has_amx
from engine.kernels.records import Dtypes, layout_of

logger = logging.getLogger(__name__)


class TeamLoop(Loop):
    """A loop that takes a record, and runs in one thread or several."""

    def version(self) -> str:
        return kernels_version()

    def run(self, told: array[int], num_threads: int = 1, renewal: Renewal | None = None) -> None:
        """Runs it. What ``told`` points to has to outlive the call. ``renewal``: for those who watch, and
        run it again; None: nothing changes then."""
        call = self._call or self.compile()
        watcher = watched.watcher
        if watcher and not watcher.note_kernel(self.address, told[:], num_threads, renewal):
            return
        team = _team() if num_threads > 1 else None
        if team is None:
            call(told.buffer_info()[0])
        else:
            team(self._code.address, told.buffer_info()[0], num_threads, 0)


class Recorded(NamedTuple):
    """A kernel, what it is told, and in how many threads it runs."""

    kernel: TeamLoop
    arguments: array[int]
    num_threads: int


class Kernel:
    """``body`` as a loop for each combination of types of tensors in its argument, each compiled when it
    is first wanted. ``is_long``: as a ``Loop`` is."""

    def __init__(self, body: Callable[[Any], None], is_long: bool = False) -> None:
        (declaration, _) = get_type_hints(body).values()
        self._body, self._is_long, self.layout = body, is_long, layout_of(declaration)
        self.loop = cache(self._loop)
        """Returns that for tensors of these types (``Dtypes``)."""

    def _loop(self, dtypes: Dtypes) -> TeamLoop:
        return TeamLoop(self._body, self.layout.record(dtypes), is_long=self._is_long)

    def recorded(self, arguments: Any, num_threads: int) -> Recorded:
        """Returns it for ``arguments``, whose tensors have to outlive what is returned."""
        told, dtypes = self.layout.pack(arguments)
        return Recorded(self.loop(dtypes), told, num_threads)

    def run(self, arguments: Any, num_threads: int = 1, kind: Any = None) -> None:
        """``arguments``: an instance of the declaration, whose tensors outlive the call; ``kind``: the
        format of its ``Formatted``, if it has one."""
        told, dtypes = self.layout.pack(arguments)
        self.loop(dtypes if kind is None else (*dtypes, kind)).run(told, num_threads)


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
    """Returns the name of this version of all kernels; another one where AMX may be used, for which each
    process asks before it runs any."""
    return version_of(Path(__file__).parent.glob("*.py")) + ("_amx" if has_amx() else "")


@cache
def function_address(name: str) -> int:
    """Returns where a C function is that the process has loaded, or 0."""
    found: Any = getattr(ctypes.CDLL(None), name, None)
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def releasing() -> int:
    """Returns where the function is that lets other threads run, or 0."""
    return function_address("sched_yield")
