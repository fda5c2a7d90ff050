"""A progress bar where tqdm is installed, else nothing but the tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Bar(Protocol):
    def step(self, label: str) -> None:
        """One more run is about to start."""

    def write(self, text: str) -> None:
        """Print without tearing the bar."""


class _Plain:
    def step(self, label: str) -> None:
        """Nothing to show."""

    def write(self, text: str) -> None:
        print(text, flush=True)


class _Tqdm:
    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._started = False

    def step(self, label: str) -> None:
        if self._started:
            self._bar.update(1)
        self._started = True
        self._bar.set_postfix_str(label)

    def write(self, text: str) -> None:
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()


@contextmanager
def progress_bar(total: int) -> Iterator[Bar]:
    """``total`` runs in all; on standard error, and only where someone watches."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # an extra; stubs not worth one
    except ImportError:
        yield _Plain()
        return
    with tqdm(total=total, unit="run", disable=not sys.stderr.isatty()) as bar:
        yield _Tqdm(bar)
