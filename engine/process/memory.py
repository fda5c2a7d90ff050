"""Measures a process's memory, and returns unused memory to the system after loading."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def settle_memory() -> None:
    """Takes what was loaded out of garbage collection, since a full collection over it stops all requests
    for some 0.2 s, and gives back to the system what loading has freed."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def own_bytes(pid: int) -> int:
    """Returns the bytes that a process has for itself: without those of files, which the kernel gives to
    others who need them. 0: it has gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
