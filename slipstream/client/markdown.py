"""Tables for terminals and for pasting."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """A Markdown table with aligned columns; the first of ``rows`` is its head. Columns after the
    first ``num_text_columns`` hold figures, so they are set flush right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [_line(row, widths, num_text_columns) for row in rows]
    rule = [
        "-" * width if at < num_text_columns else "-" * (width - 1) + ":"
        for at, width in enumerate(widths)
    ]
    lines.insert(1, _line(rule, widths, num_text_columns))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], num_text_columns: int) -> str:
    padded = [
        cell.ljust(width) if at < num_text_columns else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"
