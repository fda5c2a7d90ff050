"""What a process does about its memory when it has loaded what it works with."""

from __future__ import annotations

import ctypes
import gc


def settle_memory() -> None:
    """Takes what was loaded out of garbage collection, since a full collection over it stops all requests
    for some 0.2 s, and gives back to the system what loading has freed."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
