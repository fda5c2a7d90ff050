"""Figures as Markdown tables, readable as they are on a terminal."""

from __future__ import annotations

from bench.report import CellReport, StepMs, Summary
from slipstream.client.markdown import markdown_table

_SPEED_HEADER = (
    "contender",
    "tok/s",
    "vs gamma 0",
    "(rounds)",
    "decode only",
    "estimated",
    "vs transformers",
    "tok/step",
    "accepted",
    "same text",
)
_STEP_HEADER = (
    "contender",
    "ms/step",
    "draft",
    "forward",
    "verify",
    "other",
    "outside forward",
)


def cell_tables(report: CellReport, what: str) -> str:
    """One cell's two tables under a heading; ``what`` says which model."""
    cell = report.cell
    steps = [_step_row(each.name, each.step_ms) for each in report.contenders if each.step_ms]
    lines = [
        f"### {cell.workload}, batch {cell.batch_size}, {cell.sampling.name}",
        f"{report.num_prompts} prompts of {report.mean_prompt_tokens:.0f} tokens on average, "
        f"{report.num_new_tokens} new tokens each, medians of {report.num_rounds} rounds, on {what}",
        "",
        markdown_table([_SPEED_HEADER, *map(_speed_row, report.contenders)], 1),
        "",
        markdown_table([_STEP_HEADER, *steps], 1),
    ]
    agreement = report.transformers_agreement
    if agreement is not None:
        lines.append(
            f"\ntransformers' own greedy text: {agreement.equal_outputs:.0%} of outputs equal ours, "
            f"{agreement.equal_prefix:.0%} of the tokens before the first difference"
        )
    return "\n".join(lines) + "\n"


def _speed_row(summary: Summary) -> list[str]:
    low_high = summary.ratio_range
    return [
        summary.name,
        f"{summary.tokens_per_second:.1f}",
        _ratio(summary.ratio),
        "-" if low_high is None else f"{low_high[0]:.2f}-{low_high[1]:.2f}",
        _ratio(summary.decode_ratio),
        _ratio(summary.estimated_speedup),
        _ratio(summary.vs_transformers),
        f"{summary.tokens_per_step:.2f}",
        _percent(summary.acceptance_rate),
        _percent(summary.same_text),
    ]


def _step_row(name: str, ms: StepMs) -> list[str]:
    parts = (ms.step, ms.draft, ms.forward, ms.verify, ms.other)
    outside = f"{ms.outside_forward:.2f} ({ms.share_outside_forward:.1%})"
    return [name, *(f"{part:.2f}" for part in parts), outside]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
