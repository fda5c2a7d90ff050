"""Memory for weights that are read from front to back at every step, in pages of 2 MiB where the kernel
grants them: with pages of 4 KiB a core looks up an address for every 64 lines that it reads."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch

_PAGE = 1 << 21
_REGION = 16 * _PAGE
_ALIGNED = 64
_lock = Lock()


class _Region:
    """Memory from which tensors are cut; it lives for as long as one of them does."""

    def __init__(self, num_bytes: int) -> None:
        held = mmap.mmap(-1, -(-num_bytes // _PAGE) * _PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel that grants none
                held.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(held, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor | None:
        if self._used + num_bytes > len(self._bytes):
            return None
        taken = self._bytes[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNED) * _ALIGNED
        return taken


class _Latest:
    """The region that is not full yet."""

    region: _Region | None = None


def empty_weights(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for weights, not initialised."""
    num_bytes = math.prod(shape) * dtype.itemsize
    with _lock:
        taken = None if _Latest.region is None else _Latest.region.take(num_bytes)
        if taken is None:
            fresh = _Region(max(num_bytes, _REGION))
            taken = fresh.take(num_bytes)
            assert taken is not None
            if num_bytes < _REGION:
                _Latest.region = fresh
    return taken.view(dtype).view(shape)


def as_weights(values: torch.Tensor) -> torch.Tensor:
    """A copy in such memory, contiguous."""
    return empty_weights(tuple(values.shape), values.dtype).copy_(values)
