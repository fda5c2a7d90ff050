"""Requests as metrics, by the names and boundaries of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

from opentelemetry.metrics import Histogram, Meter

from server.metrics.record import ChoiceRecord, RequestRecord
from server.metrics.telemetry.attributes import Attributes, common_attributes, error_of

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
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


class RequestFigures:
    """``model_name`` is the model's in the API."""

    def __init__(self, meter: Meter, model_name: str) -> None:
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

    def observe(self, operation: str, record: RequestRecord, status: int, seconds: float) -> None:
        """An answer has ended. ``status`` as in ``error_of``; ``seconds`` since the request came."""
        attributes = common_attributes(operation, self._model_name)
        error = error_of(record, status)
        ended = attributes if error is None else {**attributes, "error.type": error}
        self._duration.record(seconds, ended)
        for choice in record.choices:
            self._observe_times(choice, attributes)
        if record.plan is not None and error is None:
            used = {
                "input": record.plan.num_prompt_tokens,
                "output": sum(choice.num_tokens for choice in record.choices),
            }
            for kind, count in used.items():
                self._tokens.record(count, {**attributes, "gen_ai.token.type": kind})

    def _observe_times(self, choice: ChoiceRecord, attributes: Attributes) -> None:
        info = choice.info
        if info is None or info.num_output_tokens == 0:
            return
        self._first.record(info.time_to_first_token_seconds, attributes)
        if info.num_output_tokens > 1:
            rest = info.e2e_seconds - info.time_to_first_token_seconds
            self._each.record(rest / (info.num_output_tokens - 1), attributes)
