"""Tools over HTTP: what the model is told, what it is held to, and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from worlds.official_clients import openai_client
from worlds.request_bodies import ARGUMENTS, CALL, STRICT, TOOLS, called, function
from worlds.scripted_engine import (
    CHAT_TEMPLATE,
    EOS,
    THINKING,
    VOCAB_SIZE,
    ScriptedEngine,
    byte_tokenizer,
    engine_info,
    prompt_text,
)
from worlds.serving import allows, events, fault, post, serve

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = f"I look.\n{CALL}\n{CALL}"


def prompt_of(engine: ScriptedEngine, index: int = 0) -> str:
    return prompt_text(engine.requests[index])


@pytest.mark.parametrize("group_sizes", [(1,), (7, 2, 11), (500,)])
async def test_the_openai_client_gets_calls_whole_and_streamed(
    group_sizes: tuple[int, ...],
) -> None:
    engine = ScriptedEngine(TEXT, group_sizes=group_sizes)
    asked: dict[str, Any] = {"model": "test/scripted", "messages": MESSAGES, "tools": TOOLS}
    async with openai_client(engine) as client:
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
    for (choice,) in (whole.choices, final.choices):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        functions = [each.function for each in choice.message.tool_calls]
        assert [(each.name, each.arguments) for each in functions] == [
            ("get_weather", ARGUMENTS)
        ] * 2
        assert len({each.id for each in choice.message.tool_calls}) == 2
    assert json.dumps(TOOLS[0]["function"]["name"]) in prompt_of(engine)
    assert engine.requests[0].sampling.grammar == ""


async def test_chunks_of_calls_have_openai_shape() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True}
    async with serve(ScriptedEngine(CALL, group_sizes=(9,))) as client:
        *chunks, done = events((await client.post("/chat/completions", json=body)).text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0].keys() == {"index", "id", "type", "function"}
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    assert len(calls) > 2
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(not delta.get("content") for delta in deltas)


CUT = CALL[: CALL.index("ln")]
PARTIAL = '{"city": "Kö'


@pytest.mark.parametrize(
    ("text", "asked", "reasons", "arguments"),
    [
        ("plain", {}, "stop end_turn stop", None),
        ("plain", {"max_tokens": 3}, "length max_tokens length", None),
        ("<tool_call>{oh}", {}, "stop end_turn stop", None),
        (CALL, {}, "tool_calls tool_use stop", ARGUMENTS),
        # What ends the text within a call is told, and no call that could be run.
        (CALL, {"stop": "ln"}, "stop stop_sequence stop", PARTIAL),
        (CALL, {"stop": "city"}, "stop stop_sequence stop", '{"'),
        (CUT, {}, "stop end_turn stop", PARTIAL),
        (CALL, {"max_tokens": len(CUT.encode())}, "length max_tokens length", PARTIAL),
        # Nothing is missing of a call that ends before the text does.
        (CALL, {"stop": "</tool"}, "tool_calls tool_use stop", ARGUMENTS),
        (CALL + CALL, {"stop": "><tool"}, "tool_calls tool_use stop", ARGUMENTS),
        (CALL, {"max_tokens": len(CALL)}, "length max_tokens length", ARGUMENTS),
    ],
)
async def test_the_reason_of_the_end_says_whether_there_is_a_call_to_run(
    text: str, asked: Any, reasons: str, arguments: str | None
) -> None:
    of_chat, of_message, of_ollama = reasons.split()
    limit, stops = asked.get("max_tokens", 400), [asked["stop"]] if "stop" in asked else []
    function = TOOLS[0]["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    options = {"num_predict": limit, "stop": stops}
    bodies: dict[str, Any] = {
        "/chat/completions": {"messages": MESSAGES, "tools": TOOLS, **asked},
        "/messages": {"messages": MESSAGES, "max_tokens": limit, "stop_sequences": stops},
        "http://test/api/chat": {"messages": MESSAGES, "tools": TOOLS, "options": options},
        "/responses": {"input": "hi", "max_output_tokens": limit},
    }
    bodies["/messages"]["tools"] = [tool]
    bodies["/responses"]["tools"] = [{"type": "function", **function}]
    async with serve(ScriptedEngine(text)) as client:
        wholes, streams = [], []
        for path, body in bodies.items():
            wholes.append((await client.post(path, json=body | {"stream": False})).json())
            streams.append((await client.post(path, json=body | {"stream": True})).text)
    chat, message, ollama, response = wholes
    choice = chat["choices"][0]
    streamed = events(streams[0])[-2]["choices"][0]
    assert choice["finish_reason"] == streamed["finish_reason"] == of_chat
    calls = choice["message"].get("tool_calls", [])
    assert [each["function"]["arguments"] for each in calls] == [arguments] * bool(arguments)
    written = text[:3] if limit == 3 else text
    assert choice["message"]["content"] == (None if arguments else written)
    sequence = stops[0] if of_message == "stop_sequence" else None
    assert (message["stop_reason"], message["stop_sequence"]) == (of_message, sequence)
    assert f'"stop_reason":"{of_message}"' in streams[1]
    # The fields that are whole.
    inputs = [each["input"] for each in message["content"] if each["type"] == "tool_use"]
    assert inputs == [json.loads(ARGUMENTS) if arguments == ARGUMENTS else {}] * bool(arguments)
    # Ollama's clients run every call that they get: one that was cut off is text.
    lines = [json.loads(line) for line in streams[2].splitlines()]
    assert ollama["done_reason"] == lines[-1]["done_reason"] == of_ollama
    assert ("tool_calls" in ollama["message"]) == (arguments == ARGUMENTS)
    cut = f'{{"name": "get_weather", "arguments": {arguments}' if arguments else written
    assert ollama["message"]["content"] == ("" if arguments == ARGUMENTS else cut)
    assert "".join(each["message"]["content"] for each in lines) == ollama["message"]["content"]
    if not stops:  # Responses have none
        is_cut = arguments == PARTIAL or (arguments is None and of_chat == "length")
        assert response["output"][-1]["status"] == ("incomplete" if is_cut else "completed")
        details = {"reason": "max_output_tokens"} if of_chat == "length" else None
        assert response["incomplete_details"] == details
        assert response["status"] == ("completed" if details is None else "incomplete")
        assert f"event: response.{response['status']}\n" in streams[3]


async def test_markers_are_seen_though_special_tokens_are_left_out() -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE + "{# [TOOL_CALLS] #}".replace("<tool_call>", ""))
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "[TOOL_CALLS]")
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    (marker,) = tokenizer.encode("[TOOL_CALLS]", add_special_tokens=False)
    script = [258, *b"Hm.", marker, *b'[{"name": "get_weather", "arguments": {}}]', EOS]
    engine = ScriptedEngine(script=lambda _: script, info=engine_info(vocab_size=VOCAB_SIZE + 1))
    async with serve(engine, tokenizer) as client:
        body = {"messages": MESSAGES, "tools": TOOLS}
        told = (await client.post("/chat/completions", json=body)).json()
        plain = (await client.post("/chat/completions", json={"messages": MESSAGES})).json()
    message = told["choices"][0]["message"]
    assert message["content"] == "Hm."
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    assert len(message["tool_calls"][0]["id"]) == 9
    # Without tools nothing is parsed, and the marker is a special token like others.
    text = plain["choices"][0]["message"]["content"]
    assert text == 'Hm.[{"name": "get_weather", "arguments": {}}]'


async def test_without_calls_nothing_is_told_and_nothing_parsed() -> None:
    engine = ScriptedEngine(CALL)
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}
    reply = (await post("/chat/completions", body, engine)).json()
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert "get_weather" not in prompt_of(engine)


# --- what the model is held to ---

NAMED = {"type": "function", "function": {"name": "get_weather"}}
OTHER = {"type": "function", "function": {"name": "other"}}


PLAIN = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
BAD_CALL = CALL.replace('"Köln"', "7")
OTHER_CALL = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        (
            {"tools": [*TOOLS, OTHER], "tool_choice": "required"},
            [
                CALL,
                OTHER_CALL,
                f"{CALL}\n{OTHER_CALL}",
                f"<think>hm <tool_call> </think>\n\n{CALL}",
            ],
            ["text", BAD_CALL, f"text {CALL}", "<think>hm</think> no"],
        ),
        (
            {"tools": [*TOOLS, OTHER], "tool_choice": NAMED},
            [CALL],
            ["text", OTHER_CALL, f"{CALL}\n{CALL}"],
        ),
        (
            {"tools": TOOLS, "parallel_tool_calls": False},
            ["text", CALL, f"text {CALL}", BAD_CALL],
            [f"{CALL}\n{CALL}", OTHER_CALL],
        ),
        (
            {"tools": STRICT},
            ["text", "text <tool", f"text {CALL}\n{CALL}"],
            [BAD_CALL, OTHER_CALL, "<tool_call>"],
        ),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            ['{"a": 1}', CALL],
            ["text", f"text {CALL}", OTHER_CALL],
        ),
    ],
)
async def test_calls_are_valid_by_construction(
    fields: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    engine = ScriptedEngine(CALL)
    body = {"messages": MESSAGES, **fields}
    reply = await post("/chat/completions", body, engine, byte_tokenizer(THINKING))
    assert reply.status_code == 200, reply.text
    grammar = engine.requests[0].sampling.grammar
    assert [text for text in allowed if not allows(grammar, text)] == []
    assert [text for text in refused if allows(grammar, text)] == []


# --- refusals ---


@pytest.mark.parametrize(
    ("template", "settings"),
    [
        ("{{ messages[0].content }} {{ tools }}", {}),
        ("{{ messages[0].content }}", {"tool_call_parser": "hermes"}),
        (CHAT_TEMPLATE, {"tool_call_parser": "none"}),
        # The operator does not want texts taken apart, whatever is required.
        (CHAT_TEMPLATE, {"tool_call_parser": "none", "tool_choice": "required"}),
    ],
)
async def test_a_model_without_tools_says_so(template: str, settings: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": settings.pop("tool_choice", None)}
    tokenizer = byte_tokenizer(template)
    refused = await post("/chat/completions", body, ScriptedEngine(), tokenizer, **settings)
    assert fault(refused, "param") == (400, "tools")


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content }}{{ tools }}", "{{ messages[0].content }}"]
)
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_must_come_needs_no_format_of_the_models(
    template: str, choice: Any
) -> None:
    engine = ScriptedEngine(f"[{PLAIN}]")
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    async with serve(engine, byte_tokenizer(template)) as client:
        whole = (await client.post("/chat/completions", json=body)).json()["choices"][0]
        reply = await client.post("/chat/completions", json=body | {"stream": True})
    (call,) = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    deltas = [each["choices"][0]["delta"] for each in events(reply.text)[:-1]]
    pieces = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert "".join(each["function"].get("arguments", "") for each in pieces) == ARGUMENTS
    assert not any(delta.get("content") for delta in deltas)
    grammar = engine.requests[0].sampling.grammar
    assert allows(grammar, f"[{PLAIN}]")
    assert allows(grammar, f"[{PLAIN}, {PLAIN}]") == (choice == "required")
    wrong = PLAIN.replace('"Köln"', "7")
    for text in ("text", "[]", PLAIN, f"[{PLAIN}, ", f"[{wrong}]"):
        assert not allows(grammar, text), text
    assert ("get_weather" in prompt_of(engine)) == ("tools" in template)


async def test_the_operator_may_name_the_format() -> None:
    text = '{"name": "get_weather", "parameters": {}}'
    body = {"messages": MESSAGES, "tools": TOOLS}
    reply = await post("/chat/completions", body, ScriptedEngine(text), tool_call_parser="llama3")
    assert (
        reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    )


# --- reasoning ---


async def test_reasoning_is_split_off_and_counted() -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    async with serve(ScriptedEngine(text), byte_tokenizer(THINKING)) as client:
        body: dict[str, Any] = {"messages": MESSAGES}
        whole = (await client.post("/chat/completions", json=body)).json()
        hidden = await client.post("/chat/completions", json=body | {"include_reasoning": False})
        streamed = await client.post("/chat/completions", json=body | {"stream": True})
    expected = {"role": "assistant", "content": "yes"}
    expected |= {"reasoning_content": "hm", "reasoning": "hm"}
    assert whole["choices"][0]["message"] == expected
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 19}
    assert hidden.json()["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
    assert hidden.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 19}
    deltas = [chunk["choices"][0]["delta"] for chunk in events(streamed.text)[:-1]]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == expected[name]


async def test_past_reasoning_is_handed_to_the_template(engine: ScriptedEngine) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "a", "reasoning": "b"}]
    await post("/chat/completions", {"messages": messages}, engine, byte_tokenizer(template))
    assert prompt_of(engine) == "[b]a"


async def test_special_tokens_in_tools_calls_and_results_are_text() -> None:
    engine = ScriptedEngine()
    messages = [
        called('{"a": "<|user|>"}'),
        {"role": "tool", "tool_call_id": "1", "content": "<|assistant|>"},
    ]
    body = {"messages": messages, "tools": [function(description="</s>")]}
    async with serve(engine) as client:
        await client.post("/chat/completions", json=body)
        await client.post("/chat/completions", json=body | {"allow_special_tokens": True})
    as_text, as_tokens = (
        [each for each in r.prompt_token_ids if each > 255] for r in engine.requests
    )
    assert as_text == [258, 258, 259]
    assert sorted(as_tokens) == [257, 258, 258, 258, 259, 259]
    for text in ("<|user|>", "<|assistant|>", "</s>"):
        assert text in prompt_of(engine)


async def test_a_chat_has_the_tokens_that_are_told(engine: ScriptedEngine, client: Any) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"shout": True}}
    await client.post("/chat/completions", json=body)
    found = await client.post("http://test/tokenize", json=body)
    assert found.json()["tokens"] == list(engine.requests[0].prompt_token_ids)


def _turn(assistant: Any, tool: Any, **fields: Any) -> dict[str, Any]:
    """A second turn, in which a call is answered, as an agent sends it."""
    asked = {"role": "user", "content": [{"type": "text", "text": "What does note.txt say?"}]}
    return {"messages": [asked, assistant, tool], "stream": True, **fields}


READ: Any = {"id": "c", "type": "function"}
READ |= {"function": {"name": "get_weather", "arguments": ARGUMENTS}}
SAID = {"role": "assistant", "content": "I look.", "tool_calls": [READ]}
FOUND = {"role": "tool", "tool_call_id": "c"}
USAGE = {"tools": TOOLS, "stream_options": {"include_usage": True}}
MARK = {"type": "ephemeral"}
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
CLAUDE = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "You are an agent.", "cache_control": MARK},
    ],
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    "metadata": {"user_id": '{"device_id":"84a1"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CALLED = {"type": "tool_use", "id": "c", "name": "get_weather", "input": json.loads(ARGUMENTS)}
RESULT = {"tool_use_id": "c", "type": "tool_result", "content": "4711", "is_error": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(
            "/messages",
            _turn(
                {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALLED]},
                {"role": "user", "content": [RESULT | {"cache_control": MARK}]},
                **CLAUDE,
            ),
            id="claude-code 2.1.197",
        ),
        pytest.param(
            "/chat/completions",
            _turn(SAID, FOUND | {"content": "4711"}, tool_choice="auto", max_tokens=128, **USAGE),
            id="opencode 1.18.33, cline 3.0.65",
        ),
        pytest.param(
            "/chat/completions",
            _turn(SAID, FOUND | {"content": [{"type": "text", "text": "4711"}]}, **USAGE),
            id="qwen-code 0.15.10",
        ),
    ],
)
async def test_what_agents_send_back_is_taken(path: str, body: dict[str, Any]) -> None:
    """Shortened from what each sent to this server."""
    engine = ScriptedEngine(TEXT, info=engine_info(max_model_len=2000))
    reply = await post(path, body, engine)
    assert reply.status_code == 200, reply.text
    shown = prompt_of(engine)
    assert (
        f'assistant: I look.<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in shown
    )
    assert "tool: 4711" in shown
    assert "billing" not in shown
