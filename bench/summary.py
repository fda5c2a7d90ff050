"""``python -m bench.summary RESULTS.json ..``: all drafters at a glance, from what ``bench`` wrote.

One table per model, batch size and sampling: a row per contender, a column per workload.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.contenders import GAMMA_0, TRANSFORMERS
from slipstream.client.markdown import markdown_table

Row = dict[str, Any]


def _speed(row: Row) -> str:
    return f"{row['decode_ratio']:.2f}x" if row["decode_ratio"] is not None else "-"


def _tokens(row: Row) -> str:
    return f"{row['tokens_per_step']:.2f}"


def _accepted(row: Row) -> str:
    return f"{row['acceptance_rate']:.0%}" if row["acceptance_rate"] is not None else "-"


def _draft_ms(row: Row) -> str:
    return f"{row['step_ms']['draft']:.1f}" if row["step_ms"] else "-"


FIGURES: dict[str, Callable[[Row], str]] = {
    "decoding speed against gamma 0": _speed,
    "tokens per step": _tokens,
    "accepted of the verified": _accepted,
    "draft ms per step": _draft_ms,
}


def summarise(document: dict[str, Any]) -> str:
    """Markdown."""
    parts = []
    for model in document["models"]:
        cells = model["cells"]
        for batch_size in sorted({cell["batch_size"] for cell in cells}):
            for sampling in dict.fromkeys(cell["sampling"]["name"] for cell in cells):
                chosen = [
                    cell
                    for cell in cells
                    if cell["batch_size"] == batch_size and cell["sampling"]["name"] == sampling
                ]
                if chosen:
                    parts.append(f"### {model['name']}, batch {batch_size}, {sampling}\n")
                    parts.append(_combined(chosen))
    return "\n".join(parts)


def _combined(cells: Sequence[Row]) -> str:
    """All figures of a contender on a workload in one cell of the table."""
    names = dict.fromkeys(row["name"] for cell in cells for row in cell["contenders"])
    rows = []
    for name in names:
        if name == GAMMA_0 or name.startswith(TRANSFORMERS):
            continue
        columns = [name]
        for cell in cells:
            found = [row for row in cell["contenders"] if row["name"] == name]
            columns.append(
                " / ".join(show(found[0]) for show in FIGURES.values()) if found else "-"
            )
        rows.append(columns)
    note = f"Each entry: {' / '.join(FIGURES)}.\n"
    return f"{note}\n{markdown_table([['drafter', *(cell['workload'] for cell in cells)], *rows], 1)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.summary", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    for path in parser.parse_args(arguments).results:
        print(summarise(json.loads(path.read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
