"""How long things are is looked at before what they are made of; and how long a body may be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.errors import ApiError
from server.request.large_bodies import default_body_bytes
from server.request.parsing import parse
from server.request.protocol import MAX_MESSAGES, ChatRequest, CompletionRequest
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import Connect

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("kind", "field", "items"),
    [
        (ChatRequest, "messages", [5] * (MAX_MESSAGES + 1)),
        (CompletionRequest, "stop_token_ids", ["a"] * 129),
        (CompletionRequest, "bad_words", [5] * 129),
        (CompletionRequest, "stop", [5] * 17),
    ],
)
def test_too_many_items_are_one_finding(kind: Any, field: str, items: list[Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse(kind, json.dumps({"prompt": "a", field: items}).encode())
    assert refused.value.param == field
    assert "at most" in refused.value.message
    assert f"{field}.0" not in refused.value.message


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([-1] * 512, "512 tokens"),
        ([[-1]] * 129, "129 choices"),
        (["<|user|>" * 500] * 129, "129 choices"),
    ],
)
async def test_a_prompt_too_long_is_not_looked_into(
    connect: Connect, prompt: Any, part: str
) -> None:
    async with connect(ScriptedEngine()) as client:
        reply = await client.post("/completions", json={"prompt": prompt})
    assert part in reply.json()["error"]["message"]


async def test_the_default_limit_follows_from_the_context(connect: Connect) -> None:
    long = engine_info(max_model_len=100_000)
    sizes = [default_body_bytes(each, byte_tokenizer()) for each in (512, 100_000)]
    assert sizes[1] - sizes[0] == 2 * (100_000 - 512) * len("<|assistant|>")
    content = b'{"prompt": "a"}' + b" " * sizes[0]
    headers = {"content-type": "application/json"}
    statuses = []
    for engine in (ScriptedEngine(), ScriptedEngine(info=long)):
        async with connect(engine, body_processes=0) as client:
            reply = await client.post("/completions", content=content, headers=headers)
            statuses.append(reply.status_code)
    assert statuses == [413, 200]
