"""Messages as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.errors import refused
from server.request.protocol import ChatMessage
from server.request.tools import MessageToolCall


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """``developer`` is ``system``; arguments of calls are objects; a tool's message has its function's
    name. A field that a message has not is not there.

    Raises ApiError 400 where arguments are no object, or a tool answers to a call that was not made.
    """
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        field = f"messages.{index}"
        told: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            # Templates join contents to other text, and null to none.
            "content": message.content or "",
        }
        if message.thoughts:
            told["reasoning_content"] = message.thoughts
        if message.tool_calls:
            told["tool_calls"] = _calls(message.tool_calls, field)
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.role == "tool":
            told |= _answered(message, names, field)
        found.append(told)
    return found


def _calls(calls: Sequence[MessageToolCall], field: str) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _arguments(
                    call.function.arguments, f"{field}.tool_calls.{index}.function.arguments"
                ),
            },
        }
        for index, call in enumerate(calls)
    ]


def _arguments(text: str, field: str) -> dict[str, Any]:
    try:
        # Clients write no arguments as no text.
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise refused(field, "is not the text of a JSON object") from error
    if not isinstance(arguments, dict):
        raise refused(field, "is not the text of a JSON object")
    return arguments


def _answered(message: ChatMessage, names: dict[str, str], field: str) -> dict[str, Any]:
    called = message.tool_call_id or ""
    if called not in names:
        raise refused(
            f"{field}.tool_call_id",
            ": no message before this one has a tool call of this id",
        )
    if message.name not in (None, names[called]):
        raise refused(f"{field}.name", f": the call was of {names[called]!r}")
    return {"tool_call_id": called, "name": names[called]}
