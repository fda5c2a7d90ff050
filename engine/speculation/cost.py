"""The cost of a step: measured at start-up over a few sizes, corrected by every step that runs.

The gamma policies ask it what more rows would cost; the statistics ask it what a step at gamma 0
would have cost. Seconds throughout.

    step = overhead + machine * drafts * (curve(rows) + kv_slope * kv_tokens + pair_slope * pairs)

``curve`` is piecewise linear between knots and never falls. ``kv_tokens`` is the context summed
over the step's requests, which has to be read whatever reads it; ``pairs`` are pairs of a row and
a token of context, about ``rows`` times the mean context: what makes a draft row dear in a batch
of long texts. ``drafts`` is 1 but where some of several requests verify drafts: their numbers of rows
differ then, which no measurement at start-up shows, and attention takes them in more calls. Online,
``machine``, ``drafts`` and a factor per knot are learnt (``Correction``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import itemgetter, le, mul
from statistics import median_low
from typing import NamedTuple

import numpy as np

from drafters.batch_times import BatchTimes
from engine.speculation.correction import Correction

_EMA_RATE = 0.1
_LARGEST_ERROR = 0.15
"""Relative error of an overhead beyond which it counts no more (Huber)."""
_SMALLEST_SECONDS = 1e-9
_MOST_CHOSEN_ROWS = 64
_FAR_REQUESTS = 8
_FAR_ROWS = 4
"""Rows of each of the ``_FAR_REQUESTS`` requests that are measured side by side."""


class Measurement(NamedTuple):
    num_rows: int
    num_kv_tokens: int
    seconds: float
    num_requests: int = 1

    @property
    def num_pairs(self) -> float:
        return self.num_rows * self.num_kv_tokens / self.num_requests


class CostModel:
    """Step cost by rows and context, draft cost by drafter. The engine thread is the only caller.

    A measurement: rows, tokens of context over all requests, seconds, requests (1).
    """

    def __init__(
        self,
        measurements: Iterable[tuple[int, int, float] | tuple[int, int, float, int]],
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
        self._hidden_seconds: float | None = None
        self._rows, self._start, (self.kv_slope, self.pair_slope) = _fit(points)
        self._gaps = [right - left for left, right in pairwise(self._rows)]
        # Half of all rows: over these the curve's steepness beyond them is taken.
        self._half = max(bisect_right(self._rows, self._rows[-1] // 2) - 1, 0)
        self._correction = Correction(len(self._rows))
        self._draft_times: dict[str, BatchTimes] = {}
        self._redraw()

    def step_seconds(
        self, num_rows: int, num_kv_tokens: int, num_requests: int, has_drafts: bool = False
    ) -> float:
        """A whole step; ``num_kv_tokens`` is the context summed over its ``num_requests`` requests."""
        forward = self._forward(num_rows, num_kv_tokens, num_requests)
        hidden = 0.0 if has_drafts else self.waiting_seconds
        return self.overhead_seconds - hidden + forward * self._drafts(num_requests, has_drafts)

    def step_seconds_table(
        self, num_rows: int, num_extra: int, num_kv_tokens: int, num_requests: int
    ) -> list[float]:
        """``[k]`` is ``step_seconds(num_rows + k, ..)`` with k drafts among the rows, for k up to
        ``num_extra``; never falling."""
        # Whoever may grant drafts has asked for them: the device waits for the host in any case.
        plain = self.overhead_seconds + self._forward(num_rows, num_kv_tokens, num_requests)
        table = [plain]
        rows, scale = self._rows, self._machine * self._drafts(num_requests, True)
        context = self.kv_slope * num_kv_tokens
        pairs = self.pair_slope * num_kv_tokens / max(1, num_requests)
        knot = max(bisect_right(rows, num_rows + 1) - 1, 0)
        first, last = num_rows + 1, num_rows + num_extra
        while first <= last:
            end = min(rows[knot + 1] - 1, last) if knot + 1 < len(rows) else last
            slope = scale * (self._slopes[knot] + pairs)
            at_none = context + self._values[knot] - self._slopes[knot] * rows[knot]
            start = self.overhead_seconds + scale * at_none
            table += [start + slope * count for count in range(first, end + 1)]
            first, knot = end + 1, knot + 1
        for index, seconds in enumerate(table):
            if seconds > plain:
                break
            table[index] = plain
        return table

    def observe(
        self,
        num_rows: int,
        num_kv_tokens: int,
        num_requests: int,
        seconds: float,
        has_drafts: bool = False,
    ) -> None:
        """Learn from a step: ``seconds`` of all that grows with rows (forward and verification)."""
        predicted = self._forward(num_rows, num_kv_tokens, num_requests)
        predicted *= self._drafts(num_requests, has_drafts)
        surprise = math.log(max(seconds, _SMALLEST_SECONDS) / predicted)
        is_mixed = has_drafts and num_requests > 1
        self._correction.observe(self._nearest(num_rows), surprise, is_mixed)
        self._redraw()

    def observe_overhead(self, seconds: float, is_hidden: bool = False) -> None:
        """Learn from a step: ``seconds`` of all that does not grow with rows. ``is_hidden``: it was
        launched before the one before was read, so that the device did not wait for the host. Steps
        without drafts are believed to be so once one was; of others it is known when they are planned."""
        if is_hidden:
            known = seconds if self._hidden_seconds is None else self._hidden_seconds
            self._hidden_seconds = _moved(known, seconds)
        else:
            self.overhead_seconds = _moved(self.overhead_seconds, seconds)

    @property
    def waiting_seconds(self) -> float:
        """Seconds that a device which could have gone on waits for the host in a step for which drafters
        are asked."""
        hidden = self._hidden_seconds
        return 0.0 if hidden is None else max(0.0, self.overhead_seconds - hidden)

    def observe_draft(self, drafter: str, num_asked: int, seconds: float) -> None:
        """Learn what a call of ``drafter`` for so many requests took, that it was told of what came
        included."""
        self._draft_times.setdefault(drafter, BatchTimes()).observe(num_asked, seconds)

    def draft_seconds(self, drafter: str, num_asked: int) -> float:
        """Returns the seconds of a call of ``drafter`` for so many requests, as far as is known; 0 while
        none was timed."""
        times = self._draft_times.get(drafter)
        return 0.0 if times is None else times.expect(num_asked)

    def _drafts(self, num_requests: int, has_drafts: bool) -> float:
        return self._draft_factor if has_drafts and num_requests > 1 else 1.0

    def _forward(self, num_rows: int, num_kv_tokens: int, num_requests: int) -> float:
        pairs = num_rows * num_kv_tokens / max(1, num_requests)
        context = self.kv_slope * num_kv_tokens + self.pair_slope * pairs
        return self._machine * (self._curve(num_rows) + context)

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

    def _redraw(self) -> None:
        """Values and slopes of the curve as now believed; beyond the last knot it goes on as
        steeply as just before it, but never flatter than its mean slope over half of its rows."""
        self._machine, self._draft_factor, factors = self._correction.factors()
        values = _never_falling(list(map(mul, self._start, factors)))
        slopes = [
            (right - left) / gap
            for left, right, gap in zip(values, values[1:], self._gaps, strict=False)
        ]
        num_tail_rows = self._rows[-1] - self._rows[self._half]
        tail = (values[-1] - values[self._half]) / num_tail_rows if num_tail_rows else 0.0
        steepest = max(tail, *slopes[-1:], 0.0)
        # Rows without end at no cost are not believed: then in proportion.
        slopes.append(steepest or values[-1] / self._rows[-1])
        self._values, self._slopes = values, slopes


def _moved(known: float, seen: float) -> float:
    """Returns a mean of seconds after another was seen."""
    if known <= 0.0:
        return seen
    error = max(-_LARGEST_ERROR, min(_LARGEST_ERROR, seen / known - 1.0))
    return known * (1.0 + _EMA_RATE * error)


def _fit(points: Sequence[Measurement]) -> tuple[list[int], list[float], tuple[float, float]]:
    """Knots, their seconds without context, and the slopes of context and of pairs."""
    least = min(point.num_kv_tokens for point in points)
    near: dict[int, list[Measurement]] = {}
    for point in points:
        if point.num_kv_tokens == least:
            near.setdefault(point.num_rows, []).append(point)
    base = {count: median_low(each.seconds for each in near[count]) for count in sorted(near)}
    rows, seconds = list(base), list(base.values())
    slopes = _fit_slopes(
        [
            (
                point.num_kv_tokens - least,
                point.num_pairs - point.num_rows * least,
                point.seconds - float(np.interp(point.num_rows, rows, seconds)),
            )
            for point in points
            if point.num_kv_tokens > least
        ]
    )
    context = [slopes[0] * least + slopes[1] * count * least for count in rows]
    seconds = [max(a - b, _SMALLEST_SECONDS) for a, b in zip(seconds, context, strict=True)]
    if rows[0] > 1:
        # Fewer rows than were ever measured: nothing says that they are cheaper.
        rows, seconds = [1, *rows], [seconds[0], *seconds]
    return rows, _never_falling(seconds), slopes


def _fit_slopes(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares of seconds by (tokens, pairs), neither slope below 0."""
    if not points:
        return 0.0, 0.0
    tokens, pairs, seconds = np.array(points, dtype=np.float64).T
    both, _, rank, _ = np.linalg.lstsq(np.stack([tokens, pairs], 1), seconds, rcond=None)
    if rank == 2 and both.min() >= 0.0:
        return float(both[0]), float(both[1])
    singly = [
        max(0.0, float(each @ seconds) / max(float(each @ each), _SMALLEST_SECONDS))
        for each in (tokens, pairs)
    ]
    errors = [
        float(np.square(slope * each - seconds).sum())
        for slope, each in zip(singly, (tokens, pairs), strict=True)
    ]
    return (singly[0], 0.0) if errors[0] <= errors[1] else (0.0, singly[1])


