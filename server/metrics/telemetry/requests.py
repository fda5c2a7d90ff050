"""A request as spans and as metrics, by the names of OpenTelemetry's conventions for generative AI
(written out here: in its Python package they are deprecated in favour of a repository of their own),
and ours under ``slipstream``. No texts, no keys, no users.

There is a span for the request, below it one for each choice, and below that one each for its time in the
queue, its prompt and its decoding, with the steps as events. The request's span is begun when the request
comes, so that log lines can name it; the others are made of its record when it has ended, and cost the
steps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from engine.request.events import FinishInfo
from engine.request.stats import SpeculativeStats
from server.metrics.record import ChoiceRecord, RequestRecord

Attributes = dict[str, AttributeValue]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""The requests that are watched, by path."""
# Outcomes of choices, as errors are named.
_FAULTS = {
    "error": "request_failed",
    "abort": "client_disconnected",
    "rejected": "rejected",
    "deadline": "deadline_exceeded",
}
_PHASES = ("queue", "prefill", "decode")
# Boundaries of histograms.
_DURATION = tuple(0.01 * 2**power for power in range(14))
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4.0**power for power in range(14))


def _common(path: str, model_name: str) -> Attributes:
    return {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
    }


class WatchedRequests:
    """Makes spans and figures of requests. ``model_name`` is the model's in the API."""

    def __init__(self, tracer: Tracer, meter: Meter, model_name: str) -> None:
        self._tracer = tracer
        self._model_name = model_name

        def histogram(name: str, unit: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                name, unit, text, explicit_bucket_boundaries_advisory=bounds
            )

        self._duration = histogram(
            "gen_ai.server.request.duration", "s", "From arrival to the last byte.", _DURATION
        )
        self._first = histogram(
            "gen_ai.server.time_to_first_token", "s", "From arrival, per choice.", _FIRST
        )
        self._each = histogram(
            "gen_ai.server.time_per_output_token", "s", "After the first, per choice.", _EACH
        )
        self._tokens = histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens of a request, by type.", _TOKENS
        )

    def begin(self, path: str, headers: Mapping[str, str]) -> Span:
        """A request's span, below the one that its headers name (W3C trace context)."""
        return self._tracer.start_span(
            f"{OPERATIONS[path]} {self._model_name}",
            propagate.extract(headers),
            SpanKind.SERVER,
            {**_common(path, self._model_name), "http.request.method": "POST", "http.route": path},
        )

    def end(
        self, span: Span, path: str, record: RequestRecord, status: int, seconds: float
    ) -> None:
        """Its answer has ended, ``seconds`` after the request came. ``status`` 0: nothing was
        answered."""
        error = _error_of(record, status)
        # An adapter that it names is known once its body was read.
        model = self._model_name if record.plan is None else record.plan.model
        common = _common(path, model)
        if span.is_recording():
            span.update_name(f"{OPERATIONS[path]} {model}")
            span.set_attributes({**common, **_of_request(record)})
            if status:
                span.set_attribute("http.response.status_code", status)
            if error is not None:
                span.set_attribute("error.type", error)
            # By the conventions a server's span does not fail by what is the client's fault.
            if error is not None and (status >= 500 or not error.isdecimal()):
                span.set_status(Status(StatusCode.ERROR))
            for choice in record.choices:
                self._add_choice(set_span_in_context(span), choice)
        span.end()
        self._measure(common, record, error, seconds)

    def _add_choice(self, parent: Context, choice: ChoiceRecord) -> None:
        start = time.time_ns() - _ns(time.perf_counter() - choice.plan.request.arrival_time)
        name = f"choice {choice.plan.index}"
        span = self._tracer.start_span(
            name, parent, attributes=_of_choice(choice), start_time=start
        )
        end = time.time_ns()
        if choice.info is None:
            span.set_status(Status(StatusCode.ERROR))
            _add_steps(span, choice)
        else:
            end = start + _ns(choice.info.e2e_seconds)
            self._add_phases(set_span_in_context(span), choice, start, choice.info)
        span.end(end)

    def _add_phases(
        self, parent: Context, choice: ChoiceRecord, start: int, info: FinishInfo
    ) -> None:
        queued, e2e = info.queue_seconds, info.e2e_seconds
        # A choice that wrote nothing has no first token: all its time was the prompt's.
        first = info.time_to_first_token_seconds if choice.num_steps else e2e
        borders = [0.0, queued, max(queued, first), max(queued, e2e)]
        for name, begins, ends in zip(_PHASES, borders, borders[1:], strict=False):
            span = self._tracer.start_span(name, parent, start_time=start + _ns(begins))
            if name == "decode":
                _add_steps(span, choice)
            span.end(start + _ns(ends))

    def _measure(
        self, attributes: Attributes, record: RequestRecord, error: str | None, seconds: float
    ) -> None:
        ended = attributes if error is None else {**attributes, "error.type": error}
        self._duration.record(seconds, ended)
        for info in (choice.info for choice in record.choices):
            if info is None or info.num_output_tokens == 0:
                continue
            first = info.time_to_first_token_seconds
            self._first.record(first, attributes)
            if info.num_output_tokens > 1:
                rest = info.e2e_seconds - first
                self._each.record(rest / (info.num_output_tokens - 1), attributes)
        if record.plan is not None and error is None:
            written = sum(choice.num_tokens for choice in record.choices)
            for kind, count in (("input", record.plan.num_prompt_tokens), ("output", written)):
                self._tokens.record(count, {**attributes, "gen_ai.token.type": kind})


