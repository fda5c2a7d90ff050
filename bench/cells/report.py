"""Figures as Markdown: what all cells come to, then each cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bench.cells.figures import (
    AUTO,
    BEST,
    HTTP,
    PLAIN,
    CellFigures,
    Ratio,
    best_other,
    drafter_of,
    drafters_of,
    geometric_mean,
    ratios_to_plain,
    reference_of,
)
from bench.cells.groups import LEAST_RATIO, groups_of
from bench.cells.records import RoundRecord, RunRecord
from slipstream.client.markdown import markdown_table

_ESTIMATE_ERROR = 0.05


def report(rounds: Sequence[RoundRecord]) -> str:
    parts = [
        "# Cells\n\nRatios are against plain decoding the same way, of the same rounds and jobs, with "
        "the 95 % interval of the bootstrap. Prompts are included.\n"
    ]
    for served, cells in groups_of(rounds).items():
        parts.append(f"## {served}\n")
        for way in ("", HTTP):
            shown = [each for each in cells if PLAIN + way in each.names]
            if shown:
                parts += [_overview(shown, way), _means(shown, way), _estimates(shown, way)]
        parts += [_beside_http(cells), _losses(cells), _equality(cells)]
        parts += [_details(each) for each in cells]
    return "\n".join(filter(None, parts))


def shown_ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _overview(cells: Sequence[CellFigures], way: str) -> str:
    default = cells[0].cell.default
    rows = []
    for each in cells:
        best = best_other(each, way)
        auto = AUTO + way if AUTO + way in each.names else None
        rows.append(
            [
                f"{each.cell.workload}, {each.cell.sampling}, {each.cell.at_once}",
                f"{each.speed(PLAIN + way):.0f}",
                _against_plain(each, default + way, way),
                _against_plain(each, AUTO + way, way),
                "-" if best is None else drafter_of(best),
                "-" if best is None else _against_plain(each, best, way),
                "-" if best is None or auto is None else shown_ratio(each.ratio(auto, best)),
            ]
        )
    header = ["cell", "plain tok/s", f"default: {default}", AUTO, BEST, "its ratio", "auto / it"]
    title = "Over HTTP" if way else "In-process"
    return (
        f"{title}; the best other is chosen in hindsight:\n\n{markdown_table([header, *rows], 1)}\n"
    )


def _against_plain(figures: CellFigures, name: str, way: str) -> str:
    return shown_ratio(figures.ratio(name, PLAIN + way)) if name in figures.names else "-"


def _means(cells: Sequence[CellFigures], way: str) -> str:
    at_once = sorted({each.cell.at_once for each in cells})
    rows = []
    for name in (*drafters_of(cells, way), BEST):
        row = [name]
        for size in at_once:
            here = [each for each in cells if each.cell.at_once == size]
            row.append(_mean(ratios_to_plain(here, name, way)))
        rows.append(row)
    header = ["geometric mean over cells", *(f"{size} at once" for size in at_once)]
    return f"{markdown_table([header, *rows], 1)}\n"


def _mean(ratios: Sequence[Ratio]) -> str:
    return shown_ratio(geometric_mean(ratios)) if ratios else "-"


def _estimates(cells: Sequence[CellFigures], way: str) -> str:
    """How far what the engine says of itself is from what the clock says."""
    rows = [
        [
            name,
            *_errors(cells, name, way, lambda run: run.estimate),
            *_errors(cells, name, way, lambda run: run.step_estimate),
        ]
        for name in drafters_of(cells, way)
    ]
    header = ["estimate within 5 %", "as replies tell", "off by", "as steps tell", "off by"]
    return f"{markdown_table([header, *rows], 1)}\n" if rows else ""


def _errors(
    cells: Sequence[CellFigures],
    name: str,
    way: str,
    figure: Callable[[RunRecord], float | None],
) -> tuple[str, str]:
    """In how many cells it is right, and how far off it is at most."""
    errors = [
        said / ratio.value - 1
        for each in cells
        for ratio in ratios_to_plain([each], name, way)
        if (said := each.estimate(name + way, figure)) is not None
    ]
    if not errors:
        return "-", "-"
    close = sum(abs(error) <= _ESTIMATE_ERROR for error in errors)
    return f"{close} of {len(errors)}", f"{min(errors):+.0%} to {max(errors):+.0%}"


def _beside_http(cells: Sequence[CellFigures]) -> str:
    at_once = sorted({each.cell.at_once for each in cells})
    names = dict.fromkeys(
        name for each in cells for name in each.names if name + HTTP in each.names
    )
    rows = []
    for name in names:
        row = [name]
        for size in at_once:
            found = [
                each.ratio(name + HTTP, name)
                for each in cells
                if each.cell.at_once == size and {name, name + HTTP} <= {*each.names}
            ]
            row.append(_mean(found))
        rows.append(row)
    header = ["HTTP / in-process", *(f"{size} at once" for size in at_once)]
    return f"{markdown_table([header, *rows], 1)}\n" if rows else ""


def _losses(cells: Sequence[CellFigures]) -> str:
    """Where somebody certainly loses."""
    lines = [
        f"- {each.cell}: {name} {shown_ratio(ratio)}"
        for each in cells
        for name in each.names
        if drafter_of(name) != PLAIN
        and (ratio := each.ratio(name, reference_of(name))).high < LEAST_RATIO
    ]
    count = len({line.partition(":")[0] for line in lines})
    title = f"Intervals wholly under {LEAST_RATIO}: in {count} of {len(cells)} cells"
    return "\n".join([title + ("" if not lines else ":\n"), *lines]) + "\n"


def different_texts(rounds: Iterable[RoundRecord]) -> list[str]:
    """A line for every contender that in some run of a cell did not write what plain decoding did."""
    return [
        f"- {each.cell}: {name} wrote plain's text in {share:.1%} of outputs"
        for cells in groups_of(rounds).values()
        for each in cells
        for name in each.names
        if (share := each.same_text(name, each.names[0])) < 1
    ]


def _equality(cells: Sequence[CellFigures]) -> str:
    lines = [
        f"- {each.cell}: {name} {share:.1%}"
        for each in cells
        for name in each.names
        if (share := each.same_text(name, each.names[0])) < 1
    ]
    if not lines:
        return "All contenders wrote the same texts in all runs.\n"
    return "\n".join(["**Texts that are not plain's**, share of equal ones:\n", *lines]) + "\n"


_HEADER = ("contender", "tok/s", "ratio", "estimated", "tok/step", "accepted", "same text")


def _details(figures: CellFigures) -> str:
    cell = figures.cell
    rows = []
    for name in figures.names:
        said = figures.estimate(name, lambda run: run.estimate)
        accepted = figures.acceptance(name)
        rows.append(
            [
                name,
                f"{figures.speed(name):.1f}",
                shown_ratio(figures.ratio(name, reference_of(name)))
                if reference_of(name) in figures.names
                else "-",
                "-" if said is None else f"{said:.2f}",
                f"{figures.tokens_per_step(name):.2f}",
                "-" if accepted is None else f"{accepted:.0%}",
                f"{figures.same_text(name, figures.names[0]):.0%}",
            ]
        )
    lines = [
        f"### {cell}",
        "",
        f"{cell.num_prompts} prompts of {figures.mean_prompt_tokens:.0f} tokens on average, "
        f"{cell.num_new_tokens} new tokens each, rounds: {figures.num_rounds}.",
        "",
        markdown_table([_HEADER, *rows], 1),
        *(f"\n- {name}: {reason}" for name, reason in figures.failed.items()),
    ]
    return "\n".join(lines) + "\n"
