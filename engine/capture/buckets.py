"""Sizes that steps are padded to, so that few graphs serve them all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from engine.batch import Bucket, InputBatch

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_FEW_REQUESTS = (1, 4, 16)


def make_buckets(most_rows: int, most_requests: int) -> tuple[Bucket, ...]:
    """All up to ``most_rows``, the smallest first. Padding is at most half of a small step's rows, and a
    third of a large one's. ``most_requests``: that a step can have.

    A step has as many rows as requests at least: so what a bucket can hold is bounded by both."""
    sizes = [rows for rows in _ROWS if rows < most_rows] + [most_rows] * (most_rows > 0)
    buckets = []
    for rows in sizes:
        most = min(rows, most_requests)
        buckets += [Bucket(rows, few) for few in _FEW_REQUESTS if few < most]
        buckets.append(Bucket(rows, most))
    return tuple(buckets)


def find_bucket(buckets: Sequence[Bucket], batch: InputBatch) -> Bucket | None:
    """The smallest that has room for the batch; None: it is larger than all."""
    wanted = Bucket(batch.num_rows, len(batch.requests))
    fitting = buckets[bisect_left(buckets, wanted) :]
    return next((each for each in fitting if each.num_requests >= wanted.num_requests), None)
