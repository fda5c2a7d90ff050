"""Replies of ``/v1/messages``: one message of blocks, or the events in which it comes about.

Own fields beside Anthropic's: ``usage.speculative``, and ``seed`` and ``system_fingerprint`` of whole
messages and of ``message_start``.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, NotRequired

from pydantic_core import from_json
from typing_extensions import TypedDict

from server.errors import REQUEST_ID_KEY, SHAPES, TYPES, ApiError, ErrorDetails
from server.formats.parts import CallArguments, CallStart, Part, Reasoning
from server.plan import RequestPlan
from server.reply.deltas import ChoiceEnd
from server.reply.token_texts import TokenTexts
from server.reply.usage import SpeculativeUsage, Usage
from server.reply.writers import NamedEventWriter, event

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingDetails(TypedDict):
    thinking_tokens: int


class AnthropicUsage(TypedDict):
    """``input_tokens``: those of the prompt that were not in the cache. In ``message_start``, before
    anything is known of the cache, all of them."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingDetails]
    service_tier: Literal["standard"]
    speculative: NotRequired[SpeculativeUsage]


class AnthropicMessage(TypedDict):
    """``content``: blocks of type ``thinking``, ``text`` and ``tool_use``, as written."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
    system_fingerprint: str
    seed: int
    context_management: NotRequired[dict[str, Any]]


class AnthropicEvent(TypedDict):
    """``type`` says which further fields there are, as Anthropic has them."""

    type: str


_ERROR_TYPES = TYPES | {413: "request_too_large", 503: "overloaded_error"}


class ErrorCode(TypedDict):
    error_code: str | None


class AnthropicErrorDetails(ErrorDetails):
    """``details``: the code, where Anthropic's clients look for it."""

    details: ErrorCode


class AnthropicErrorReply(TypedDict):
    """``request_id``: that of the answer's header."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: NotRequired[str | None]


def anthropic_error(error: ApiError) -> AnthropicErrorReply:
    """The error in Anthropic's shape, with OpenAI's ``param`` and ``code`` beside its own words."""
    found: AnthropicErrorDetails = {
        "type": _ERROR_TYPES.get(error.status, "api_error"),
        "message": error.message,
        "param": error.param,
        "code": error.code,
        "details": {"error_code": error.code},
    }
    return {"type": "error", "error": found}


SHAPES["/v1/messages"] = lambda error, scope: {
    **anthropic_error(error),
    "request_id": scope.get(REQUEST_ID_KEY),
}


class MessagesWriter(NamedEventWriter):
    """``/v1/messages``."""

    def __init__(self, plan: RequestPlan, texts: TokenTexts, fingerprint: str) -> None:
        super().__init__(plan, texts, fingerprint)
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""

    def begin(self) -> bytes:
        usage = self._usage(self.plan.num_prompt_tokens, 0, 0)
        self._tell("message_start", message=self._message(usage))
        self._tell("ping")
        return self._take()

    def pause(self) -> bytes:
        self._tell("ping")
        return self._take()

    def finish(self, usage: Usage) -> bytes:
        message = self._ended(usage)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        more = {name: message[name] for name in ("context_management",) if name in message}
        self._tell("message_delta", delta=delta, usage=message["usage"], **more)
        self._tell("message_stop")
        return self._take()

    def bare_failure(self, error: ApiError) -> bytes:
        return event(anthropic_error(error), "error")

    # --- blocks ---

    def _add(self, part: Part) -> None:
        if isinstance(part, CallStart):
            self._begin({"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}})
        elif isinstance(part, CallArguments):
            self._arguments += part.text
            self._add_delta("input_json_delta", partial_json=part.text)
        elif isinstance(part, Reasoning):
            self._add_text("thinking", part.text)
        else:
            self._add_text("text", part.text)

    def _add_text(self, kind: str, text: str) -> None:
        """``kind`` is the block's type, and the name of its text, too."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            self._begin({"type": kind, kind: "", **signature})
        self._blocks[-1][kind] += text
        self._add_delta(f"{kind}_delta", **{kind: text})

    def _begin(self, block: dict[str, Any]) -> None:
        self._close()
        self._is_open = True
        self._blocks.append(block)
        self._tell("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _add_delta(self, kind: str, **fields: str) -> None:
        delta = {"type": kind, **fields}
        self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        """The block that is open, if one is, is as long as it gets."""
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = _signature(block["thinking"])
            self._add_delta("signature_delta", signature=block["signature"])
        elif block["type"] == "tool_use":
            block["input"], self._arguments = _input(self._arguments), ""
        self._tell("content_block_stop", index=len(self._blocks) - 1)
        self._is_open = False

    # --- the whole ---

    def _ended(self, usage: Usage) -> AnthropicMessage:
        assert self._end is not None
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told = self._usage(usage["prompt_tokens"] - cached, cached, usage["completion_tokens"])
        if self.plan.splits_reasoning:
            told["output_tokens_details"] = {"thinking_tokens": self._end.num_reasoning_tokens}
        told["speculative"] = usage["speculative"]
        message = self._message(told)
        message["stop_reason"], message["stop_sequence"] = self._stop(self._end)
        if "context_management" in self.plan.ignored:
            message["context_management"] = {"applied_edits": []}
        return message

    def _stop(self, end: ChoiceEnd) -> tuple[StopReason, str | None]:
        if end.reason == "tool_calls":
            return "tool_use", None
        if end.reason == "length":
            is_whole = self.plan.choices[0].request.sampling.max_tokens == self.plan.limit
            return "max_tokens" if is_whole else "model_context_window_exceeded", None
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "end_turn", None

    def _usage(self, num_input: int, num_cached: int, num_output: int) -> AnthropicUsage:
        return {
            "input_tokens": num_input,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
            "service_tier": "standard",
        }

    def _message(self, usage: AnthropicUsage) -> AnthropicMessage:
        return {
            "id": f"msg_{self.plan.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.plan.model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "system_fingerprint": self._fingerprint,
            "seed": self.plan.seed,
        }


def _signature(thoughts: str) -> str:
    """Clients keep thoughts only with one. It says whether they are as they were written."""
    return hashlib.sha256(thoughts.encode()).hexdigest()


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; of those that were cut off, what Anthropic's clients make of the
    pieces: the fields that are whole."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
