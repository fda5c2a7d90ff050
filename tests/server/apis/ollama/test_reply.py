"""Ollama's shapes: calls told whole, whatever their pieces, and lines that say nothing in pauses."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from server.apis.ollama.reply import CallsUnderWay, timestamp
from server.formats.parts import CallArguments, CallStart, Content, Part
from server.reply import streaming
from worlds.scripted_engine import AsgiCall, ScriptedEngine
from worlds.serving import serve

START = CallStart(0, "call-1", "f")


def calls_of(*steps: list[Part]) -> tuple[list[Any], str]:
    """Returns the calls and the text of parts in these steps, the last of which ends the choice."""
    under_way = CallsUnderWay()
    calls, text = [], ""
    for index, parts in enumerate(steps):
        found, left = under_way.add(parts, index == len(steps) - 1)
        calls += found
        text += left
    return calls, text


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([[START, CallArguments(0, '{"a": [1, 2]}')]], ""),
        ([[START], [CallArguments(0, '{"a": [1')], [CallArguments(0, ", 2]}")], []], ""),
        ([[START, CallArguments(0, '{"a": [1, 2]}'), Content("x")], []], "x"),
    ],
)
def test_a_call_comes_whole_however_it_was_cut(steps: list[list[Part]], text: str) -> None:
    function = {"index": 0, "name": "f", "arguments": {"a": [1, 2]}}
    assert calls_of(*steps) == ([{"id": "call-1", "function": function}], text)


def test_calls_follow_each_other_in_order() -> None:
    second = CallStart(1, "call-2", "g")
    calls, text = calls_of(
        [START, CallArguments(0, "{}"), second], [CallArguments(1, "{}"), Content("x")], []
    )
    assert [each["function"]["name"] for each in calls] == ["f", "g"]
    assert text == "x"


@pytest.mark.parametrize("group_sizes", [(1,), (400,)])
async def test_what_is_no_call_stands_where_it_was_written(group_sizes: tuple[int, ...]) -> None:
    no_call = '{"name": "f", "arguments": {"a": nope}'
    engine = ScriptedEngine(f"One.<tool_call>{no_call}}}</tool_call> Two.", group_sizes=group_sizes)
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    async with serve(engine, tool_call_parser="hermes") as client:
        for stream in (True, False):
            reply = await client.post("http://test/api/chat", json=asked | {"stream": stream})
            said = (json.loads(line)["message"]["content"] for line in reply.text.splitlines())
            assert "".join(said) == f"One.{no_call} Two."


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "", r'{"a": "\ud83d"}'])
def test_what_is_no_object_is_text(arguments: str) -> None:
    calls, text = calls_of([START], [CallArguments(0, arguments)] if arguments else [])
    assert calls == []
    assert text == f'{{"name": "f", "arguments": {arguments}'


def test_times_are_rfc_3339() -> None:
    assert timestamp(0) == "1970-01-01T00:00:00.000000Z"
    now = datetime.fromisoformat(timestamp())
    assert abs((datetime.now(UTC) - now).total_seconds()) < 3600


async def test_a_pause_is_a_piece_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients read every line as an object, so a comment would break them."""
    monkeypatch.setattr(streaming, "KEEPALIVE_SECONDS", 0.0)
    monkeypatch.setattr(streaming, "ADMISSION_SECONDS", 0.0)
    engine = ScriptedEngine("hi")
    engine.gate.clear()
    body = {"messages": [{"role": "user", "content": "a"}]}
    async with (
        serve(engine) as client,
        AsgiCall(client.app, "/api/chat", body) as call,  # type: ignore[attr-defined]
    ):
        head = await asyncio.wait_for(call.messages.get(), 300)
        assert head["type"] == "http.response.start"
        message = await asyncio.wait_for(call.messages.get(), 300)
        line = json.loads(message["body"])
        assert line["message"] == {"role": "assistant", "content": ""}
        assert not line["done"]
        engine.gate.set()
        rest = b""
        while message.get("more_body", True):
            message = await asyncio.wait_for(call.messages.get(), 300)
            rest += message["body"]
    pieces = [json.loads(each) for each in rest.splitlines()]
    assert "".join(each["message"]["content"] for each in pieces) == "hi"
    assert pieces[-1]["done"]
