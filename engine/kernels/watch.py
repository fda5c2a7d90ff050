"""For those who write down which kernels run, to run them again."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class Renewal(NamedTuple):
    """Tells how a kernel's arguments are renewed before it is run again: ``key`` says to the step's plan
    which numbers go to ``places``, and in how many threads it runs. ``held`` owns memory that the other
    arguments point to: who may run the kernel again keeps it."""

    key: Hashable
    places: slice
    held: object = None


class Watcher(Protocol):
    def note_kernel(
        self, address: int, arguments: array[int], num_threads: int, renewal: Renewal | None
    ) -> None:
        """Before each run: where the machine code is, and a copy of what it is told."""


class _Watched(threading.local):
    watcher: Watcher | None = None


watched = _Watched()
"""Whoever watches the kernels that this thread runs."""


@contextmanager
def watch_kernels(watcher: Watcher) -> Iterator[None]:
    before, watched.watcher = watched.watcher, watcher
    try:
        yield
    finally:
        watched.watcher = before
