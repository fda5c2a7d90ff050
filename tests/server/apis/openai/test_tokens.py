"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from worlds.request_bodies import TOOLS
from worlds.scripted_engine import ASSISTANT, USER, ScriptedEngine, byte_tokenizer
from worlds.serving import post, serve

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
    client: Any, body: dict[str, Any], tokens: list[int]
) -> None:
    reply = await client.post("http://test/tokenize", json=body)
    told = {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
    assert reply.json() == told
    back = await client.post("http://test/detokenize", json={"tokens": tokens})
    if "prompt" in body and body["prompt"] is not None:
        assert back.json() == {"prompt": body["prompt"]}


async def test_a_large_body_is_read_elsewhere(client: Any) -> None:
    body = {"prompt": "a<|user|>" + "b" * 20_000, "return_token_strs": True}
    reply = (await client.post("http://test/tokenize", json=body)).json()
    assert client.app.state.models.only.bodies._pool is not None  # type: ignore[attr-defined]
    assert (reply["count"], reply["token_strs"][:3]) == (20_002, ["a", "<|user|>", "b"])


async def test_token_strs_are_the_vocabularys_own() -> None:
    """As in vLLM: bytes are spelt as the vocabulary spells them."""
    body = {"prompt": "a \u00e9", "return_token_strs": True}
    reply = (await post("http://test/tokenize", body, ScriptedEngine())).json()
    assert reply["token_strs"] == byte_tokenizer().convert_ids_to_tokens(reply["tokens"])
    assert reply["token_strs"][:2] == ["a", "\u0120"]


async def test_tools_that_a_template_has_no_place_for_change_no_tokens() -> None:
    tokenizer = byte_tokenizer("{{ messages[0].content }}")
    async with serve(ScriptedEngine(), tokenizer) as client:
        body = {"messages": MESSAGES, "tools": TOOLS}
        reply = (await client.post("http://test/tokenize", json=body)).json()
    assert bytes(reply["tokens"]).decode() == MESSAGES[0]["content"]


async def test_they_want_the_servers_key() -> None:
    async with serve(ScriptedEngine(), api_key="s3cret") as client:
        for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
            reply = await client.post(f"http://test/{path}", json=body)
            assert reply.status_code == 401
            headers = {"authorization": "Bearer s3cret"}
            reply = await client.post(f"http://test/{path}", json=body, headers=headers)
            assert reply.status_code == 200
