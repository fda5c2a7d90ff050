"""A bench as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from client.bench_report import ArmResult, ArmSummary
from client.errors import FlagError

_SIZE = (13.0, 4.2)


def check_plot(path: Path) -> None:
    """Before the bench, not after: raises ModuleNotFoundError where nothing can be plotted, FlagError
    where ``path`` has a suffix that is no picture's."""
    figure = import_module("matplotlib.figure").Figure()
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise FlagError(f"--plot {path}: must end with one of: .{', .'.join(sorted(known))}")


def plot(summaries: Sequence[ArmSummary], arms: Sequence[ArmResult], path: Path) -> None:
    """Tokens per second and speed-up of each arm, and over its requests how long the first token,
    and each later one, took.

    Raises OSError where ``path`` cannot be written.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=_SIZE, layout="constrained")
    speed, first, later = figure.subplots(1, 3)
    _draw_speed(speed, summaries)
    for arm in arms:
        replies = [reply for round_ in arm.rounds for reply in round_]
        _draw_shares(first, arm.name, [reply.time_to_first_token for reply in replies])
        _draw_shares(later, arm.name, [reply.time_per_output_token for reply in replies])
    first.set_xlabel("milliseconds to the first token")
    later.set_xlabel("milliseconds per output token")
    for axes in (first, later):
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.legend()
    figure.savefig(path)


def _draw_speed(axes: Any, summaries: Sequence[ArmSummary]) -> None:
    names = [summary.name for summary in summaries]
    # The colours of the curves beside them.
    colors = [f"C{number}" for number in range(len(names))]
    bars = axes.bar(names, [summary.throughput for summary in summaries], color=colors)
    labels = [
        f"{summary.throughput:.0f}"
        + ("" if summary.speedup is None else f"\n{summary.speedup:.2f}x")
        for summary in summaries
    ]
    axes.bar_label(bars, labels)
    axes.margins(y=0.15)
    axes.set_ylabel("tokens per second, all requests together")


def _draw_shares(axes: Any, name: str, seconds: Sequence[float | None]) -> None:
    """The share of requests that took no longer, over milliseconds."""
    known = sorted(value * 1000 for value in seconds if value is not None)
    shares = [(rank + 1) / len(known) for rank in range(len(known))]
    axes.step(known, shares, where="post", marker=".", label=name)
