"""From rounds to figures with intervals: pure functions, no clock.

A ratio of two contenders pairs their runs of the same job in the same round, which stood next to each
other in time: the median over rounds of each job's quotient, and over jobs the mean that weighs
each by the reference's seconds, which is the quotient of the total times where nothing disturbs. Its
interval comes from the bootstrap (Efron and Tibshirani, 1993): jobs are drawn anew with replacement, and
of each its rounds; 95 % of what comes out lies within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench.cells.records import CellKey, RoundRecord, RunRecord

PLAIN = "plain"
AUTO = "auto"
HTTP = " (HTTP)"
BEST = "best other"
_NUM_DRAWS = 2000
_TAILS = (2.5, 97.5)

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Above 1: faster than the reference. ``draws``: what the bootstrap drew."""

    value: float
    draws: Floats

    @property
    def low(self) -> float:
        return float(np.percentile(self.draws, _TAILS[0]))

    @property
    def high(self) -> float:
        return float(np.percentile(self.draws, _TAILS[1]))


def geometric_mean(ratios: Sequence[Ratio]) -> Ratio:
    """Returns the mean of ratios of different cells, whose draws are independent."""
    return Ratio(
        float(np.exp(np.mean([np.log(each.value) for each in ratios]))),
        np.exp(np.mean([np.log(each.draws) for each in ratios], axis=0)),
    )


class CellFigures:
    """One cell's rounds. ``failed``: why contenders are not among ``names``."""

    def __init__(self, cell: CellKey, rounds: Sequence[RoundRecord]) -> None:
        self.cell = cell
        self.mean_prompt_tokens = rounds[0].mean_prompt_tokens
        self.num_rounds = len(rounds)
        self.failed: Mapping[str, str] = {
            name: reason for each in rounds for name, reason in each.failed.items()
        }
        self._ratios: dict[tuple[str, str], Ratio] = {}
        self._runs = {
            name: [each.runs[name] for each in rounds]
            for name in cell.contenders
            if all(name in each.runs for each in rounds)
        }

    @property
    def names(self) -> list[str]:
        return list(self._runs)

    @cached_property
    def _draws(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The same for all contenders: jobs ``[draw, job]``, and of each ``[draw, job, round]``."""
        some = next(iter(self._runs.values()))
        num_rounds, num_jobs = len(some), len(some[0])
        random = np.random.default_rng(2026)
        jobs = random.integers(num_jobs, size=(_NUM_DRAWS, num_jobs))
        return jobs, random.integers(num_rounds, size=(_NUM_DRAWS, num_jobs, num_rounds))

    def ratio(self, name: str, reference: str) -> Ratio:
        """``name`` against ``reference``. Raises KeyError where one of them is not there."""
        pair = name, reference
        if pair not in self._ratios:
            self._ratios[pair] = self._ratio(*pair)
        return self._ratios[pair]

    def _ratio(self, name: str, reference: str) -> Ratio:
        seconds = self._of_runs(reference, lambda run: run.seconds)
        theirs = self._of_runs(reference, lambda run: run.tokens / run.seconds)
        quotients = self._of_runs(name, lambda run: run.tokens / run.seconds) / theirs
        jobs, rounds = self._draws
        value = _combined(np.median(seconds, axis=-1), np.median(quotients, axis=-1))
        drawn = [
            np.median(np.take_along_axis(each[jobs], rounds, axis=-1), axis=-1)
            for each in (seconds, quotients)
        ]
        return Ratio(float(value), _combined(*drawn))

    def _of_runs(self, name: str, figure: Callable[[RunRecord], float]) -> Floats:
        """``[job, round]``."""
        return np.array([[figure(run) for run in jobs] for jobs in self._runs[name]]).T

    def speed(self, name: str) -> float:
        """Tokens per second: of the jobs' medians over rounds."""
        tokens, seconds = (
            np.median(self._of_runs(name, figure), axis=-1).sum()
            for figure in (lambda run: run.tokens, lambda run: run.seconds)
        )
        return float(tokens / seconds)

    def tokens_per_step(self, name: str) -> float:
        return self._total(name, lambda run: run.written) / self._total(name, lambda run: run.steps)

    def acceptance(self, name: str) -> float | None:
        """None where nothing was verified."""
        drafted = self._total(name, lambda run: run.drafted)
        return self._total(name, lambda run: run.accepted) / drafted if drafted else None

    def _total(self, name: str, figure: Callable[[RunRecord], float]) -> float:
        return float(self._of_runs(name, figure).sum())

    def estimate(self, name: str, figure: Callable[[RunRecord], float | None]) -> float | None:
        """Returns the gain that the engine itself estimates: medians over rounds, weighed as ratios are
        by plain decoding's time. None without estimates."""
        said = [[figure(run) for run in jobs] for jobs in self._runs[name]]
        if any(each is None for jobs in said for each in jobs):
            return None
        own = np.median(self._of_runs(name, lambda run: run.seconds), axis=-1)
        gains = np.median(np.array(said, dtype=np.float64).T, axis=-1)
        return float((own * gains).sum() / own.sum())

    def same_text(self, name: str, reference: str) -> float:
        """Share of all rounds' outputs that are the reference's of the first round."""
        expected = [text for run in self._runs[reference][0] for text in run.texts]
        found = [
            text == wanted
            for jobs in self._runs[name]
            for text, wanted in zip(
                (text for run in jobs for text in run.texts), expected, strict=True
            )
        ]
        return sum(found) / len(found)


def _combined(seconds: Floats, quotients: Floats) -> Floats:
    """The jobs' mean, weighed by the reference's seconds: total time against total time."""
    total: Floats = seconds.sum(axis=-1) / (seconds / quotients).sum(axis=-1)
    return total


def reference_of(name: str) -> str:
    """The plain contender that goes the same way."""
    return PLAIN + HTTP if name.endswith(HTTP) else PLAIN


def drafter_of(name: str) -> str:
    return name.removesuffix(HTTP)


def best_other(figures: CellFigures, way: str) -> str | None:
    """The fastest in hindsight of those that draft and are not ``auto``, of one way ("" or HTTP)."""
    others = [
        name
        for name in figures.names
        if name.endswith(HTTP) == bool(way) and drafter_of(name) not in (PLAIN, AUTO)
    ]
    if not others or PLAIN + way not in figures.names:
        return None
    return max(others, key=lambda name: figures.ratio(name, PLAIN + way).value)


def ratios_to_plain(cells: Iterable[CellFigures], name: str, way: str) -> list[Ratio]:
    """``name``: a drafter or ``BEST``. Of the cells that have it and plain decoding in this way."""
    chosen = ((each, best_other(each, way) if name == BEST else name + way) for each in cells)
    return [
        each.ratio(which, PLAIN + way)
        for each, which in chosen
        if which is not None and {which, PLAIN + way} <= {*each.names}
    ]


def drafters_of(cells: Iterable[CellFigures], way: str) -> list[str]:
    """All drafters' names that any cell has in this way."""
    names = (name for each in cells for name in each.names if name.endswith(HTTP) == bool(way))
    return [name for name in dict.fromkeys(map(drafter_of, names)) if name != PLAIN]
