"""The attributes of spans and metrics, by the names of OpenTelemetry's conventions for generative AI
(written out here: in its Python package they are deprecated in favour of a repository of their own), and
ours under ``slipstream``. No texts, no keys, no users."""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from engine.request.params import SamplingParams
from engine.request.stats import SpeculativeStats
from server.metrics.record import ChoiceRecord, RequestRecord

Attributes = dict[str, AttributeValue]

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
}
"""By path: the requests that are watched."""
# Outcomes of choices, as errors are named.
_FAULTS = {
    "error": "request_failed",
    "abort": "client_disconnected",
    "rejected": "rejected",
    "deadline": "deadline_exceeded",
}


def common_attributes(operation: str, model_name: str) -> Attributes:
    """Returns the attributes of spans and metrics alike."""
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
    }


def error_of(record: RequestRecord, status: int) -> str | None:
    """None: all went well. ``status`` 0: nothing was answered."""
    if status >= 400 and status != 499:
        return str(status)
    for outcome, name in _FAULTS.items():
        if any(choice.outcome == outcome for choice in record.choices):
            return name
    return None if 0 < status < 400 else _FAULTS["abort"] if status == 499 else "unanswered"


def asked(record: RequestRecord) -> Attributes:
    """Returns what the request says of itself."""
    if record.plan is None:
        return {}
    plan = record.plan
    first = plan.choices[0].request
    found: Attributes = {
        "gen_ai.request.stream": plan.stream,
        "gen_ai.request.choice.count": plan.n,
        "gen_ai.request.seed": plan.seed,
        **_sampling(first.sampling),
        "slipstream.request.id": plan.request_id,
        "slipstream.drafter": first.speculative.draft_strategy,
        "slipstream.policy": first.speculative.adaptive_depth,
    }
    return found


def _sampling(sampling: SamplingParams) -> Attributes:
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
    }


def answered(record: RequestRecord) -> Attributes:
    """Returns the outcome of the request, over all its choices."""
    if record.plan is None:
        return {}
    ended = [choice for choice in record.choices if choice.info is not None]
    total = sum((each.info.speculative for each in ended if each.info), SpeculativeStats())
    return {
        "gen_ai.usage.input_tokens": record.plan.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in record.choices),
        "gen_ai.response.finish_reasons": [
            choice.finish_reason or choice.outcome for choice in record.choices
        ],
        **_speculation(total),
    }


def of_choice(choice: ChoiceRecord) -> Attributes:
    """Returns one choice's part."""
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
        found |= _speculation(choice.info.speculative)
    return found


def _speculation(stats: SpeculativeStats) -> Attributes:
    found: Attributes = {
        "slipstream.num_draft_tokens": stats.num_draft_tokens,
        "slipstream.num_accepted_tokens": stats.num_accepted_tokens,
        "slipstream.draft_seconds": stats.draft_seconds,
        "slipstream.verify_seconds": stats.verify_seconds,
    }
    if stats.acceptance_rate is not None:
        found["slipstream.acceptance_rate"] = stats.acceptance_rate
    return found
