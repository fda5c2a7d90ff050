"""Estimates how long open requests will take, for the ``Retry-After`` of refused clients."""

from __future__ import annotations

from collections.abc import Iterable

from engine.request.stats import StepStats
from engine.schedule.request import Request

# An estimate is of so many seconds of steps, the latest counting most.
_MEMORY_SECONDS = 10.0
# How much a request that ends says about how much of what they may write requests do write.
_SHARE_WEIGHT = 0.05


class _Pace:
    """Seconds per token, over the latest steps."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def observe(self, seconds: float, num_tokens: int) -> None:
        kept = max(0.0, 1.0 - seconds / _MEMORY_SECONDS)
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + num_tokens

    def seconds(self, num_tokens: float) -> float:
        """Returns the seconds that so many tokens take; 0 where nothing was measured."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0


class Backlog:
    """Learns from the steps of a full engine what tokens cost, and from requests that end how much of
    ``max_tokens`` is written. No clock: time is the steps'."""

    def __init__(self) -> None:
        self._prompt = _Pace()
        self._output = _Pace()
        self._share = 1.0

    def observe_step(self, stats: StepStats) -> None:
        """Learns from a step. Steps without waiting requests say little about a full batch, and are
        left out."""
        if not stats.num_waiting or not stats.num_rows:
            return
        prompt_seconds = stats.step_seconds * stats.num_prompt_tokens / stats.num_rows
        self._prompt.observe(prompt_seconds, stats.num_prompt_tokens)
        self._output.observe(stats.step_seconds - prompt_seconds, stats.num_emitted_tokens)

    def observe_end(self, request: Request) -> None:
        """However it ended, if it has written anything: one who left the queue says nothing."""
        if request.num_output_tokens:
            allowed = request.num_output_tokens + request.num_tokens_left
            share = request.num_output_tokens / allowed
            self._share += _SHARE_WEIGHT * (share - self._share)

    def seconds(self, requests: Iterable[Request]) -> float:
        """Until these are done at the present pace."""
        num_prompt = num_output = 0.0
        for each in requests:
            # One who decodes lacks a single token, its anchor.
            num_prompt += each.num_new_tokens - 1
            allowed = each.num_output_tokens + each.num_tokens_left
            expected = self._share * allowed - each.num_output_tokens
            num_output += min(each.num_tokens_left, max(1.0, expected))
        return self._prompt.seconds(num_prompt) + self._output.seconds(num_output)
