"""A request as spans: one for the request, below it one for each choice, and below that one each for its
time in the queue, its prompt and its decoding, with the steps as events.

The request's span is begun when the request comes, so that log lines can name it; the others are made of
its record when it has ended, and cost the steps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from engine.request.events import FinishInfo
from server.metrics.record import ChoiceRecord, RequestRecord
from server.metrics.telemetry.attributes import (
    answered,
    asked,
    common_attributes,
    error_of,
    of_choice,
)

_PHASES = ("queue", "prefill", "decode")


class RequestSpans:
    """``model_name`` is the model's in the API."""

    def __init__(self, tracer: Tracer, model_name: str) -> None:
        self._tracer = tracer
        self._model_name = model_name

    def begin(self, operation: str, path: str, headers: Mapping[str, str]) -> Span:
        """A request's span, below the one that its headers name (W3C trace context)."""
        attributes = common_attributes(operation, self._model_name)
        return self._tracer.start_span(
            f"{operation} {self._model_name}",
            propagate.extract(headers),
            SpanKind.SERVER,
            {**attributes, "http.request.method": "POST", "http.route": path},
        )

    def end(self, span: Span, record: RequestRecord, status: int) -> None:
        """Its answer has ended. ``status`` as in ``error_of``."""
        error = error_of(record, status)
        if span.is_recording():
            span.set_attributes({**asked(record), **answered(record)})
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

    def _add_choice(self, parent: Context, choice: ChoiceRecord) -> None:
        start = _since_epoch(choice.plan.request.arrival_time)
        name = f"choice {choice.plan.index}"
        span = self._tracer.start_span(name, parent, attributes=of_choice(choice), start_time=start)
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


def _add_steps(span: Span, choice: ChoiceRecord) -> None:
    for number, step in enumerate(choice.steps):
        attributes = {
            "slipstream.step": number,
            "slipstream.draft.num_tokens": step.num_draft_tokens,
            "slipstream.verify.num_accepted_tokens": step.num_accepted_tokens,
            "slipstream.num_tokens": step.num_tokens,
            "slipstream.draft_seconds": step.draft_seconds,
            "slipstream.verify_seconds": step.verify_seconds,
        }
        span.add_event("step", attributes, step.time_ns)


def _since_epoch(perf_counter_time: float) -> int:
    return time.time_ns() - _ns(time.perf_counter() - perf_counter_time)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
