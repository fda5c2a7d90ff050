"""Steps measured at start-up: what the cost model begins with. Knows nothing of models: it is given a
callable that runs rows. Seconds throughout."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from statistics import median_low
from typing import NamedTuple

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

    Row counts that gamma chooses among, up to 64, count with the median of ``repeats`` runs after an
    untimed one; so do one and eight rows over ``far_context`` tokens, and one row or a few of each of
    up to eight requests with as many tokens each, ``max_kv_tokens`` in all when every request takes
    whole blocks of ``block_size``. Rounds go over all of them in turn, so that a slow spell of the
    machine hits all alike, and end early once ``budget_seconds`` are spent. Larger counts, which only
    prompts reach, run twice, the better counts; those that would take more than an eighth of the
    budget are left to ``CostModel``, which goes on as steeply.
    """
    counts = bucket_row_counts(max_rows)
    points = [(count, 0, 1) for count in counts if count <= _MOST_CHOSEN_ROWS]
    points += _far_points(max_rows, far_context, max_kv_tokens, block_size)
    spent = sum(run(*point) for point in points)
    seconds: dict[tuple[int, int, int], list[float]] = {point: [] for point in points}
    for _ in range(repeats):
        for point in points:
            seconds[point].append(run(*point))
        spent += sum(values[-1] for values in seconds.values())
        if spent > budget_seconds:
            break
    measured = [
        Measurement(rows, kv_tokens, median_low(values), requests)
        for (rows, kv_tokens, requests), values in seconds.items()
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
