"""Replies of ``/v1/responses``: one object of items, or the events in which it comes about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from server.errors import ApiError
from server.formats.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.plan import RequestPlan
from server.reply.deltas import ChoiceDelta, ChoiceEnd
from server.reply.token_texts import TokenTexts
from server.reply.usage import PromptTokensDetails, SpeculativeUsage, Usage
from server.reply.writers import Writer, event


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
    """``output``: items of type ``reasoning``, ``message`` and ``function_call``, as written. What the
    request said comes back beside these fields."""

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


ItemEvent: TypeAlias = tuple[str, dict[str, Any]]
"""An event's type and its fields, but for the number."""


class OutputItems:
    """The items of one choice. Events show items as they are when they are taken: take each before the
    next."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._open: dict[str, Any] | None = None
        self.items: list[dict[str, Any]] = []

    def add(self, part: Part) -> Iterator[ItemEvent]:
        """Yields the events that tell what a part changes."""
        if isinstance(part, CallStart):
            yield from self.close()
            call = {"call_id": part.call_id, "name": part.name, "arguments": ""}
            yield from self._begin("function_call", "fc", call)
        elif isinstance(part, CallArguments):
            assert self._open is not None, "a call's arguments follow its start"
            self._open["arguments"] += part.text
            yield "response.function_call_arguments.delta", {**self._place(), "delta": part.text}
        elif isinstance(part, Reasoning):
            yield from self._add_text("reasoning", part.text)
        else:
            yield from self._add_text("message", part.text)

    def close(self, status: str = "completed") -> Iterator[ItemEvent]:
        """The item that is open, if one is, is as long as it gets."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._place(), **done}
        else:
            place, part = self._place() | {"content_index": 0}, item["content"][0]
            done = {"text": part["text"], **_logprobs(item)}
            yield f"response.{part['type']}.done", {**place, **done}
            yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": self._index, "item": item}
        self._open = None

    def end(self, status: str) -> Iterator[ItemEvent]:
        """No more parts. A response without any has an empty message."""
        if not self.items:
            yield from self.add(Content(""))
        yield from self.close(status)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": self._index}

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[ItemEvent]:
        self._open = {
            "id": f"{prefix}_{self._request_id}-{len(self.items)}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self.items.append(self._open)
        yield "response.output_item.added", {"output_index": self._index, "item": self._open}

    def _add_text(self, kind: str, text: str) -> Iterator[ItemEvent]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin_text(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if text:
            place = {**self._place(), "content_index": 0}
            delta = {**place, "delta": text, **_logprobs(self._open)}
            yield f"response.{part['type']}.delta", delta

    def _begin_text(self, kind: str) -> Iterator[ItemEvent]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin(kind, "msg", {"role": "assistant", "content": []})
        else:
            yield from self._begin(kind, "rs", {"summary": [], "content": []})
        self.items[-1]["content"].append(part)
        place = {**self._place(), "content_index": 0}
        yield "response.content_part.added", {**place, "part": part}


def _logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Clients expect the field with texts of messages."""
    return {"logprobs": []} if item["type"] == "message" else {}


class ResponsesWriter(Writer):
    """``/v1/responses``. A stream's events are numbered from 0."""

    def __init__(
        self, plan: RequestPlan, texts: TokenTexts, model_name: str, fingerprint: str
    ) -> None:
        super().__init__(plan, texts, model_name, fingerprint)
        self._items = OutputItems(plan.request_id)
        self._number = 0
        self._end: ChoiceEnd | None = None

    def begin(self) -> bytes:
        response = {"response": self._response("in_progress")}
        return b"".join(
            self._event((f"response.{kind}", response)) for kind in ("created", "in_progress")
        )

    def events(self, delta: ChoiceDelta) -> bytes:
        self._end = delta.end
        return b"".join(map(self._event, self._changes(delta)))

    def finish(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        return self._event((f"response.{response['status']}", {"response": response}))

    def failure(self, error: ApiError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event(("response.failed", {"response": response}))

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        self.events(choices[0])
        return self._ended(usage)

    def _changes(self, delta: ChoiceDelta) -> Iterator[ItemEvent]:
        for part in delta.parts or ((Content(delta.text),) if delta.text else ()):
            yield from self._items.add(part)
        if delta.end is not None:
            yield from self._items.end(
                "incomplete" if delta.end.reason == "length" else "completed"
            )

    def _event(self, change: ItemEvent) -> bytes:
        kind, fields = change
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _ended(self, usage: Usage) -> dict[str, Any]:
        assert self._end is not None
        is_cut = self._end.reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        response["usage"] = _usage(usage, self._end.num_reasoning_tokens)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": f"resp_{self.plan.request_id}",
            "object": "response",
            "created_at": self.plan.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model_name,
            "output": self._items.items,
            "usage": None,
            "system_fingerprint": self._fingerprint,
            "seed": self.plan.seed,
            **self.plan.repeated,
        }


def _usage(usage: Usage, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage["prompt_tokens"],
        input_tokens_details=usage["prompt_tokens_details"],
        output_tokens=usage["completion_tokens"],
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning_tokens),
        total_tokens=usage["total_tokens"],
        speculative=usage["speculative"],
    )
