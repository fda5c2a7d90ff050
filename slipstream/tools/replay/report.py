"""Reports a replay's results: as a table, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.client.markdown import markdown_table
from slipstream.tools.replay.replay import ReplayResult

SCHEMA_VERSION = 1
_HEADER = (
    "drafter",
    "shape",
    "budget",
    "tokens/step",
    "accepted",
    "wasted rows/step",
    "us/step",
    "est. speed-up",
)
_NUM_TEXT_COLUMNS = 2


def table(results: Sequence[ReplayResult]) -> str:
    """Markdown, readable as it is on a terminal."""
    return markdown_table([_HEADER, *map(_row, results)], _NUM_TEXT_COLUMNS)


def _row(result: ReplayResult) -> tuple[str, ...]:
    rate = result.acceptance_rate
    return (
        result.case.drafter,
        result.case.shape,
        str(result.case.num_nodes),
        f"{result.tokens_per_step:.2f}",
        "-" if rate is None else f"{rate:.1%}",
        f"{result.wasted_rows_per_step:.2f}",
        f"{result.median_draft_seconds * 1e6:.0f}",
        f"{result.estimated_speedup:.2f}x",
    )


def to_json(result: ReplayResult) -> dict[str, Any]:
    """Seconds, counts and rates of one case."""
    case = result.case
    return {
        "drafter": case.drafter,
        "shape": case.shape,
        "width": case.width,
        "budget": case.num_nodes,
        "num_steps": result.num_steps,
        "num_tokens": result.num_tokens,
        "num_draft_tokens": result.num_draft_tokens,
        "num_accepted_tokens": result.num_accepted_tokens,
        "tokens_per_step": result.tokens_per_step,
        "acceptance_rate": result.acceptance_rate,
        "wasted_rows_per_step": result.wasted_rows_per_step,
        "median_draft_seconds": result.median_draft_seconds,
        "mean_draft_seconds": result.mean_draft_seconds,
        "mean_open_seconds": sum(result.open_seconds) / len(result.open_seconds),
        "estimated_speedup": result.estimated_speedup,
    }


def check_plot() -> None:
    """Raises ImportError where nothing can be plotted: before hours of replay, not after."""
    import_module("matplotlib.figure")


def plot(results: Sequence[ReplayResult], path: Path) -> None:
    """Tokens per step and estimated speed-up over the budget, a line per drafter and shape.

    Raises ImportError without matplotlib, OSError or ValueError where ``path`` cannot be written.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, group in _by_line(results).items():
        budgets = [result.case.num_nodes for result in group]
        left.plot(budgets, [result.tokens_per_step for result in group], marker="o", label=name)
        right.plot(budgets, [result.estimated_speedup for result in group], marker="o", label=name)
    left.set_ylabel("tokens per step")
    right.set_ylabel("estimated speed-up")
    right.axhline(1.0, color="grey", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel("budget, nodes per step")
        axes.set_ylim(bottom=0)
    left.legend()
    figure.savefig(path)


def _by_line(results: Sequence[ReplayResult]) -> dict[str, list[ReplayResult]]:
    lines: dict[str, list[ReplayResult]] = {}
    for result in sorted(results, key=lambda each: each.case.num_nodes):
        lines.setdefault(f"{result.case.drafter} {result.case.shape}", []).append(result)
    return lines
