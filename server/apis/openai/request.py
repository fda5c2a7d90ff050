"""The bodies of ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``. The first two are
the chat and the completion that are planned, and what OpenAI's clients send besides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from server.errors import refused
from server.plan import RequestPlan
from server.request.body import Body, PromptField, WithoutEffect, in_case, optional
from server.request.chat import (
    MAX_COUNT,
    TOKEN_LIMIT,
    WITHOUT_EFFECT,
    Chat,
    Completion,
    limit_of,
    sharing,
)
from server.request.messages import TEXT_ONLY
from server.request.translate import Translator

_NOT_MOVED = "keys and values stay in this server"
_UNSUPPORTED = {
    "stream_interval": "a chunk is sent for each step",
    "guided_json": "use 'structured_outputs'",
    "guided_regex": "use 'structured_outputs'",
    "guided_choice": "use 'structured_outputs'",
    "guided_grammar": "use 'structured_outputs'",
    "use_beam_search": "tokens are sampled",
    "length_penalty": "it belongs to beam search",
    "logits_processors": "the server runs no code of its clients",
    "repetition_detection": "use 'frequency_penalty' or 'repetition_penalty'",
    "thinking_token_budget": "use 'max_tokens'",
    "request_id": "send it as the header 'X-Request-Id'",
    "session_id": "use 'cache_salt' for whom, and 'user' for the log",
    "return_weight_versions": "the weights are those loaded at start",
    "vllm_xargs": "use 'speculative.options' for the drafter's",
    "kv_transfer_params": _NOT_MOVED,
    "ec_transfer_params": _NOT_MOVED,
    "mm_processor_kwargs": TEXT_ONLY,
    "media_io_kwargs": TEXT_ONLY,
}
_SYNONYMS = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "think": "thinking"}


class CompletionRequest(Completion):
    """``POST /v1/completions``."""

    unsupported: ClassVar[dict[str, str]] = _UNSUPPORTED | {
        "prompt_embeds": "prompts are text or token ids",
    }
    synonyms: ClassVar[dict[str, str]] = _SYNONYMS

    max_tokens: int | None = optional("-1: what there is room for.", default=16, **TOKEN_LIMIT)
    best_of: int | None = optional("Only the value of 'n' is accepted.", ge=1)


_LOGPROBS: JsonDict = {
    "anyOf": [
        in_case({}, ("top_logprobs",)),
        in_case({"top_logprobs": {"const": 0}}),
        in_case({"logprobs": {"const": True}}),
    ]
}


class ChatRequest(Chat):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(json_schema_extra=_LOGPROBS)

    unsupported: ClassVar[dict[str, str]] = _UNSUPPORTED | {
        "functions": "use 'tools'",
        "function_call": "use 'tool_choice'",
        "audio": TEXT_ONLY,
        "web_search_options": "the server reads nothing from the web",
        "chat_template": "the tokenizer's own template is used",
        "documents": "write them into a message",
        "return_prompt_text": "use 'return_token_ids' and /detokenize",
    }
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"modalities": (["text"],)}
    synonyms: ClassVar[dict[str, str]] = _SYNONYMS

    max_completion_tokens: int | None = optional("The same as 'max_tokens'.", **TOKEN_LIMIT)

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", limit_of(self.max_completion_tokens)


@sharing("user", "priority", "timeout", "cache_salt")
class EmbeddingsRequest(Body):
    """``POST /v1/embeddings``."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT

    model: str | None = optional("The served model's name; may be left out.")
    input: PromptField = Field(description="Text or token ids, one or a batch.")
    encoding_format: Literal["float", "base64"] = optional(
        "base64: of the numbers in 32 bits, little end first.", default="float"
    )
    dimensions: int | None = optional("Only the model's own number.", ge=1)
    truncate_prompt_tokens: int | None = optional(
        "Keep so many of a text's tokens, the first; -1: what there is room for.",
        ge=-1,
        le=MAX_COUNT,
    )


def plan_text(translator: Translator, body: CompletionRequest, arrival_time: float) -> RequestPlan:
    """Raises ApiError."""
    if body.best_of not in (None, body.n):
        raise refused("best_of", "is supported only if it equals n")
    return translator.plan(body, arrival_time)


def plan_chat(translator: Translator, body: ChatRequest, arrival_time: float) -> RequestPlan:
    """Raises ApiError."""
    if body.max_tokens is not None and limit_of(body.max_tokens) != body.limit[1]:
        raise refused("max_tokens", "contradicts max_completion_tokens")
    return translator.plan(body, arrival_time)


def embed(translator: Translator, body: EmbeddingsRequest, arrival_time: float) -> RequestPlan:
    """Returns a plan with a choice for each text. Raises ApiError."""
    fields = body.model_dump(exclude={"input", "encoding_format", "dimensions"})
    plan = translator.plan_embeddings(arrival_time, "input", body.input, body.dimensions, **fields)
    as_base64 = body.encoding_format == "base64"
    return replace(plan, as_base64=as_base64).ignoring(body.ignored())
