"""``/v1/responses``: items in, items out, and the events in which they come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.request.errors import EngineDeadError
from worlds.request_bodies import TOOLS
from worlds.scripted_engine import ASSISTANT, CHAT_TEMPLATE, USER, ScriptedEngine, byte_tokenizer
from worlds.serving import Connect, openai_client

pytestmark = pytest.mark.anyio

TEXT = "hello wörld"
TOOL: Any = {"type": "function", **TOOLS[0]["function"], "strict": False}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THINKING = CHAT_TEMPLATE + "{% if false %}</think>{% endif %}"


def stream_events(text: str) -> list[dict[str, Any]]:
    """The data of a response's events, whose names have to be their types."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_the_openai_client_gets_a_response(connect: Connect) -> None:
    engine = ScriptedEngine(TEXT)
    async with openai_client(connect, engine) as client:
        response = await client.responses.create(
            model="test/scripted",
            instructions="be brief",
            input="hi",
            metadata={"a": "b"},
            temperature=0.5,
            top_p=0.5,
            store=False,
        )
    assert response.output_text == TEXT
    assert response.status == "completed"
    assert response.instructions == "be brief"
    assert response.metadata == {"a": "b"}
    assert (response.temperature, response.top_p) == (0.5, 0.5)
    assert response.usage is not None
    assert response.usage.output_tokens == len(TEXT.encode())
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.5)
    expected = [USER, *b"system: be brief\n", USER, *b"user: hi\n", ASSISTANT]
    assert list(request.prompt_token_ids) == expected


async def test_the_openai_client_streams_a_response(connect: Connect) -> None:
    text = f"<think>hm</think>Look.\n{CALL}\n{CALL}"
    async with connect(ScriptedEngine(text), byte_tokenizer(THINKING)) as http:
        body = {"input": "hi", "tools": [TOOL], "seed": 1}
        whole = (await http.post("/responses", json=body)).json()
        streamed = await http.post("/responses", json=body | {"stream": True})
    events = stream_events(streamed.text)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert order == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    response = events[-1]["response"]
    items = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert items == response["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", *["function_call"] * 2]
    assert [item["status"] for item in items] == ["completed"] * 4
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 17}
    # The same as whole, but for what belongs to one request.
    for each in (whole, response):
        for item in each["output"]:
            del item["id"]
            item.pop("call_id", None)
    assert whole["output"] == response["output"]


async def test_the_openai_clients_stream_helper_accumulates(connect: Connect) -> None:
    async with (
        openai_client(connect, ScriptedEngine(f"Look. {CALL}")) as client,
        client.responses.stream(model="test/scripted", input="hi", tools=[TOOL]) as stream,
    ):
        snapshots = [
            each.snapshot
            async for each in stream
            if each.type == "response.function_call_arguments.delta"
        ]
        final = await stream.get_final_response()
    assert snapshots[-1] == ARGUMENTS
    assert final.output_text == "Look."
    assert final.output[1].type == "function_call"
    assert final.output[1].arguments == ARGUMENTS


async def test_what_came_out_goes_in_again(connect: Connect) -> None:
    engine = ScriptedEngine(f"<think>hm</think>Look.{CALL}")
    template = THINKING.replace("{{ message['role'] }}", "[{{ message.reasoning_content }}]")
    async with openai_client(connect, engine, tokenizer=byte_tokenizer(template)) as client:
        first = await client.responses.create(model="test/scripted", input="hi", tools=[TOOL])
        call = first.output[-1]
        assert call.type == "function_call"
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        await client.responses.create(
            model="test/scripted", input=[*items, answer], tools=[TOOL], tool_choice="none"
        )
    ids = engine.requests[1].prompt_token_ids
    written = "".join("|" if each >= 256 else chr(each) for each in ids if each < 128 or each > 255)
    assert written == (
        '|[]: hi\n|[hm]: Look.<tool_call>{"name": "get_weather", "arguments": {"city": "Kln"}}'
        "</tool_call>\n|[]: rain\n|"
    )


async def test_a_response_without_a_text_has_an_empty_one(connect: Connect) -> None:
    async with connect(ScriptedEngine("")) as client:
        empty = (await client.post("/responses", json={"input": "hi"})).json()
    assert empty["output"][0]["content"][0]["text"] == ""


async def test_a_stream_that_breaks_ends_with_a_failed_response(connect: Connect) -> None:
    engine = ScriptedEngine(TEXT)
    engine.break_after, engine.error = 2, EngineDeadError("gone")
    async with connect(engine) as client:
        streamed = await client.post("/responses", json={"input": "hi", "stream": True})
    last = stream_events(streamed.text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"


async def test_formats_tools_and_effort_are_those_of_chats(connect: Connect) -> None:
    schema = {"type": "object", "properties": {"zulu": {"type": "string"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    engine = ScriptedEngine(TEXT)
    async with connect(engine) as client:
        for fields in (
            {"text": text},
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}},
            {"reasoning": {"effort": "low"}},
        ):
            reply = await client.post("/responses", json={"input": "hi", **fields})
            assert reply.status_code == 200, reply.text
            for name, value in fields.items():
                repeated = reply.json()[name]
                assert repeated == value or repeated.items() >= value.items()
    assert "zulu" in engine.requests[0].sampling.grammar
    assert "get_weather" in engine.requests[1].sampling.grammar
    assert b"effort low" in bytes(
        each for each in engine.requests[2].prompt_token_ids if each < 256
    )
