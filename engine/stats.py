"""Accounts of speculation: per request for its reply, per step for the metrics.

How a step's time is shared. Requests in a batch run side by side, and each of them lives through
the whole step: a step of 50 ms costs every request in it 50 ms. At gamma 0 the same batch would
have needed one step per token. So a request's speed-up over a step is

    baseline seconds of its emitted tokens / seconds the step took

and over its life the quotient of the two sums. The baseline is paired with its step: the time
measured, less drafting, times the cost model's ratio of the step without draft rows to the step as
it ran. What slows the machine down in one step then slows its baseline too, and a step without
drafts counts as 1. Prompt rows are run once either way, so only the first of the emitted tokens is
charged for them.

``accepted`` never counts the token that the target adds: ``emitted == accepted + steps`` unless a
stop trimmed a run. Plain Python; the engine thread is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.events import GammaChange, SpeculativeStats, StepStats

_MAX_GAMMA_CHANGES = 64


class Baseline(NamedTuple):
    """Gamma-0 steps that would have replaced one step: the first with its prompt rows, the others
    without."""

    first_seconds: float
    next_seconds: float

    def seconds(self, num_emitted: float) -> float:
        """Time of that many tokens of one request. A run trimmed to nothing still took a step."""
        return self.first_seconds + max(0.0, num_emitted - 1.0) * self.next_seconds


class StepSecondsModel(Protocol):
    def step_seconds(self, num_rows: int, num_kv_tokens: int, num_requests: int) -> float: ...


class StepShape(NamedTuple):
    """What ran: ``num_rows`` with draft nodes, ``num_base_rows`` without; ``num_kv_tokens`` over
    all ``num_requests`` requests of the step."""

    num_rows: int
    num_base_rows: int
    num_sampling_requests: int
    num_kv_tokens: int
    num_requests: int


def estimate_baseline(
    cost: StepSecondsModel, shape: StepShape, step_seconds: float, draft_seconds: float
) -> Baseline:
    """What the step, measured at ``step_seconds`` of which ``draft_seconds`` drafting, stands
    for."""
    measured = max(0.0, step_seconds - draft_seconds)
    context = (shape.num_kv_tokens, shape.num_requests)
    as_run = cost.step_seconds(shape.num_rows, *context)
    first = cost.step_seconds(shape.num_base_rows, *context)
    num_plain_rows = max(1, min(shape.num_sampling_requests, shape.num_base_rows))
    plain = cost.step_seconds(num_plain_rows, *context)
    return Baseline(measured * first / as_run, measured * plain / as_run)


@dataclass(slots=True)
class RequestSpeculationStats:
    """One request's account, kept while it runs; ``freeze`` is what its reply shows.

    Of the moves of gamma the last 64 are kept and all are counted.
    """

    drafter: str
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_failed_drafts: int = 0
    num_gamma_changes: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    baseline_seconds: float = 0.0
    _gamma: int = 0
    _histogram: list[int] = field(default_factory=list)
    _changes: deque[GammaChange] = field(default_factory=lambda: deque(maxlen=_MAX_GAMMA_CHANGES))

    def record_step(
        self,
        gamma: int,
        num_accepted: int,
        num_emitted: int,
        *,
        draft_seconds: float,
        verify_seconds: float,
        step_seconds: float,
        baseline_seconds: float,
        reason: str = "",
    ) -> None:
        """A step in which the request sampled.

        ``draft_seconds`` and ``verify_seconds`` are its shares (its drafter's call and the forward
        plus verification, by rows); ``step_seconds`` the whole step; ``baseline_seconds`` that of
        its ``num_emitted`` tokens at gamma 0. ``reason`` says why gamma is no larger; empty: it
        need not be.
        """
        if gamma != self._gamma:
            change = GammaChange(self.num_steps, gamma, reason or "granted")
            self._changes.append(change)
            self.num_gamma_changes += 1
            self._gamma = gamma
        self.num_steps += 1
        self.num_draft_tokens += gamma
        self.num_accepted_tokens += num_accepted
        self.num_emitted_tokens += num_emitted
        if num_accepted >= len(self._histogram):
            self._histogram += [0] * (num_accepted + 1 - len(self._histogram))
        self._histogram[num_accepted] += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.step_seconds += step_seconds
        self.baseline_seconds += baseline_seconds

    def record_failed_draft(self) -> None:
        """The drafter raised; the step went on without its draft."""
        self.num_failed_drafts += 1

    def freeze(self) -> SpeculativeStats:
        steps, drafted = self.num_steps, self.num_draft_tokens
        timed = self.step_seconds > 0.0
        return SpeculativeStats(
            drafter=self.drafter,
            num_steps=steps,
            num_draft_tokens=drafted,
            num_accepted_tokens=self.num_accepted_tokens,
            num_emitted_tokens=self.num_emitted_tokens,
            acceptance_rate=self.num_accepted_tokens / drafted if drafted else None,
            tokens_per_step=self.num_emitted_tokens / steps if steps else None,
            mean_gamma=drafted / steps if steps else 0.0,
            acceptance_histogram=tuple(self._histogram),
            accepted_per_position=self._accepted_per_position(),
            estimated_speedup=self.baseline_seconds / self.step_seconds if timed else None,
            draft_ms=1000.0 * self.draft_seconds,
            verify_ms=1000.0 * self.verify_seconds,
            gamma_changes=tuple(self._changes),
            num_failed_drafts=self.num_failed_drafts,
            num_gamma_changes=self.num_gamma_changes,
        )

    def _accepted_per_position(self) -> tuple[int, ...]:
        """``[d]``: steps that accepted more than d drafts, which is how often depth d + 1 was."""
        counts: list[int] = []
        total = 0
        for count in reversed(self._histogram[1:]):
            total += count
            counts.append(total)
        return tuple(reversed(counts))


class StepSeconds(NamedTuple):
    """Where a step's time went, by the engine's clock; ``step`` is all of it."""

    draft: float
    forward: float
    verify: float
    step: float

    @property
    def other(self) -> float:
        return max(0.0, self.step - self.draft - self.forward - self.verify)


class StepGauges(NamedTuple):
    """The engine's state after the step; preemptions, prompt and prefix-cache tokens are the
    step's."""

    num_prompt_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    blocks: Mapping[str, int] = {}
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class StepStatsBuilder:
    """Collects one step's requests into an ``events.StepStats``. One builder per step."""

    def __init__(self) -> None:
        self._num_sampled = 0
        self._num_failures = 0
        self._drafted: dict[str, int] = {}
        self._accepted: dict[str, int] = {}
        self._emitted: dict[str, int] = {}
        self._per_position: dict[str, list[int]] = {}
        self._gammas: dict[str, list[int]] = {}
        self._disabled: dict[tuple[str, str], int] = {}

    @property
    def num_emitted(self) -> int:
        return sum(self._emitted.values())

    def add_request(
        self, drafter: str, gamma: int, num_accepted: int, num_emitted: int, reason: str = ""
    ) -> None:
        """A request that sampled; ``reason`` as granted, counted where it left no draft at all."""
        self._num_sampled += 1
        self._drafted[drafter] = self._drafted.get(drafter, 0) + gamma
        self._accepted[drafter] = self._accepted.get(drafter, 0) + num_accepted
        self._emitted[drafter] = self._emitted.get(drafter, 0) + num_emitted
        self._gammas.setdefault(drafter, []).append(gamma)
        counts = self._per_position.setdefault(drafter, [])
        counts += [0] * (num_accepted - len(counts))
        for position in range(num_accepted):
            counts[position] += 1
        if gamma == 0 and reason:
            key = (drafter, reason)
            self._disabled[key] = self._disabled.get(key, 0) + 1

    def add_draft_failure(self) -> None:
        """A drafter raised for a request."""
        self._num_failures += 1

    def build(
        self, shape: StepShape, seconds: StepSeconds, baseline: Baseline, gauges: StepGauges
    ) -> StepStats:
        """The step's numbers. Its baseline is that of the mean request's tokens: the batch would
        have run once per token of each, side by side."""
        mean_emitted = self.num_emitted / self._num_sampled if self._num_sampled else 1.0
        return StepStats(
            num_rows=shape.num_rows,
            num_prompt_tokens=gauges.num_prompt_tokens,
            num_emitted_tokens=self.num_emitted,
            drafted=self._drafted,
            accepted=self._accepted,
            emitted=self._emitted,
            accepted_per_position=self._per_position,
            gammas=self._gammas,
            disabled=self._disabled,
            draft_seconds=seconds.draft,
            forward_seconds=seconds.forward,
            verify_seconds=seconds.verify,
            other_seconds=seconds.other,
            step_seconds=seconds.step,
            baseline_seconds=baseline.seconds(mean_emitted),
            num_preemptions=gauges.num_preemptions,
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting,
            blocks=dict(gauges.blocks),
            prefix_cache_queries=gauges.prefix_cache_queries,
            prefix_cache_hits=gauges.prefix_cache_hits,
            num_draft_failures=self._num_failures,
        )
