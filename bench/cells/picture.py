"""Pictures: ratios to plain decoding over requests at once, with their intervals; a panel per workload
and sampling, a file per model, weights, load and way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.cells.figures import AUTO, BEST, HTTP, PLAIN, CellFigures, ratios_to_plain
from bench.cells.groups import LEAST_RATIO, Served

_BESIDE = 0.03
"""How far apart, in powers of two, points of the same place are drawn."""


def can_draw() -> bool:
    """Whether matplotlib, of the extra plot, is there."""
    try:
        import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def draw_all(groups: Mapping[Served, Sequence[CellFigures]], output: Path) -> list[Path]:
    """Writes them beside ``output`` and returns where."""
    written = []
    for served, cells in groups.items():
        for way in ("", HTTP):
            shown = [each for each in cells if PLAIN + way in each.names]
            if shown:
                said = f"{output.stem}-{served.file_name}{'-http' if way else ''}.png"
                written.append(output.with_name(said))
                _draw(shown, way, f"{served}{', over HTTP' if way else ''}", written[-1])
    return written


def _draw(cells: Sequence[CellFigures], way: str, title: str, path: Path) -> None:
    workloads = list(dict.fromkeys(each.cell.workload for each in cells))
    samplings = list(dict.fromkeys(each.cell.sampling for each in cells))
    figure = import_module("matplotlib.figure").Figure(
        figsize=(1 + 4 * len(samplings), 1 + 2.6 * len(workloads)), layout="constrained"
    )
    panels = figure.subplots(
        len(workloads), len(samplings), squeeze=False, sharex=True, sharey="row"
    )
    sizes = sorted({each.cell.at_once for each in cells})
    default = cells[0].cell.default
    names = {default: f"default: {default}", AUTO: AUTO, BEST: BEST}
    for row, workload in zip(panels, workloads, strict=True):
        for axes, sampling in zip(row, samplings, strict=True):
            here = [
                each
                for each in cells
                if (each.cell.workload, each.cell.sampling) == (workload, sampling)
            ]
            for at, (name, label) in enumerate(names.items()):
                _draw_line(axes, here, (name, way), label, f"C{at}", (at - 1) * _BESIDE)
            _label(axes, f"{workload}, {sampling}", sizes)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
    figure.suptitle(f"{title}: times as fast as plain decoding")
    figure.savefig(path)


def _draw_line(
    axes: Any,
    cells: Iterable[CellFigures],
    drafter: tuple[str, str],
    label: str,
    colour: str,
    beside: float,
) -> None:
    """``drafter``: its name and the way, as of ``ratios_to_plain``."""
    points = sorted(
        (each.cell.at_once, ratio.value, ratio.low, ratio.high)
        for each in cells
        for ratio in ratios_to_plain([each], *drafter)
    )
    if not points:
        return
    at_once, values, lows, highs = zip(*points, strict=True)
    # A median may lie outside of what was drawn for it where runs are few.
    below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
    above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
    places = [size * 2**beside for size in at_once]
    axes.errorbar(
        places, values, yerr=(below, above), marker="o", capsize=3, color=colour, label=label
    )


def _label(axes: Any, title: str, sizes: Sequence[int]) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.axhline(LEAST_RATIO, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("requests at once")