def _never_falling(values: Sequence[float]) -> list[float]:
    """Least-squares isotonic regression (pool adjacent violators)."""
    if all(map(le, values, values[1:])):
        return list(values)
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            left, left_size = pools.pop()
            mean = (left * left_size + mean * size) / (left_size + size)
            size += left_size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


# --- what is measured at start-up ---


def bucket_row_counts(max_rows: int) -> list[int]:
    """Row counts to measure: powers of two, and half-way up to 64, where choosing gamma happens."""
    counts = {2**k for k in range(max_rows.bit_length())}
    counts |= {3 * 2**k for k in range(5)}
    return sorted({count for count in counts if count <= max_rows} | {max_rows})


def measure(
    run: Callable[[int, int, int], float],
    max_rows: int,
    repeats: int = 5,
    far_context: int = 512,
    max_kv_tokens: int | None = None,
    budget_seconds: float = 3.0,
    block_size: int = 1,
) -> list[Measurement]:
    """Measure ``run(num_rows, num_kv_tokens, num_requests) -> seconds``.

    Row counts that gamma chooses among, up to 64, run ``repeats`` times after a first time; so do one
    and eight rows over ``far_context`` tokens, and one row or a few of each of up to eight requests with
    as many tokens each, ``max_kv_tokens`` in all when every request takes whole blocks of ``block_size``.
    The fastest run counts, since neighbours only ever make one slower, and rounds go over all of them in
    turn, so that a slow spell of the machine hits all alike. Once ``budget_seconds`` are spent, points
    that take more than an eighth of them are left out of further rounds: the few rows among which gamma
    chooses most are quick, and one slow run would be believed for long. Larger counts, which only
    prompts reach, run twice; where one would take more than an eighth of the budget ``CostModel`` goes on
    as steeply instead.
    """
    counts = bucket_row_counts(max_rows)
    points = [(count, 0, 1) for count in counts if count <= _MOST_CHOSEN_ROWS]
    points += _far_points(max_rows, far_context, max_kv_tokens, block_size)
    first = {point: run(*point) for point in points}
    best = dict(first)
    spent = sum(first.values())
    for number in range(repeats):
        for point in points:
            if number == 0 or spent <= budget_seconds or first[point] <= budget_seconds / 8:
                seconds = run(*point)
                best[point] = min(best[point], seconds)
                spent += seconds
    measured = [
        Measurement(rows, kv_tokens, seconds, requests)
        for (rows, kv_tokens, requests), seconds in best.items()
    ]
    last = max((each for each in measured if not each.num_kv_tokens), key=itemgetter(0))
    for count in counts:
        if count > last.num_rows:
            if last.seconds * count / last.num_rows > budget_seconds / 8:
                break
            last = Measurement(count, 0, min(run(count, 0, 1), run(count, 0, 1)))
            measured.append(last)
    return measured


def _far_points(
    max_rows: int, context: int, max_kv_tokens: int | None, block_size: int
) -> list[tuple[int, int, int]]:
    """Rows, tokens of context and requests of the steps that tell what context costs."""
    if context < 1:
        return []
    points = [(count, context, 1) for count in (1, 8) if count <= max_rows]
    requests = min(_FAR_REQUESTS, max_rows // _FAR_ROWS)
    if max_kv_tokens is not None:
        num_blocks = -(-(context + _FAR_ROWS) // block_size)
        requests = min(requests, max_kv_tokens // (num_blocks * block_size))
    if requests > 1:
        points += [(rows * requests, context * requests, requests) for rows in (1, _FAR_ROWS)]
    return points
