"""Since when an engine's step is under way, in memory that other processes may share: whoever looks needs
no answer from the engine, which cannot give one while it hangs."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time

_TIME = struct.Struct("d")


class Pulse:
    """``handle``: of a file that ``shared_handle`` made, in another process; None: this process's own
    memory. The clock is one for all processes of a machine. One engine writes; anybody reads."""

    def __init__(self, handle: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if handle is None else handle, _TIME.size)

    def beat(self) -> None:
        """A step, or what comes before it, begins."""
        _TIME.pack_into(self._memory, 0, time.monotonic())

    def rest(self) -> None:
        """There is nothing to do."""
        _TIME.pack_into(self._memory, 0, 0.0)

    def close(self) -> None:
        """Let go of shared memory; from here on it rests."""
        self._memory.close()
        self._memory = mmap.mmap(-1, _TIME.size)

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken; 0 while there is none."""
        (begin,) = _TIME.unpack_from(self._memory, 0)
        return max(0.0, time.monotonic() - begin) if begin else 0.0


def shared_handle() -> int:
    """Returns the handle of a new file without a name, for a pulse that processes share; the caller
    closes it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_TIME.size)
        return os.dup(file.fileno())
