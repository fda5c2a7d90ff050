"""Summarizes a run in the figures that operators need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.client.markdown import markdown_table
from slipstream.tools.simulate.fleet import Run
from slipstream.tools.simulate.replica import Served


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Zeros where there are none."""
        if not len(seconds):
            return cls(0.0, 0.0, 0.0)
        p50, p99 = np.percentile(seconds, (50, 99))
        return cls(float(np.mean(seconds)), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class Figures:
    """Latencies are of requests that came after ``warm_up`` seconds; the rest is of the whole run, to the
    end of its last request. ``cost_per_million`` tokens written: what the replicas cost for as long as
    the run took; None where nothing was written."""

    num_replicas: int
    num_requests: int
    num_refused: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    first_token: Latency
    whole: Latency
    utilisation: float
    prefix_hit_rate: float
    tokens_per_step: float
    accepted_per_step: float
    mean_gamma: float
    rows_per_step: float
    num_steps: int
    cost_per_million: float | None


def figures(run: Run, price_per_hour: float = 1.0, warm_up: float = 0.0) -> Figures:
    """``price_per_hour``: of a replica."""
    ended = [each for each in run.served if each.end is not None]
    counted = [each for each in ended if each.work.at >= warm_up]
    totals = run.totals
    num_tokens = sum(each.num_emitted_tokens for each in totals)
    num_turns = sum(each.num_request_steps for each in totals)
    num_steps = sum(each.num_steps for each in totals)
    num_queries = sum(each.num_prefix_queries for each in totals)
    num_hits = sum(each.num_prefix_hits for each in totals)
    busy = sum(each.busy_seconds for each in totals)
    price = price_per_hour / 3600 * run.num_replicas * run.seconds
    return Figures(
        num_replicas=run.num_replicas,
        num_requests=len(run.served),
        num_refused=len(run.served) - len(ended),
        seconds=run.seconds,
        tokens_per_second=_ratio(num_tokens, run.seconds),
        requests_per_second=_ratio(len(ended), run.seconds),
        first_token=Latency.of([_first_token(each) for each in counted]),
        whole=Latency.of([_whole(each) for each in counted]),
        utilisation=_ratio(busy, run.num_replicas * run.seconds),
        prefix_hit_rate=_ratio(num_hits, num_queries),
        tokens_per_step=_ratio(num_tokens, num_turns),
        accepted_per_step=_ratio(sum(each.num_accepted_tokens for each in totals), num_turns),
        mean_gamma=_ratio(sum(each.num_draft_tokens for each in totals), num_turns),
        rows_per_step=_ratio(sum(each.num_rows for each in totals), num_steps),
        num_steps=num_steps,
        cost_per_million=price / num_tokens * 1e6 if num_tokens else None,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _first_token(served: Served) -> float:
    assert served.first_token is not None
    return served.first_token - served.work.at


def _whole(served: Served) -> float:
    assert served.end is not None
    return served.end - served.work.at


_HEADER = (
    "run",
    "replicas",
    "requests",
    "refused",
    "tokens/s",
    "TTFT p50, p99 (ms)",
    "whole p50, p99 (ms)",
    "busy",
    "prefix hits",
    "accepted/step",
    "cost/M tokens",
)


def table(rows: Sequence[tuple[str, Figures]]) -> str:
    """Markdown, readable as it is on a terminal."""
    return markdown_table([_HEADER, *(_row(name, each) for name, each in rows)], 1)


def _row(name: str, each: Figures) -> tuple[str, ...]:
    cost = each.cost_per_million
    return (
        name,
        str(each.num_replicas),
        str(each.num_requests),
        str(each.num_refused),
        f"{each.tokens_per_second:.0f}",
        _pair(each.first_token),
        _pair(each.whole),
        f"{each.utilisation:.0%}",
        f"{each.prefix_hit_rate:.0%}",
        f"{each.accepted_per_step:.2f}",
        "-" if cost is None else f"{cost:.3f}",
    )


def _pair(latency: Latency) -> str:
    return f"{latency.p50 * 1e3:.0f}, {latency.p99 * 1e3:.0f}"
