"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from worlds.scripted_engine import ASSISTANT, USER, ScriptedEngine
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi</s>"}]
PROMPT = [USER, *b"user: hi</s>\n"]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "a<|user|>"}, [97, USER]),
        ({"prompt": "a<|user|>", "allow_special_tokens": False}, [97, *b"<|user|>"]),
        ({"prompt": ""}, []),
        ({"prompt": "x" * 5000, "model": "test/scripted"}, [120] * 5000),
        ({"messages": MESSAGES}, [*PROMPT, ASSISTANT]),
        ({"messages": MESSAGES, "add_generation_prompt": False}, PROMPT),
        ({"messages": MESSAGES, "prompt": None, "model": None}, [*PROMPT, ASSISTANT]),
    ],
)
async def test_tokens_are_counted_and_told(
    connect: Connect, body: dict[str, Any], tokens: list[int]
) -> None:
    async with connect(ScriptedEngine()) as client:
        reply = await client.post("http://test/tokenize", json=body)
        told = {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
        assert reply.json() == told
        back = await client.post("http://test/detokenize", json={"tokens": tokens})
    if "prompt" in body and body["prompt"] is not None:
        assert back.json() == {"prompt": body["prompt"]}


async def test_messages_have_the_tokens_of_a_chat(connect: Connect) -> None:
    engine = ScriptedEngine()
    body = {"messages": MESSAGES, "chat_template_kwargs": {"shout": True}}
    async with connect(engine) as client:
        tokens = (await client.post("http://test/tokenize", json=body)).json()["tokens"]
        await client.post("/chat/completions", json=body)
    assert tokens == list(engine.requests[0].prompt_token_ids)


async def test_the_texts_of_tokens_come_if_asked_for(connect: Connect) -> None:
    body = {"prompt": "a<|user|>", "return_token_strs": True}
    async with connect(ScriptedEngine()) as client:
        reply = await client.post("http://test/tokenize", json=body)
    assert reply.json()["token_strs"] == ["a", "<|user|>"]


async def test_a_large_body_is_read_elsewhere(connect: Connect) -> None:
    async with connect(ScriptedEngine()) as client:
        reply = await client.post("http://test/tokenize", json={"prompt": "ab" * 20_000})
        assert reply.json()["count"] == 40_000
        assert client.app.state.services.bodies._pool is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("tokenize", {"messages": []}, 400, "messages"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [270]}, 400, "tokens"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("detokenize", {"tokens": ["a"]}, 400, "tokens.0"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    connect: Connect, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    async with connect(ScriptedEngine()) as client:
        refused = await client.post(f"http://test/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


async def test_they_want_the_servers_key(connect: Connect) -> None:
    async with connect(ScriptedEngine(), api_key="s3cret") as client:
        for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
            reply = await client.post(f"http://test/{path}", json=body)
            assert reply.status_code == 401
            headers = {"authorization": "Bearer s3cret"}
            reply = await client.post(f"http://test/{path}", json=body, headers=headers)
            assert reply.status_code == 200
