"""Immutable messages from the engine thread to the asyncio edge. Every request gets events until one
with a ``finish_reason`` or an ``error``, and none after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's unprocessed distribution (before temperature,
    truncation and penalties). ``top`` is best first and has as many entries as were asked for."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GammaChange:
    """Gamma moved at a step of the request (steps count from 0 at its first sampled token)."""

    step: int
    gamma: int
    reason: str


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """A request's account of its speculation; milliseconds are the request's share of batch steps.

    ``acceptance_histogram[k]`` counts the steps in which k drafts were accepted. Rates are None where
    nothing was drafted. ``estimated_speedup``: estimated time of the same steps' tokens at gamma 0,
    from the measured step cost, over the time taken.
    """

    drafter: str
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    acceptance_rate: float | None = None
    tokens_per_step: float | None = None
    mean_gamma: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    estimated_speedup: float | None = None
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    gamma_changes: tuple[GammaChange, ...] = ()
    num_failed_drafts: int = 0
    num_gamma_changes: int = 0
    """All of them; ``gamma_changes`` keeps the latest only."""


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds; ``perf_counter`` clock for ``*_time``, durations otherwise."""

    arrival_time: float
    queue_seconds: float
    time_to_first_token_seconds: float
    e2e_seconds: float
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """Comes with the last event of a request."""

    reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    speculative: SpeculativeStats
    timings: RequestTimings


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step emitted for one request. ``drafted[i]``: token i was an accepted draft;
    ``num_draft_tokens``: drafts that the step verified for the request, its gamma.

    A stop token (EOS or a stop id) that ended the request is not part of ``token_ids``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishInfo | None = None
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The request failed, or the engine died under it."""

    request_id: str
    message: str
    engine_dead: bool = False


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step in numbers, for metrics. Counters are per step; gauges are now.

    ``drafted``, ``accepted``: by drafter name. ``accepted_per_position``: drafter -> counts by depth-1.
    ``gammas``: drafter -> granted gamma of each decoding request that named it.
    ``disabled``: (drafter, reason) -> requests whose proposal was cut to nothing this step.
    """

    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_emitted_tokens: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    emitted: dict[str, int] = field(default_factory=dict)
    accepted_per_position: dict[str, list[int]] = field(default_factory=dict)
    gammas: dict[str, list[int]] = field(default_factory=dict)
    disabled: dict[tuple[str, str], int] = field(default_factory=dict)
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    step_seconds: float = 0.0
    baseline_seconds: float = 0.0
    """Estimated time of this step's emitted tokens at gamma 0."""
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    """KV blocks by state: free, draft, committed, cached."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    """Both in tokens."""
    num_draft_failures: int = 0
