"""For those who write down which kernels run, to run them again."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class Renewal(NamedTuple):
    """What a kernel's arguments need before it is run again: ``key`` tells the step's plan which numbers
    go to ``places``, and in how many threads it runs."""

    key: Hashable
    places: slice


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
