"""Shows whether an engine makes progress, in memory shared between processes: a hung engine cannot
answer, and need not."""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import time

_TIMES = struct.Struct("3d")
_TIME = struct.Struct("d")
_STATE, _ASKED, _RESUMED = (place * _TIME.size for place in range(3))


class Pulse:
    """``handle``: of a file that ``shared_handle`` made, in another process; None: this process's own
    memory. The clock is one for all processes of a machine. One engine writes its state, the process that
    watches it the rest; anybody reads."""

    def __init__(self, handle: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if handle is None else handle, _TIMES.size)

    def beat(self) -> None:
        """A step, or what comes before it, begins."""
        self._write(_STATE, time.monotonic())

    def rest(self) -> None:
        """There is nothing to do."""
        self._write(_STATE, -time.monotonic())

    def ask(self) -> bool:
        """Expect a beat or a rest from now on. Returns whether the engine has to be asked for it: not
        while it works, nor where an earlier question is open."""
        state, asked, _ = self._read()
        if state > 0 or asked > -state:
            return False
        self._write(_ASKED, time.monotonic())
        return True

    def resume(self) -> None:
        """The time up to now does not count: the machine, or all of the server, stood still."""
        self._write(_RESUMED, time.monotonic())

    def close(self) -> None:
        """Let go of shared memory; from here on it rests."""
        self._memory.close()
        self._memory = mmap.mmap(-1, _TIMES.size)

    @property
    def stalled_seconds(self) -> float:
        """How long the step under way has taken, or the engine, at rest, has not answered; 0 while there
        is neither."""
        state, asked, resumed = self._read()
        since = state if state > 0 else asked if asked > -state else math.inf
        return max(0.0, time.monotonic() - max(since, resumed))

    def _read(self) -> tuple[float, float, float]:
        return _TIMES.unpack_from(self._memory, 0)

    def _write(self, place: int, seconds: float) -> None:
        _TIME.pack_into(self._memory, place, seconds)


def shared_handle() -> int:
    """Returns the handle of a new file without a name, for a pulse that processes share; the caller
    closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_TIMES.size)
        return os.dup(file.fileno())
