"""Bodies that cannot be taken are a 400 that names the field at fault, and reach no engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.apis.responses.request import MAX_ITEMS
from server.errors import ApiError
from server.request.chat import MAX_MESSAGES, StreamOptions
from server.request.large_bodies import LARGE
from server.request.messages import ChatMessage
from server.request.parsing import parse
from worlds.request_bodies import COMPLETION, ENDPOINTS, STRICT, TEXT, TOOLS, called, function
from worlds.scripted_engine import BOS, ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import fault, post, serve

Row = tuple[dict[str, Any], str]

USER = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}
MALFORMED: dict[str, list[Any]] = {
    "n": [0, True, "2", 129],
    "temperature": [2.1, "hot", float("nan")],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5],
    "min_p": [-0.1],
    "top_n_sigma": [-1, 101, "2"],
    "presence_penalty": [3],
    "frequency_penalty": [float("inf")],
    "repetition_penalty": [0],
    "seed": [-2, 1.5, 2**63],
    "min_tokens": [-1, 65],
    "max_tokens": [0, -2, 10**40],
    "stop": [5, [""], ["a"] * 17, ["a" * 513]],
    "stop_token_ids": [[270], ["a"]],
    "logit_bias": [{"x": 1}, {"270": 1}, {"5": 1, "05": 2}],
    "bad_words": [[""]],
    "ignore_eos": [1],
    "priority": [2**31],
    "cache_salt": [""],
    "metadata": [
        {"a": 1},
        {"a" * 65: "b"},
        {"a": "b" * 513},
        dict.fromkeys(map(str, range(17)), ""),
    ],
    "logprob_token_ids": [[], [270], [-1], [5] * 129, [5]],
    "stream": ["true"],
    "stream_options": [{}],
    "speculative": [4],
}
PROMPTS = ["", [], [[]], ["a", 1], [["a"]], [1.5], [True], [-1], [270], [[1], "a"], None, {}]
COMPLETIONS: list[Row] = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [270]}, "allowed_token_ids"),
    ({"n": 5}, "n"),
    ({"prompt": ["a", "b", "c"], "n": 2}, "prompt"),
    *(
        ({"stream": True, "stream_options": {name: True}}, f"stream_options.{name}")
        for name in [*StreamOptions.unsupported, "unknown"]
    ),
]
TEXT_PART = {"type": "text", "text": "a"}
MESSAGES: list[Row] = [
    ({"role": "user"}, "content"),
    ({"role": "tool", "content": "x"}, "tool_call_id"),
    ({"role": "tool", "tool_call_id": "2", "content": "x"}, "tool_call_id"),
    ({"role": "function", "content": "x"}, "role"),
    ({"role": "user", "content": 5}, "content"),
    ({"role": "user", "content": []}, "content"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "content.0"),
    ({"role": "user", "content": [TEXT_PART, {"type": "input_audio"}]}, "content.1"),
    ({"role": "user", "content": [{"type": "colour"}]}, "content.0.type"),
    ({"role": "user", "content": [{"type": "text"}]}, "content.0.text"),
    ({"role": "assistant", "reasoning": "x", "reasoning_content": "y"}, "reasoning"),
    *(({**USER, name: "y"}, name) for name in ["colour", *ChatMessage.unsupported]),
]


def answer(call: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": "x", **fields}


def predicted(**fields: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": "a", **fields}}


ALLOWED = "tool_choice.allowed_tools.tools"
UNKNOWN = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function()]}}
PARAMETERS = "tools.0.function.parameters"
UNUSABLE = {"type": "object", "properties": {"a": {"type": "colour"}}}
CHATS: list[Row] = [
    *(({"messages": [message]}, f"messages.0.{param}") for message, param in MESSAGES),
    ({"messages": []}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"echo": True}, "echo"),
    ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
    ({"continue_final_message": True}, "continue_final_message"),
    *(
        ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}")
        for name in ("messages", "tools", "bos_token")
    ),
    (predicted(type="text"), "prediction.type"),
    (predicted(content=""), "prediction.content"),
    (predicted(content="a" * 513), "prediction.content"),
    (predicted(x=1), "prediction.x"),
    ({**predicted(), "speculative": {"draft_strategy": "ngram"}}, "prediction"),
    ({"speculative": {"draft_strategy": "prediction"}}, "speculative.draft_strategy"),
    ({"tools": [function(name="a b")]}, "tools.0.function.name"),
    ({"tools": [function(), function()]}, "tools.1.function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [function(parameters={"type": "array"})]}, PARAMETERS),
    ({"tools": [function(parameters={"properties": 1})]}, PARAMETERS),
    ({"tools": [function(parameters={"required": "a"})]}, PARAMETERS),
    ({"tools": [function(parameters=UNUSABLE)], "tool_choice": "required"}, PARAMETERS),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": function()}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": TOOLS, "tool_choice": UNKNOWN}, f"{ALLOWED}.0.function.name"),
    ({"tools": STRICT, "ignore_eos": True}, "ignore_eos"),
    ({"messages": [called(), answer("2")]}, "messages.1.tool_call_id"),
    ({"messages": [called(), answer("1", name="g")]}, "messages.1.name"),
    ({"messages": [called() | {"role": "user"}]}, "messages.0.tool_calls"),
    ({"include_reasoning": False}, "include_reasoning"),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        "reasoning_effort",
    ),
]

TOOL: dict[str, Any] = {"type": "function", **TOOLS[0]["function"]}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "x"}}
GROUP = {"type": "namespace", "name": "g"}
TEXT_TOOL = {"type": "custom", "name": "t"}
LOOK = {"type": "grammar", "syntax": "regex", "definition": "(?=a"}
LOOKS, SYNTAX = "tools.1.tools.0.format.definition", "tools.0.format.syntax"
SEARCH = {"type": "web_search"}
MADE = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
SOME, ALLOWED_TOOLS = {"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"
RESPONSES: list[Row] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call", "id": "1"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input.0.colour"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": 7}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "colour"}]}]}, "input.0.content.0.type"),
    ({"input": [USER, USER | {"content": [{"type": "input_image"}]}]}, "input.1.content.0"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x" * 600}, "input"),
    ({"tools": [{"type": "guess"}]}, "tools.0.type"),
    ({"tools": "all"}, "tools"),
    ({"tools": [TOOL, {**GROUP, "tools": [{**TEXT_TOOL, "format": LOOK}]}]}, LOOKS),
    ({"tools": [TOOL, {**GROUP, "tools": [TOOL, TOOL]}]}, "tools.1.tools.1.name"),
    ({"tools": [{**TEXT_TOOL, "format": {"type": "text", "syntax": "lark"}}]}, SYNTAX),
    ({"tools": [TOOL, SEARCH], "tool_choice": SEARCH}, "tool_choice.type"),
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {**SOME, "tools": [SEARCH]}}, "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": {**SOME, "tools": [TEXT_TOOL]}}, f"{ALLOWED_TOOLS}.0.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": SCHEMA}}, "text.format.schema"),
    ({"text": {"verbosity": "least"}}, "text.verbosity"),
    ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    # What only the chat request that it comes to can tell.
    ({"tools": [TOOL, TOOL]}, "tools.1.name"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [USER] * MAX_ITEMS, "instructions": "y"}, "input"),
    ({"input": [MADE] * 129}, "input"),
]
TOKENS: list[Row] = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": [USER]}, "prompt"),
    ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
    ({"prompt": "a", "tools": []}, "tools"),
    ({"prompt": "a", "tools": TOOLS}, "tools"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
]


@pytest.mark.parametrize(
    ("path", "base", "rows"),
    [
        ("/completions", {"prompt": "ab"}, COMPLETIONS),
        ("/chat/completions", {"messages": [USER]}, CHATS),
        ("/responses", {"input": "hi"}, RESPONSES),
        ("http://test/tokenize", {}, TOKENS),
        ("http://test/detokenize", {}, [({}, "tokens"), ({"tokens": [270]}, "tokens")]),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_it(
    path: str, base: dict[str, Any], rows: list[Row], engine: ScriptedEngine
) -> None:
    async with serve(engine, max_choices=4) as client:
        for fields, param in rows:
            refused = await client.post(path, json=base | fields)
            assert fault(refused, "param") == (400, param), fields
    assert engine.requests == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_malformed_value_is_a_400_that_names_the_field(path: str) -> None:
    engine = ScriptedEngine(TEXT)
    async with serve(engine) as client:
        for name, values in MALFORMED.items():
            for value in values:
                # Python's JSON has numbers that are none.
                content = json.dumps(ENDPOINTS[path][1] | {name: value})
                refused = await client.post(path, content=content, headers=JSON)
                assert refused.status_code == 400, content
                error = refused.json()["error"]
                assert name in (error["param"] or error["message"]), content
    assert engine.requests == []


async def test_all_keys_of_a_bias_that_are_no_tokens_are_named(client: Any) -> None:
    bias = {"bad1": 1, "5": 2, "bad2": 3}
    for path in ("/completions", "/chat/completions"):
        refused = await client.post(path, json=ENDPOINTS[path][1] | {"logit_bias": bias})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "logit_bias.bad1")
        assert "'bad1', 'bad2'" in error["message"]
        beyond = await client.post(path, json=ENDPOINTS[path][1] | {"logit_bias": {"270": 1}})
        assert "270" in beyond.json()["error"]["message"]
    many = {f"bad{number}" + "x" * 500: 1 for number in range(1_000)}
    refused = await client.post("/completions", json=COMPLETION | {"logit_bias": many})
    assert "and 990 more" in refused.json()["error"]["message"]
    assert len(refused.text) < 2_000


async def test_a_malformed_prompt_is_a_400() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    async with serve(ScriptedEngine(), tokenizer) as client:
        for prompt in PROMPTS:
            refused = await client.post("/completions", json={"prompt": prompt})
            assert fault(refused, "param") == (400, "prompt"), prompt


async def test_an_empty_prompt_is_the_bos_token_where_there_is_one(engine: ScriptedEngine) -> None:
    assert (await post("/completions", {"prompt": ""}, engine)).status_code == 200
    assert engine.requests[0].prompt_token_ids == (BOS,)


async def test_several_errors_are_listed_and_long_input_is_not_echoed() -> None:
    body = {f"field_{number}": "x" * 10_000 for number in range(30)}
    refused = await post("/completions", body | {"prompt": "a"}, ScriptedEngine())
    message = refused.json()["error"]["message"]
    assert message.count("this server knows no such field") == 10
    assert message.endswith("and 20 more")
    assert "xxxx" not in message
    assert len(message) < 5000


@pytest.mark.parametrize(
    ("path", "field", "items"),
    [
        ("/chat/completions", "messages", [5] * (MAX_MESSAGES + 1)),
        ("/completions", "stop_token_ids", ["a"] * 129),
        ("/completions", "bad_words", [5] * 129),
        ("/completions", "stop", [5] * 17),
    ],
)
def test_too_many_items_are_one_finding(path: str, field: str, items: list[Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse(ENDPOINTS[path][0], json.dumps({"prompt": "a", field: items}).encode())
    assert refused.value.param == field
    assert "at most" in refused.value.message
    assert f"{field}.0" not in refused.value.message


async def test_a_prompt_too_long_is_not_looked_into(client: Any) -> None:
    for prompt, part in (
        ([-1] * 512, "512 tokens"),
        ([[-1]] * 129, "129 choices"),
        (["<|user|>" * 500] * 129, "129 choices"),
    ):
        reply = await client.post("/completions", json={"prompt": prompt})
        assert part in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "unserved", "reason"),
    [
        ("image_url", ("vision",), "this model's vision part is not served here"),
        ("image_url", (), "this model takes text only; it has no vision part"),
        ("input_audio", ("vision",), "only this model's text half is served here"),
        ("input_audio", (), "it has no audio part"),
        ("input_audio", ("vision", "audio"), "this model's audio part is not served here"),
        ("file", ("vision",), "files are not read here; send their text"),
    ],
)
async def test_a_part_that_is_no_text_is_refused_with_what_of_the_model_it_lacks(
    part: str, unserved: tuple[str, ...], reason: str
) -> None:
    """In small bodies and in those that other processes read: images are long."""
    engine = ScriptedEngine(info=engine_info(unserved=unserved))
    name = part if part.startswith("input_") else f"input_{part.removesuffix('_url')}"
    async with serve(engine, body_processes=1) as client:
        (card,) = (await client.get("/models")).json()["data"]
        assert (card["modalities"], card["unserved"]) == (["text"], list(unserved))
        chat, responses = (part, "/chat/completions", "messages"), (name, "/responses", "input")
        for kind, path, field in (chat, responses):
            for data in ("AA==", "A" * (LARGE + 1)):
                content = [{"type": kind, kind: {"url": f"data:image/png;base64,{data}"}}]
                body = {field: [USER, {"role": "user", "content": content}]}
                refused = await client.post(path, json=body)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (400, "unsupported_content")
                assert error["param"] == f"{field}.1.content.0"
                assert reason in error["message"]
                assert "base64" not in error["message"]
    assert engine.requests == []


async def test_an_output_of_a_call_is_no_image() -> None:
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}
    refused = await post("/responses", {"input": [output]}, ScriptedEngine())
    assert refused.json()["error"]["param"] == "input.0.output.0"
