"""Values of the wrong type, range or place are a 400 that names the field, and reach no engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.request.protocol import ChatMessage, StreamOptions
from worlds.request_bodies import COMPLETION, ENDPOINTS, TEXT
from worlds.scripted_engine import BOS, ScriptedEngine, byte_tokenizer
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

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
    "seed": [-1, 2**63],
    "min_tokens": [-1, 65],
    "max_tokens": [0, 513, 10**40],
    "stop": [5, [""], ["a"] * 17, ["a" * 513]],
    "stop_token_ids": [[270], ["a"]],
    "logit_bias": [{"x": 1}, {"270": 1}],
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
    "logprob_token_ids": [[], [270], [-1], [5] * 129],
    "stream": ["true"],
    "stream_options": [{}],
    "speculative": [4],
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in MALFORMED.items() for value in values]
)
async def test_a_malformed_value_is_a_400_that_names_the_field(
    connect: Connect, path: str, name: str, value: Any
) -> None:
    engine = ScriptedEngine(TEXT)
    async with connect(engine) as client:
        refused = await client.post(
            path,
            content=json.dumps(ENDPOINTS[path][1] | {name: value}),
            headers={"content-type": "application/json"},
        )
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert name in (error["param"] or error["message"])
    assert engine.requests == []


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", 1], [["a"]], [1.5], [True], [-1], [270], [[1], "a"], None, {}]
)
async def test_a_malformed_prompt_is_a_400(connect: Connect, prompt: Any) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    async with connect(ScriptedEngine(), tokenizer) as client:
        refused = await client.post("/completions", json={"prompt": prompt})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"


async def test_an_empty_prompt_is_the_bos_token_where_there_is_one(connect: Connect) -> None:
    engine = ScriptedEngine()
    async with connect(engine) as client:
        assert (await client.post("/completions", json={"prompt": ""})).status_code == 200
    assert engine.requests[0].prompt_token_ids == (BOS,)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.0.content"),
        ({"role": "tool", "content": "x"}, "messages.0.tool_call_id"),
        ({"role": "function", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content"),
        ({"role": "user", "content": "x", "colour": 1}, "messages.0.colour"),
        *(
            ({"role": "user", "content": "x", name: "y"}, f"messages.0.{name}")
            for name in ChatMessage.unsupported
        ),
    ],
)
async def test_a_malformed_message_is_a_400_that_names_its_place(
    connect: Connect, message: dict[str, Any], param: str
) -> None:
    async with connect(ScriptedEngine()) as client:
        refused = await client.post("/chat/completions", json={"messages": [message]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("name", [*StreamOptions.unsupported, "unknown"])
async def test_unsupported_stream_options_are_named(connect: Connect, name: str) -> None:
    body = COMPLETION | {"stream": True, "stream_options": {name: True}}
    async with connect(ScriptedEngine()) as client:
        refused = await client.post("/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"stream_options.{name}"


async def test_several_errors_are_listed_and_long_input_is_not_echoed(connect: Connect) -> None:
    body = {f"field_{number}": "x" * 10_000 for number in range(30)}
    async with connect(ScriptedEngine()) as client:
        refused = await client.post("/completions", json=body | {"prompt": "a"})
    message = refused.json()["error"]["message"]
    assert message.count("this server knows no such field") == 10
    assert message.endswith("and 20 more")
    assert "xxxx" not in message
    assert len(message) < 5000
