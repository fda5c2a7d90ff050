"""Studies as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


class Picture:
    """Curves side by side, in a file at ``path``. Raises ImportError without matplotlib."""

    def __init__(self, path: Path, titles: Sequence[str]) -> None:
        self._path = path
        figure = import_module("matplotlib.figure").Figure(figsize=(11, 3.4), layout="constrained")
        self._figure: Any = figure
        self._axes: list[Any] = list(figure.subplots(1, len(titles)))
        for axes, title in zip(self._axes, titles, strict=True):
            axes.set_title(title, fontsize=10)

    def draw(self, index: int, x: Iterable[float], y: Iterable[float], label: str) -> None:
        self._axes[index].plot(list(x), list(y), marker="o", markersize=3, label=label)

    def save(self, x_label: str, logarithmic: bool = False) -> None:
        for axes in self._axes:
            axes.set_xlabel(x_label, fontsize=9)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if logarithmic:
                axes.set_xscale("log")
        self._axes[0].legend(fontsize=8)
        # The same figures give the same file; and letters stay letters, which are small.
        style = {"svg.fonttype": "none", "svg.hashsalt": "slipstream"}
        with import_module("matplotlib").rc_context(style):
            self._figure.savefig(self._path, metadata={"Date": None})
