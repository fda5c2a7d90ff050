"""The time that a step would have taken at gamma 0, which speed-ups are measured against.

Each request of a batch lives through the whole step, and at gamma 0 the same batch would have needed one
step per token. So a request's speed-up over a step is the baseline seconds of its emitted tokens over the
seconds the step took, and over its life the quotient of the two sums. The baseline is paired with its
step: the time measured, less drafting, times the cost model's ratio of the step without draft rows to the
step as it ran. What slows the machine down in one step then slows its baseline too, and a step without
drafts counts as 1. Prompt rows are run once either way, so only the first token is charged for them.

At gamma 0 the batch would be larger, too: a request that drafts well is done before its time, and
those that are left run in steps that look cheap and write little. ``EarlyFinishers`` are counted as if
they were still there, until their time is over or another request has come in their place.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from engine.request.stats import SpeculativeStats
from engine.speculation.cost import CostModel


class Baseline(NamedTuple):
    """Gamma-0 steps that would have replaced one step: the first with its prompt rows, the others
    without. ``num_requests`` would have written a token in each."""

    first_seconds: float
    next_seconds: float
    num_requests: int

    def seconds(self, num_emitted: float) -> float:
        """Time of that many tokens of one request. A run trimmed to nothing still took a step."""
        return self.first_seconds + max(0.0, num_emitted - 1.0) * self.next_seconds

    def batch_seconds(self, num_emitted: int) -> float:
        """Time of the step's prompts, and of that many tokens of all its requests together."""
        if not num_emitted:
            return self.first_seconds
        prompt_seconds = self.first_seconds - self.next_seconds
        return prompt_seconds + self.next_seconds * num_emitted / self.num_requests


class EarlyFinishers:
    """Requests that are done and would still be writing at gamma 0, by the clock of the steps."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: list[float] = []

    def __len__(self) -> int:
        return len(self._ends)

    def start(self) -> None:
        """A request starts, in the place of the one that would have been done first."""
        if self._ends:
            heapq.heappop(self._ends)

    def finish(self, account: SpeculativeStats) -> None:
        """A request with this account is done."""
        left = account.baseline_seconds - account.step_seconds
        if left > 0:
            heapq.heappush(self._ends, self._now + left)

    def step(self, seconds: float, num_requests: int) -> None:
        """A step is over after which ``num_requests`` go on; when none does, none is missed."""
        self._now += seconds
        while self._ends and (not num_requests or self._ends[0] <= self._now):
            heapq.heappop(self._ends)


def estimate_baseline(
    cost: CostModel,
    seconds: float,
    *,
    num_rows: int,
    num_base_rows: int,
    num_sampling: int,
    num_kv_tokens: int,
    num_requests: int,
    num_early: int = 0,
) -> Baseline:
    """The gamma-0 steps that stand for one that took ``seconds`` without drafting, over ``num_rows`` rows
    with draft nodes, ``num_base_rows`` without; ``num_kv_tokens`` over all ``num_requests`` requests, of
    which ``num_sampling`` sampled. ``num_early``: ``EarlyFinishers``, which were not among them."""
    has_drafts = num_rows > num_base_rows
    if not has_drafts and not num_early and num_base_rows == num_sampling:  # it was such a step
        return Baseline(max(0.0, seconds), max(0.0, seconds), num_sampling)
    as_run = cost.step_seconds(num_rows, num_kv_tokens, num_requests, has_drafts)
    num_all = num_requests + num_early
    num_kv_tokens = num_kv_tokens * num_all // num_requests
    num_writing = max(1, min(num_sampling, num_base_rows)) + num_early
    first = cost.step_seconds(num_base_rows + num_early, num_kv_tokens, num_all)
    plain = cost.step_seconds(num_writing, num_kv_tokens, num_all)
    seconds = max(0.0, seconds)
    return Baseline(seconds * first / as_run, seconds * plain / as_run, num_writing)
