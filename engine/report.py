"""What a step tells: log-probabilities and events per request, figures for the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from engine.events import FinishInfo, FinishReason, RequestTimings, TokenEvent, TokenLogprobs
from engine.sampling.logprobs import emitted_logprobs
from engine.schedule.request import Request
from engine.stats import StepSeconds
from engine.verification.match import Outcome

Phase = Literal["draft", "forward", "verify"]


@dataclass(slots=True)
class StepClock:
    """Seconds of a step by phase; what no phase claims is the engine's own overhead."""

    start: float = field(default_factory=time.perf_counter)
    phases: dict[Phase, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.phases[phase] = self.phases.get(phase, 0.0) + spent

    def seconds(self) -> StepSeconds:
        of = self.phases.get
        elapsed = time.perf_counter() - self.start
        return StepSeconds(of("draft", 0.0), of("forward", 0.0), of("verify", 0.0), elapsed)


def read_prompt_logprobs(
    request: Request, base: int, num_known: int, first_row: int, logits: torch.Tensor
) -> None:
    """Keep the log-probabilities of the prompt tokens that follow rows ``base..`` of a chunk.

    ``first_row`` is the chunk's first row in ``logits``; all its rows are there.
    """
    num_top = request.params.sampling.prompt_logprobs
    if num_top is None:
        return
    last = min(base + num_known, request.num_prompt_tokens - 1)
    positions = [at for at in range(base, last) if at + 1 not in request.prompt_logprobs]
    rows = [first_row + at - base for at in positions]
    token_ids = [request.token_ids[at + 1] for at in positions]
    found = emitted_logprobs(logits, rows, token_ids, num_top)
    request.prompt_logprobs.update(
        (at + 1, logprob) for at, logprob in zip(positions, found, strict=True)
    )


def token_event(
    request: Request,
    outcome: Outcome,
    first_row: int,
    logits: torch.Tensor,
    finish: FinishInfo | None,
) -> TokenEvent:
    """The event of a request that sampled; ``first_row`` is its anchor's row in ``logits``."""
    return TokenEvent(
        request_id=request.request_id,
        token_ids=outcome.emitted_token_ids,
        drafted=outcome.drafted,
        logprobs=_emitted_logprobs(request, outcome, first_row, logits),
        prompt_logprobs=_take_prompt_logprobs(request),
        finish=finish,
        num_draft_tokens=len(outcome.row_token_ids) - 1,
    )


def _emitted_logprobs(
    request: Request, outcome: Outcome, first_row: int, logits: torch.Tensor
) -> tuple[TokenLogprobs, ...] | None:
    num_top = request.params.sampling.logprobs
    if num_top is None:
        return None
    emitted = outcome.emitted_token_ids
    # The path leads from row to row: the token at each of its rows is the next one emitted.
    rows = [first_row + row for row in outcome.path[: len(emitted)]]
    return tuple(emitted_logprobs(logits, rows, emitted, num_top))


def _take_prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    """All of them, once, with the request's first event; the first token has none."""
    if request.params.sampling.prompt_logprobs is None or request.told_prompt_logprobs:
        return None
    request.told_prompt_logprobs = True
    return (None, *(request.prompt_logprobs[at] for at in range(1, request.num_prompt_tokens)))


def finish_info(
    request: Request, reason: FinishReason, stop_token_id: int | None = None
) -> FinishInfo:
    """The account that goes out with a request's last event."""
    now, params = time.perf_counter(), request.params
    scheduled = request.first_scheduled_time or now
    arrival = params.arrival_time or scheduled
    first_token = request.first_token_time or now
    return FinishInfo(
        reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        speculative=request.stats.freeze(),
        timings=RequestTimings(
            arrival_time=arrival,
            queue_seconds=scheduled - arrival,
            time_to_first_token_seconds=first_token - arrival,
            e2e_seconds=now - arrival,
            num_preemptions=request.num_preemptions,
        ),
    )
