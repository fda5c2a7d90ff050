"""``/v1/messages`` and its count of tokens, by Anthropic's own client and by hand."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import Message

from engine.request.errors import EngineDeadError
from engine.request.params import GenerationRequest
from server.apis.anthropic.request import CountTokensRequest
from worlds.official_clients import anthropic_client
from worlds.request_bodies import CALL
from worlds.scripted_engine import (
    CHAT_TEMPLATE,
    EOS,
    THINKING,
    ScriptedEngine,
    byte_tokenizer,
    engine_info,
    prompt_text,
)
from worlds.serving import named_events, serve

TEXT = "hello wörld"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
SWITCHED = (
    THINKING + "{% if enable_thinking is defined %}thinks {{ enable_thinking }} {% endif %}"
    "{% if thinking_budget %}budget {{ thinking_budget }} {% endif %}"
)
HI: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "test/scripted", "max_tokens": 400, "messages": HI}


def said(message: Message) -> list[dict[str, Any]]:
    """The blocks of a message without the ids of its calls, which differ between requests."""
    return [block.model_dump(exclude={"id"}) for block in message.content]


async def test_a_message_and_the_account_of_its_drafts() -> None:
    engine = ScriptedEngine(TEXT)
    async with anthropic_client(engine) as client:
        message = await client.messages.create(
            **ASKED,
            system="be brief",
            extra_body={"seed": 3},
        )
    assert said(message) == [{"type": "text", "text": TEXT, "citations": None}]
    assert (message.role, message.model) == ("assistant", "test/scripted")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    (request,) = engine.requests
    assert prompt_text(request, "|") == "|system: be brief\n|user: hi\n|"
    usage = message.usage
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(request.prompt_token_ids)
    assert usage.cache_creation_input_tokens == 0
    assert usage.output_tokens == len(TEXT.encode())
    own = message.model_dump()
    assert own["seed"] == 3
    assert own["usage"]["speculative"]["num_accepted_tokens"] == 7


@pytest.mark.parametrize("group_sizes", [(1,), (1, 3, 2), (400,)])
@pytest.mark.parametrize(
    "text",
    ["", TEXT, f"Look.\n{CALL}\n{CALL}", f"<think>hm\nso</think>Look.\n{CALL}", "<think>hm"],
)
async def test_a_stream_says_what_the_whole_message_says(
    text: str, group_sizes: tuple[int, ...]
) -> None:
    engine = ScriptedEngine(text, group_sizes=group_sizes)
    async with anthropic_client(engine, byte_tokenizer(THINKING)) as client:
        whole = await client.messages.create(**ASKED, tools=[TOOL])
        async with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
            texts = [piece async for piece in stream.text_stream]
            streamed = await stream.get_final_message()
    assert said(streamed) == said(whole)
    assert "".join(texts) == "".join(each.text for each in whole.content if each.type == "text")
    assert (streamed.stop_reason, streamed.model) == (whole.stop_reason, whole.model)
    assert streamed.stop_reason == ("tool_use" if CALL in text else "end_turn")
    for usage in (whole.usage, streamed.usage):
        assert usage.output_tokens == len(text.encode())
        thoughts = text.partition("</think>")[0] if "<think>" in text else ""
        marks = "</think>" if "</think>" in text else ""
        assert usage.output_tokens_details.thinking_tokens == len((thoughts + marks).encode())
    ids = {block.id for block in streamed.content if block.type == "tool_use"}
    assert len(ids) == text.count(CALL)


async def test_events_come_in_anthropics_order() -> None:
    text = f"<think>hm</think>Look.\n{CALL}"
    async with serve(ScriptedEngine(text), byte_tokenizer(THINKING)) as http:
        body = ASKED | {"tools": [TOOL], "stream": True}
        reply = await http.post("/messages?beta=true", json=body)
    found = named_events(reply.text)
    assert reply.headers["content-type"].startswith("text/event-stream")
    kinds = [each.get("delta", {}).get("type", each["type"]) for each in found]
    order = [kind for index, kind in enumerate(kinds) if kinds[index - 1 : index] != [kind]]
    start, stop = "content_block_start", "content_block_stop"
    assert order == [
        *("message_start", "ping"),
        *(start, "thinking_delta", "signature_delta", stop),
        *(start, "text_delta", stop),
        *(start, "input_json_delta", stop),
        *("message_delta", "message_stop"),
    ]
    assert [each["index"] for each in found if each["type"] == start] == [0, 1, 2]
    first, last = found[0]["message"], found[-2]
    assert (first["content"], first["stop_reason"]) == ([], None)
    assert first["usage"]["input_tokens"] == last["usage"]["input_tokens"] + 3
    assert last["usage"]["cache_read_input_tokens"] == 3
    assert last["usage"]["speculative"]["num_draft_tokens"] == 10
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_the_clients_tool_runner_goes_round() -> None:
    """Its messages come back as they were, with what its function returned."""

    def script(request: GenerationRequest) -> list[int]:
        is_answered = "tool: rain in Köln" in prompt_text(request)
        return [*("It rains." if is_answered else f"Look.\n{CALL}").encode(), EOS]

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        return f"rain in {city}"

    engine = ScriptedEngine(script=script)
    async with anthropic_client(engine, tool_call_parser="hermes") as client:
        for stream in (False, True):
            runner = client.beta.messages.tool_runner(**ASKED, tools=[get_weather], stream=stream)
            message = await runner.until_done()
            assert [each.text for each in message.content if each.type == "text"] == ["It rains."]
    assert len(engine.requests) == 4
    called = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
    for request in engine.requests[1::2]:
        told = prompt_text(request, "|").split("</tools>")[-1]
        expected = f"|user: hi\n|assistant: Look.<tool_call>{called}</tool_call>\n"
        assert told == f"{expected}|tool: rain in Köln\n|"


CONVERSATION: Any = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "user", "content": "three"},
    {"role": "system", "content": "be kind"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "four", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "five"},
            {
                "type": "tool_result",
                "tool_use_id": "b",
                "content": [{"type": "text", "text": "six"}],
                "is_error": True,
            },
            {
                "type": "document",
                "title": "seven",
                "source": {"type": "text", "media_type": "text/plain", "data": "eight"},
            },
            {"type": "text", "text": "nine"},
        ],
    },
]
SYSTEM: Any = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
    {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "be good"},
]


async def test_blocks_become_the_messages_of_a_chat() -> None:
    template = CHAT_TEMPLATE.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}{% if message.reasoning_content %} thought "
        "{{ message.reasoning_content }}{% endif %}",
    )
    engine = ScriptedEngine(TEXT)
    async with anthropic_client(engine, byte_tokenizer(template)) as client:
        await client.messages.create(**ASKED | {"messages": CONVERSATION}, system=SYSTEM)
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    called = "".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)
    assert prompt_text(engine.requests[0], "|").split("|") == [
        "",
        "system: be brief\nbe good\n",
        "user: one\ntwo\nthree\n",
        "system: be kind\n",
        f"assistant: four thought hm{called}\n",
        "tool: five\n",
        "tool: Error: six\n",
        "user: seven\neight\nnine\n",
        "",
    ]


async def test_a_turn_reads_alike_whole_and_with_a_message_for_each_block() -> None:
    used = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Look."}, used]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "warm"}
    after = {"role": "user", "content": [result]}
    engine = ScriptedEngine(TEXT)
    async with serve(engine) as client:
        for turn in ([blocks], [[each] for each in blocks]):
            said = [{"role": "assistant", "content": each} for each in turn]
            body = ASKED | {"messages": [*HI, *said, after]}
            assert (await client.post("/messages", json=body)).status_code == 200
    whole, apart = map(prompt_text, engine.requests)
    assert whole == apart
    assert "Look.<tool_call>" in whole


async def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    engine = ScriptedEngine(TEXT)
    messages = [*HI, {"role": "assistant", "content": "The answer is ("}]
    async with anthropic_client(engine) as client:
        message = await client.messages.create(**ASKED | {"messages": messages})
    assert prompt_text(engine.requests[0], "|").endswith("|assistant: The answer is (")
    assert said(message)[0]["text"] == TEXT


async def test_a_last_message_that_the_template_changes_is_refused_by_its_own_name() -> None:
    shouting = byte_tokenizer("{% for each in messages %}{{ each.content | upper }}{% endfor %}")
    last = {"messages": [*HI, {"role": "assistant", "content": "The answer"}]}
    async with serve(ScriptedEngine(TEXT), shouting) as client:
        for path in ("/messages", "/messages/count_tokens"):
            more = {"max_tokens": 5} if path == "/messages" else {}
            reply = await client.post(path, json=last | more)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "messages"


async def test_the_count_is_that_of_the_message() -> None:
    engine = ScriptedEngine(TEXT)
    asked: Any = {"model": "test/scripted", "messages": CONVERSATION, "system": SYSTEM}
    none: Any = {"tool_choice": {"type": "none"}}
    async with anthropic_client(engine, tool_call_parser="hermes") as client:
        counts = []
        for more in ({}, {"tools": [TOOL]}, {"tools": [TOOL], **none}):
            counted = await client.messages.count_tokens(**asked, **more)
            usage = (await client.messages.create(**asked, **more, max_tokens=5)).usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            counts.append(counted.input_tokens)
        long: Any = [{"role": "user", "content": "a" * 2000}]
        assert (
            await client.messages.count_tokens(**asked | {"messages": long})
        ).input_tokens > 2000
    assert counts[0] == counts[2] < counts[1]


async def test_more_tokens_than_there_is_room_for_are_what_there_is_room_for() -> None:
    engine = ScriptedEngine(script=lambda _: [97] * 600, info=engine_info(max_model_len=64))
    async with anthropic_client(engine) as client:
        for asked in (60, 20_000):
            message = await client.messages.create(**ASKED | {"max_tokens": asked})
            assert message.stop_reason == "model_context_window_exceeded"
            assert message.usage.output_tokens == 64 - len(engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, "thinks True budget 2000 "),
        ({"type": "disabled"}, "thinks False "),
        ({"type": "adaptive"}, ""),
    ],
)
async def test_thinking_is_the_templates_switch(thinking: Any, told: str) -> None:
    engine = ScriptedEngine("<think>hm</think>yes")
    async with anthropic_client(engine, byte_tokenizer(SWITCHED)) as client:
        message = await client.messages.create(**ASKED, thinking=thinking)
        await client.messages.count_tokens(model="test/scripted", messages=HI, thinking=thinking)
    assert prompt_text(engine.requests[0], "|").endswith(f"\n|{told}")
    assert [block.type for block in message.content] == ["thinking", "text"]


async def test_thoughts_may_be_left_out_and_are_counted() -> None:
    async with anthropic_client(
        ScriptedEngine("<think>hm</think>yes"), byte_tokenizer(THINKING)
    ) as client:
        message = await client.messages.create(
            **ASKED, thinking={"type": "adaptive", "display": "omitted"}
        )
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.output_tokens_details.thinking_tokens == 17


EXAMPLE: Any = {"input_examples": [{"city": "Bonn"}], "eager_input_streaming": True}


@pytest.mark.parametrize(
    ("fields", "prompt", "grammar"),
    [
        ({"tools": [TOOL | EXAMPLE]}, '"examples": [{"city": "Bonn"}]', ""),
        *(
            ({"tools": [TOOL], "tool_choice": choice}, "get_weather", grammar)
            for choice, grammar in (
                ({"type": "tool", "name": "get_weather"}, "get_weather"),
                ({"type": "auto", "disable_parallel_tool_use": True}, "get_weather"),
                ({"type": "auto"}, ""),
            )
        ),
    ],
)
async def test_fields_have_their_effect_on_the_prompt_and_hold_the_text(
    fields: Any, prompt: str, grammar: str
) -> None:
    engine = ScriptedEngine(CALL)
    async with anthropic_client(engine, tool_call_parser="hermes") as client:
        await client.messages.create(**ASKED, **fields)
    (request,) = engine.requests
    assert prompt in prompt_text(request)
    found = request.sampling.grammar
    assert grammar in found if grammar else not found


def _block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CONTENT = "messages.0.content"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "integer"),
    ({"no_such_field": 1}, "no_such_field", "knows no such field"),
    ({"container": "x"}, "container", "no tool runs here"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "only"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", "'user'"),
    (_block("image"), f"{CONTENT}.0", "no vision part"),
    (_block("text", text=1), f"{CONTENT}.0.text", "string"),
    (_block("text", text="a", x=1), f"{CONTENT}.0.x", "not permitted"),
    (_block("guess"), f"{CONTENT}.0.type", "tool_result"),
    (_block("server_tool_use"), f"{CONTENT}.0.type", "no tool runs here"),
    (_block("web_search_tool_result"), f"{CONTENT}.0.type", "no tool runs here"),
    (_block("tool_use", id="a", name="f", input={}), f"{CONTENT}.0.type", "no place"),
    (_block("document", source={"type": "url"}), f"{CONTENT}.0.source.type", "files are not"),
    (_block("tool_result", tool_use_id="a", content="b"), CONTENT, "no message before"),
    (_block("tool_result", tool_use_id="a", content=[IMAGE]), f"{CONTENT}.0.content.0", "vision"),
    ({"system": [{"type": "text", "text": "a"}, IMAGE]}, "system.1", "no vision part"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "'input_schema'"),
    ({"tools": [TOOL, TOOL]}, "tools.1.name", "twice"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema", "required"),
    (
        {"tools": [TOOL | {"input_schema": {"type": "object", "properties": {"a": {"type": 1}}}}],
         "tool_choice": {"type": "any"}},
        "tools.0.input_schema", "",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs 'tools'"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
    ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name", "no effect"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice.name", "no tool 'f'",
    ),
    ({"thinking": {"type": "disabled", "budget_tokens": 1}}, "thinking.budget_tokens", "no effect"),
    (
        {"output_config": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}},
        "output_config.effort", "contradicts",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "output_config.format", "",
    ),
    ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "prompt is too long"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "field", "part"), REFUSED)
async def test_what_cannot_be_is_refused_by_name(
    asked: dict[str, Any], field: str, part: str
) -> None:
    engine = ScriptedEngine(TEXT)
    async with serve(engine, tool_call_parser="hermes") as http:
        reply = await http.post("/messages", json=ASKED | asked)
        assert (reply.status_code, reply.json()["type"]) == (400, "error"), reply.text
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(field)
        assert part in error["message"]
        fields = {*CountTokensRequest.model_fields, *CountTokensRequest.unsupported}
        if asked.keys() <= fields and "prompt is too long" not in part:
            reply = await http.post("/messages/count_tokens", json={"messages": HI} | asked)
            assert reply.json().get("error", {}).get("param", field).startswith(field)
    assert engine.requests == []


async def fails(client: AsyncAnthropic, kind: type[anthropic.APIStatusError], **asked: Any) -> Any:
    with pytest.raises(kind) as caught:
        await client.messages.create(**ASKED | asked)
    assert caught.value.body["type"] == "error"
    assert caught.value.request_id == caught.value.body["request_id"]
    return caught.value


async def test_errors_are_the_clients_own() -> None:
    engine = ScriptedEngine(TEXT)
    async with anthropic_client(
        engine, key="s3cret", api_key="s3cret", max_body_bytes=4000
    ) as client:
        await client.messages.create(**ASKED)
        await fails(client, anthropic.NotFoundError, model="claude")
        await fails(client, anthropic.BadRequestError, stop_sequences=[""])
        long = [{"role": "user", "content": "a" * 5000}]
        await fails(client, anthropic.ContentTooLargeError, messages=long)
        engine.capacity = 0
        found = await fails(client, anthropic.RateLimitError)
        assert found.response.headers["retry-after"] == "3"
        engine.is_alive = False
        await fails(client, anthropic.ServiceUnavailableError)
        await fails(client.with_options(api_key="wrong"), anthropic.AuthenticationError)


async def test_the_client_lists_what_is_served() -> None:
    async with anthropic_client(ScriptedEngine(TEXT)) as client:
        listed = [model async for model in client.models.list()]
        found = await client.models.retrieve("test/scripted")
        assert listed == [found]
        assert (found.id, found.display_name, found.type) == (*["test/scripted"] * 2, "model")
        assert found.max_input_tokens == 512
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("claude")


async def test_an_error_within_a_stream_is_an_event_of_it() -> None:
    engine = ScriptedEngine(TEXT)
    engine.break_after, engine.error = 2, EngineDeadError("the engine died")
    async with anthropic_client(engine) as client:
        pieces: list[str] = []
        with pytest.raises(anthropic.APIStatusError) as caught:  # noqa: PT012
            async with client.messages.stream(**ASKED) as stream:
                async for piece in stream.text_stream:
                    pieces.append(piece)
    assert TEXT.startswith("".join(pieces))
    assert pieces
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "The engine has stopped; no request is served.",
            "param": None,
            "code": "engine_dead",
            "details": {"error_code": "engine_dead"},
        },
    }