def _error_of(record: RequestRecord, status: int) -> str | None:
    """None: all went well."""
    if status >= 400 and status != 499:
        return str(status)
    for outcome, name in _FAULTS.items():
        if any(choice.outcome == outcome for choice in record.choices):
            return name
    return None if 0 < status < 400 else _FAULTS["abort"] if status == 499 else "unanswered"


def _of_request(record: RequestRecord) -> Attributes:
    """Returns what was asked, and the outcome over all choices."""
    if record.plan is None:
        return {}
    plan, first = record.plan, record.plan.choices[0].request
    stats = [choice.info.speculative for choice in record.choices if choice.info]
    return {
        "gen_ai.request.stream": plan.stream,
        "gen_ai.request.choice.count": plan.n,
        "gen_ai.request.seed": plan.seed,
        "gen_ai.request.max_tokens": first.sampling.max_tokens,
        "gen_ai.request.temperature": float(first.sampling.temperature),
        "gen_ai.request.top_p": float(first.sampling.top_p),
        "gen_ai.request.top_k": float(first.sampling.top_k),
        "gen_ai.request.frequency_penalty": float(first.sampling.frequency_penalty),
        "gen_ai.request.presence_penalty": float(first.sampling.presence_penalty),
        "slipstream.request.id": plan.request_id,
        "slipstream.drafter": first.speculative.draft_strategy,
        "slipstream.policy": first.speculative.adaptive_depth,
        "gen_ai.usage.input_tokens": plan.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in record.choices),
        "gen_ai.response.finish_reasons": [
            choice.finish_reason or choice.outcome for choice in record.choices
        ],
        **(_of_speculation(sum(stats, SpeculativeStats())) if stats else {}),
    }


def _of_choice(choice: ChoiceRecord) -> Attributes:
    found: Attributes = {
        "slipstream.choice.index": choice.plan.index,
        "slipstream.num_steps": choice.num_steps,
        "gen_ai.usage.output_tokens": choice.num_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason or choice.outcome],
    }
    if choice.info is not None:
        found["gen_ai.usage.input_tokens"] = choice.info.num_prompt_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = choice.info.num_cached_tokens
        found["slipstream.num_preemptions"] = choice.info.num_preemptions
        found |= _of_speculation(choice.info.speculative)
    return found


def _of_speculation(stats: SpeculativeStats) -> Attributes:
    found: Attributes = {
        "slipstream.num_draft_tokens": stats.num_draft_tokens,
        "slipstream.num_accepted_tokens": stats.num_accepted_tokens,
        "slipstream.draft_seconds": stats.draft_seconds,
        "slipstream.verify_seconds": stats.verify_seconds,
    }
    if stats.acceptance_rate is not None:
        found["slipstream.acceptance_rate"] = stats.acceptance_rate
    return found


def _add_steps(span: Span, choice: ChoiceRecord) -> None:
    for number, (time_ns, step) in enumerate(choice.steps):
        attributes = {
            "slipstream.step": number,
            "slipstream.draft.num_tokens": step.num_draft_tokens,
            "slipstream.verify.num_accepted_tokens": sum(step.drafted),
            "slipstream.num_tokens": len(step.token_ids),
            "slipstream.draft_seconds": step.draft_seconds,
            "slipstream.verify_seconds": step.verify_seconds,
        }
        span.add_event("step", attributes, time_ns)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
