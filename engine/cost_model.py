"""What a step costs: measured at start-up over a few row counts, corrected by every step that runs.

The gamma policies ask it what more rows would cost; the statistics ask it what a step at gamma 0
would have cost. Knows nothing of models: whoever builds it brings a callable that runs rows.
Seconds throughout.

    step = overhead + scale * (curve(num_rows) + context_slope * num_kv_tokens)

``curve`` is piecewise linear between knots and never falls. Online, ``scale`` follows the machine's
speed (clocks, neighbours), and a residual per knot follows what start-up got wrong about the
curve's shape.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from statistics import median
from typing import NamedTuple

_SCALE_RATE = 0.08
_RESIDUAL_RATE = 0.03
_LEAK = 0.004
"""What a knot's residual hands to ``scale`` per visit: where a machine slows down as a whole, row
counts that are not visited meanwhile must not come to look cheap."""
_EMA_RATE = 0.1
_LARGEST_SURPRISE = 0.15
"""Relative error beyond which an observation counts no more (Huber): a neighbour that makes one
step three times slower moves the model by one per cent, a machine that stays slower is learnt in
100 steps."""
_PATIENCE = 256
_FORGETTING = 0.005
"""A knot unseen for ``_PATIENCE`` steps drifts back to its start-up value. Without that, a few slow
steps at high row counts would be believed for ever, since gamma then never goes there again."""
_SMALLEST_SECONDS = 1e-9
_MOST_CHOSEN_ROWS = 64


class Measurement(NamedTuple):
    num_rows: int
    num_kv_tokens: int
    seconds: float


def bucket_row_counts(max_rows: int) -> list[int]:
    """Row counts to measure: powers of two, and half-way up to 64, where choosing gamma happens."""
    counts = {2**k for k in range(max_rows.bit_length())}
    counts |= {3 * 2**k for k in range(5)}
    return sorted({count for count in counts if count <= max_rows} | {max_rows})


def measure(
    run: Callable[[int, int], float],
    max_rows: int,
    repeats: int = 5,
    contexts: tuple[int, int] = (0, 512),
    budget_seconds: float = 2.0,
) -> list[Measurement]:
    """Measure ``run(num_rows, num_kv_tokens) -> seconds``.

    Row counts that gamma chooses among, up to 64, count with the median of ``repeats`` runs after an
    untimed one; one and eight rows at the second context too. Rounds go over all of them in turn, so
    that a slow spell of the machine hits all alike, and end early once ``budget_seconds`` are spent.
    Larger counts, which only prompts reach, run twice, the better counts; those that would take more
    than a quarter of the budget are left to ``CostModel``, which goes on as steeply.
    """
    near, far = contexts
    counts = bucket_row_counts(max_rows)
    points = [(count, near) for count in counts if count <= _MOST_CHOSEN_ROWS]
    if far > near:
        points += [(count, far) for count in (1, 8) if count <= max_rows]
    spent = sum(run(*point) for point in points)
    seconds: dict[tuple[int, int], list[float]] = {point: [] for point in points}
    for _ in range(repeats):
        for point in points:
            seconds[point].append(run(*point))
        spent += sum(values[-1] for values in seconds.values())
        if spent > budget_seconds:
            break
    measured = [Measurement(*point, median(values)) for point, values in seconds.items()]
    last = max((each for each in measured if each.num_kv_tokens == near), key=itemgetter(0))
    for count in counts:
        if count > last.num_rows:
            if last.seconds * count / last.num_rows > budget_seconds / 4:
                break
            last = Measurement(count, near, min(run(count, near), run(count, near)))
            measured.append(last)
    return measured


class CostModel:
    """Step cost by rows and context, draft cost by drafter. The engine thread is the only
    caller."""

    def __init__(
        self,
        measurements: Iterable[tuple[int, int, float]],
        overhead_seconds: float = 0.0,
    ) -> None:
        """Raises ValueError where there is no measurement, or one of no rows or no time."""
        points = [Measurement(*point) for point in measurements]
        if not points:
            raise ValueError("the cost model needs at least one measurement")
        for point in points:
            if point.num_rows < 1 or not 0 < point.seconds < math.inf:
                raise ValueError(f"not a measured step: {point}")
        self.overhead_seconds = overhead_seconds
        self.context_slope = _fit_context_slope(points)
        self._rows, self._start = self._fit_curve(points)
        self._scale = 1.0
        self._residuals = [1.0] * len(self._rows)
        self._last_seen = [0] * len(self._rows)
        self._num_observed = 0
        self._draft_seconds: dict[str, float] = {}
        self._values: list[float] = []
        self._slopes: list[float] = []
        self._redraw()

    def step_seconds(self, num_rows: int, num_kv_tokens: int) -> float:
        """A whole step; ``num_kv_tokens`` is the context summed over the step's requests."""
        context = self.context_slope * num_kv_tokens
        return self.overhead_seconds + self._scale * (self._curve(num_rows) + context)

    def step_seconds_table(self, num_rows: int, num_extra: int, num_kv_tokens: int) -> list[float]:
        """``[k]`` is ``step_seconds(num_rows + k, num_kv_tokens)``, for k up to ``num_extra``."""
        rows, scale = self._rows, self._scale
        fixed = self.overhead_seconds + scale * self.context_slope * num_kv_tokens
        table: list[float] = []
        last = num_rows + num_extra
        while num_rows <= last:
            knot = max(bisect_right(rows, num_rows) - 1, 0)
            end = min(rows[knot + 1] - 1, last) if knot + 1 < len(rows) else last
            slope = scale * self._slopes[knot]
            start = fixed + scale * self._values[knot] - slope * rows[knot]
            table += [start + slope * count for count in range(num_rows, end + 1)]
            num_rows = end + 1
        return table

    def observe(self, num_rows: int, num_kv_tokens: int, seconds: float) -> None:
        """Learn from a step: ``seconds`` of all that grows with rows (forward and verification)."""
        predicted = self._scale * (self._curve(num_rows) + self.context_slope * num_kv_tokens)
        surprise = _bounded(seconds / predicted - 1.0)
        self._scale *= 1.0 + _SCALE_RATE * surprise
        self._num_observed += 1
        self._forget_stale()
        for knot, weight in self._nearest(num_rows):
            residual = self._residuals[knot] * (1.0 + _RESIDUAL_RATE * surprise * weight)
            kept = residual - _LEAK * weight * (residual - 1.0)
            self._scale *= residual / kept
            self._residuals[knot] = kept
            self._last_seen[knot] = self._num_observed
        self._redraw()

    def observe_overhead(self, seconds: float) -> None:
        """Learn from a step: ``seconds`` of all that does not grow with rows."""
        if self.overhead_seconds <= 0.0:
            self.overhead_seconds = seconds
            return
        error = _bounded(seconds / self.overhead_seconds - 1.0)
        self.overhead_seconds *= 1.0 + _EMA_RATE * error

    def observe_draft(self, drafter: str, num_requests: int, seconds: float) -> None:
        """Learn what a call of ``drafter`` for ``num_requests`` requests took."""
        if num_requests < 1:
            return
        share = seconds / num_requests
        known = self._draft_seconds.get(drafter, share)
        limit = known * (1.0 + 4 * _LARGEST_SURPRISE)
        self._draft_seconds[drafter] = known + _EMA_RATE * (min(share, limit) - known)

    def draft_seconds(self, drafter: str) -> float:
        """One request's share of a call of ``drafter``; 0 while it was never timed."""
        return self._draft_seconds.get(drafter, 0.0)

    def _fit_curve(self, points: Sequence[Measurement]) -> tuple[list[int], list[float]]:
        by_rows: dict[int, list[float]] = {}
        for point in points:
            context = self.context_slope * point.num_kv_tokens
            by_rows.setdefault(point.num_rows, []).append(point.seconds - context)
        rows = sorted(by_rows)
        seconds = [max(median(by_rows[count]), _SMALLEST_SECONDS) for count in rows]
        if rows[0] > 1:
            # Fewer rows than were ever measured: nothing says that they are cheaper.
            rows, seconds = [1, *rows], [seconds[0], *seconds]
        return rows, _never_falling(seconds)

    def _curve(self, num_rows: int) -> float:
        knot = max(bisect_right(self._rows, num_rows) - 1, 0)
        return self._values[knot] + self._slopes[knot] * (num_rows - self._rows[knot])

    def _nearest(self, num_rows: int) -> list[tuple[int, float]]:
        """The knots that a row count teaches, with weights that sum to 1."""
        left = max(bisect_right(self._rows, num_rows) - 1, 0)
        if left + 1 == len(self._rows) or num_rows <= self._rows[left]:
            return [(left, 1.0)]
        low, high = self._rows[left], self._rows[left + 1]
        right_weight = (num_rows - low) / (high - low)
        return [(left, 1.0 - right_weight), (left + 1, right_weight)]

    def _forget_stale(self) -> None:
        oldest = self._num_observed - _PATIENCE
        for knot, seen in enumerate(self._last_seen):
            if seen < oldest:
                self._residuals[knot] += _FORGETTING * (1.0 - self._residuals[knot])

    def _redraw(self) -> None:
        """Values and slopes of the curve as now believed; beyond the last knot it goes on as
        steeply as just before it, but never flatter than its mean slope over half of its rows."""
        rows = self._rows
        values = _never_falling(
            [
                seconds * residual
                for seconds, residual in zip(self._start, self._residuals, strict=True)
            ]
        )
        slopes = [
            (values[i + 1] - values[i]) / (rows[i + 1] - rows[i]) for i in range(len(rows) - 1)
        ]
        half = max(bisect_right(rows, rows[-1] // 2) - 1, 0)
        num_tail_rows = rows[-1] - rows[half]
        tail = (values[-1] - values[half]) / num_tail_rows if num_tail_rows else 0.0
        steepest = max(tail, *slopes[-1:], 0.0)
        # Rows without end at no cost are not believed: then in proportion.
        slopes.append(steepest or values[-1] / rows[-1])
        self._values, self._slopes = values, slopes


def _fit_context_slope(points: Sequence[Measurement]) -> float:
    """Median over row counts of the slope between the shortest and the longest context measured."""
    by_rows: dict[int, list[Measurement]] = {}
    for point in points:
        by_rows.setdefault(point.num_rows, []).append(point)
    slopes = []
    for group in by_rows.values():
        near = min(group, key=lambda point: point.num_kv_tokens)
        far = max(group, key=lambda point: point.num_kv_tokens)
        if far.num_kv_tokens > near.num_kv_tokens:
            slopes.append((far.seconds - near.seconds) / (far.num_kv_tokens - near.num_kv_tokens))
    return max(0.0, median(slopes)) if slopes else 0.0


def _never_falling(values: Sequence[float]) -> list[float]:
    """Least-squares isotonic regression (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            left, left_size = pools.pop()
            mean = (left * left_size + mean * size) / (left_size + size)
            size += left_size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def _bounded(error: float) -> float:
    return max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, error))
