"""Which cells belong together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from bench.cells.figures import CellFigures
from bench.cells.records import RoundRecord, rounds_by_cell

LEAST_RATIO = 0.97
"""The share of plain decoding's speed that no contender may lie under with certainty."""


class Served(NamedTuple):
    """A group of comparable cells: one model, one kind of weights and one kind of load."""

    model: str
    weights: str
    steady: bool

    def __str__(self) -> str:
        weights = "its own weights" if self.weights == "own" else self.weights
        load = "so many all the time" if self.steady else "begun at once"
        return f"{self.model}, {weights}, {load}"

    @property
    def file_name(self) -> str:
        load = "steady" if self.steady else "closed"
        return f"{Path(self.model).name}-{self.weights}-{load}"


def groups_of(rounds: Iterable[RoundRecord]) -> dict[Served, list[CellFigures]]:
    """All cells' figures, in the order in which they were begun."""
    groups: dict[Served, list[CellFigures]] = {}
    for cell, own in rounds_by_cell(rounds).items():
        key = Served(cell.model, cell.weights, cell.steady)
        groups.setdefault(key, []).append(CellFigures(cell, own))
    return groups
