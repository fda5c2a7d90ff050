"""Replies of ``/v1/responses``: one object of items, or the events in which it comes about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pydantic_core import from_json
from typing_extensions import TypedDict

from server.errors import ApiError
from server.formats.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.plan import RequestPlan
from server.reply.deltas import ChoiceDelta
from server.reply.token_texts import TokenTexts
from server.reply.usage import PromptTokensDetails, SpeculativeUsage, Usage
from server.reply.writers import NamedEventWriter, as_json


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    speculative: SpeculativeUsage


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ModelResponse(TypedDict):
    """``output``: items ``reasoning``, ``message``, ``function_call`` and ``custom_tool_call``, in the
    order written. What the request said comes back beside these fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    system_fingerprint: str
    seed: int


class ResponseEvent(TypedDict):
    """``type`` says which further fields there are, as OpenAI has them."""

    type: str
    sequence_number: int


_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}
"""The field of a call that holds the model's text, by the item's type."""


class ResponsesWriter(NamedEventWriter):
    """``/v1/responses``. A stream's events are numbered from 0; they show items as they are by then.
    ``keep``: takes the response's id, and all that has to be known to go on from it."""

    def __init__(
        self,
        plan: RequestPlan,
        texts: TokenTexts,
        fingerprint: str,
        keep: Callable[[str, bytes], Awaitable[Any]],
    ) -> None:
        super().__init__(plan, texts, fingerprint)
        assert plan.response is not None, "plans of responses have their part"
        self._asked = plan.response
        self._keep = keep
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._number = 0
        self._arguments = ""
        self._whole: dict[str, Any] = {}

    def begin(self) -> bytes:
        response = self._response("in_progress")
        self._tell("response.created", response=response)
        self._tell("response.in_progress", response=response)
        return self._take()

    def events(self, delta: ChoiceDelta) -> bytes:
        if delta.end is not None and not (self._items or delta.parts or delta.text):
            self._add(Content(""))  # a response without any item has an empty message
        return super().events(delta)

    def finish(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        self._tell(f"response.{response['status']}", response=response)
        return self._take()

    def failure(self, error: ApiError) -> bytes:
        if self._open is not None:
            self._open["status"] = "incomplete"
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        self._tell("response.failed", response=response)
        return self._take()

    async def settle(self) -> None:
        if self._asked.repeated["store"]:
            record = {"items": self._asked.items, "response": self._whole}
            await self._keep(f"resp_{self.plan.request_id}", as_json(record))

    def _tell(self, kind: str, **fields: Any) -> None:
        super()._tell(kind, sequence_number=self._number, **fields)
        self._number += 1

    # --- items ---

    def _add(self, part: Part) -> None:
        if isinstance(part, CallStart):
            self._close()
            named = {"type": "function_call", "name": part.name}
            call = self._asked.calls.get(part.name, named)
            kind, self._arguments = call["type"], ""
            prefix = "fc" if kind == "function_call" else "ctc"
            self._begin(kind, prefix, {"call_id": part.call_id, **call, _FIELDS[kind]: ""})
        elif isinstance(part, CallArguments):
            assert self._open is not None, "a call's arguments follow its start"
            if self._open["type"] == "function_call":
                self._add_to_call(part.text)
            else:
                self._arguments += part.text
        else:
            self._add_text("reasoning" if isinstance(part, Reasoning) else "message", part.text)

    def _add_to_call(self, text: str) -> None:
        assert self._open is not None
        kind, field = self._open["type"], _FIELDS[self._open["type"]]
        self._open[field] += text
        self._tell(f"response.{kind}_{field}.delta", **self._place(), delta=text)

    def _close(self) -> None:
        item, place = self._open, self._place()
        if item is None:
            return
        is_cut = False
        if self._end is not None:
            is_call = item["type"] == "function_call"
            is_cut = self._end.cuts_call if is_call else self._end.reason == "length"
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **place, **done)
        elif item["type"] == "custom_tool_call":
            self._add_to_call(_only_text(self._arguments))
            self._tell("response.custom_tool_call_input.done", **place, input=item["input"])
        else:
            part = item["content"][0]
            place["content_index"] = 0
            self._tell(
                f"response.{part['type']}.done", **place, text=part["text"], **_logprobs(item)
            )
            self._tell("response.content_part.done", **place, part=part)
        self._tell("response.output_item.done", output_index=place["output_index"], item=item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        if self._open is None:
            return {}
        return {"item_id": self._open["id"], "output_index": len(self._items) - 1}

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> None:
        self._open = {
            "id": f"{prefix}_{self.plan.request_id}-{len(self._items)}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self._items.append(self._open)
        place = len(self._items) - 1
        self._tell("response.output_item.added", output_index=place, item=self._open)

    def _add_text(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._close()
            self._begin_text(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if text:
            place = {**self._place(), "content_index": 0}
            self._tell(
                f"response.{part['type']}.delta", **place, delta=text, **_logprobs(self._open)
            )

    def _begin_text(self, kind: str) -> None:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._begin(kind, "msg", {"role": "assistant", "content": []})
        else:
            self._begin(kind, "rs", {"summary": [], "content": []})
        self._items[-1]["content"].append(part)
        self._tell("response.content_part.added", **self._place(), content_index=0, part=part)

    # --- the whole ---

    def _ended(self, usage: Usage) -> dict[str, Any]:
        assert self._end is not None
        is_cut = self._end.reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = ResponseUsage(
            input_tokens=usage["prompt_tokens"],
            input_tokens_details=usage["prompt_tokens_details"],
            output_tokens=usage["completion_tokens"],
            output_tokens_details={"reasoning_tokens": self._end.num_reasoning_tokens},
            total_tokens=usage["total_tokens"],
            speculative=usage["speculative"],
        )
        self._whole = response
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self.plan.request_id}",
            "object": "response",
            "created_at": self.plan.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.plan.model,
            "output": self._items,
            "usage": None,
            "system_fingerprint": self._fingerprint,
            "seed": self.plan.seed,
            **self._asked.repeated,
        }


def _logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Clients expect the field with texts of messages."""
    return {"logprobs": []} if item["type"] == "message" else {}


def _only_text(arguments: str) -> str:
    """The text in ``{"input": text}``, also of a call that was cut off. Arguments of another shape are
    the text as they stand."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    texts = [*found.values()] if isinstance(found, dict) else []
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments
