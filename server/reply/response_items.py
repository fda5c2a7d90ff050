"""A response's output items as they grow, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from server.formats.parts import CallArguments, CallStart, Content, Part, Reasoning

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
