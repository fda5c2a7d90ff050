"""Messages from the engine to the asyncio edge, in the same process or another. Every request gets
events until one with a ``finish`` or an ``error``, and none after it."""

from __future__ import annotations

from copyreg import add_extension
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.request.errors import EngineError
from engine.request.stats import RequestStats, StepStats

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's unprocessed distribution (before temperature,
    truncation and penalties). ``top`` is best first and has as many entries as were asked for; ``named``
    are the tokens that were asked for by their ids, in that order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    named: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """Comes with the last event of a request. ``arrival_time`` is on ``time.perf_counter``'s clock.
    ``embedding``: of a request that is pooled, a vector of length 1 in fp32, little end first.
    ``cut``: as in ``Outcome``."""

    reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    speculative: RequestStats
    arrival_time: float
    queue_seconds: float
    time_to_first_token_seconds: float
    e2e_seconds: float
    num_preemptions: int = 0
    embedding: bytes | None = None
    cut: str = ""


class TokenEvent(NamedTuple):
    """Tokens that one step emitted for one request. ``drafted[i]``: token i was an accepted draft;
    ``num_draft_tokens``: drafts that the step verified for the request, its gamma. ``draft_seconds`` and
    ``verify_seconds`` are the request's shares of the step, as in ``SpeculativeStats``.

    A stop token (EOS or a stop id) that ended the request is not part of ``token_ids``. A tuple, since
    the engine pickles one per request and step.
    """

    request_id: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishInfo | None = None
    num_draft_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


# By its name alone each message with one would take twice as long to read.
add_extension(__name__, TokenEvent.__name__, 242)


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The request was refused or failed, or the engine died under it; ``error`` is for its reader."""

    request_id: str
    error: EngineError


@dataclass(slots=True)
class StepResult:
    """All that comes out of a step: events in order, and its figures (None where nothing ran)."""

    events: list[TokenEvent | ErrorEvent] = field(default_factory=list)
    stats: StepStats | None = None
