"""``/v1/embeddings``, and Ollama's endpoints for the same, by the official clients."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError

from server.request.large_bodies import LARGE
from worlds.official_clients import ollama_of, openai_client
from worlds.scripted_engine import USER, ScriptedEngine, engine_info
from worlds.serving import fault, post, serve


def embedding_engine(**changes: Any) -> ScriptedEngine:
    return ScriptedEngine(info=engine_info(**{"embeddings": "mean", "hidden_size": 2} | changes))


async def test_the_openai_client_gets_vectors() -> None:
    engine = embedding_engine()
    async with openai_client(engine) as client:
        reply = await client.embeddings.create(
            model="test/scripted", input=["ab", "cde"], dimensions=2, user="me"
        )
        (one,) = (await client.embeddings.create(model="test/scripted", input="x")).data
        ids = await client.embeddings.create(
            model="test/scripted", input=[[1, 2], [3]], encoding_format="float"
        )
    assert [each.embedding for each in reply.data] == [[0.5, ord("a")], [0.5, ord("c")]]
    assert [each.index for each in reply.data] == [0, 1]
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (5, 5)
    assert one.embedding == [0.5, ord("x")]
    assert [each.embedding for each in ids.data] == [[0.5, 1], [0.5, 3]]
    assert {each.pooling for each in engine.requests} == {"mean"}
    assert {each.speculative.draft_strategy for each in engine.requests} == {"none"}


async def test_as_many_texts_as_openai_takes_go_through_a_shorter_queue() -> None:
    for capacity in 64, 5:
        engine = embedding_engine(max_num_open=capacity)
        engine.capacity = capacity
        async with serve(engine) as http:
            for path, name in (("/embeddings", "data"), ("http://test/api/embed", "embeddings")):
                reply = await http.post(path, json={"input": ["a"] * 2048})
                assert len(reply.json()[name]) == 2048
            await http.post("http://test/api/embed", json={"input": "a" * 600, "truncate": True})
        assert len(engine.requests[-1].prompt_token_ids) == 511


async def test_numbers_come_as_text_or_as_bytes() -> None:
    """The official client asks for the latter by itself, where it can."""
    async with serve(embedding_engine()) as http:
        body = {"input": "a"}
        (plain,) = (await http.post("/embeddings", json=body)).json()["data"]
        body["encoding_format"] = "base64"
        (packed,) = (await http.post("/embeddings", json=body)).json()["data"]
    assert plain == {"object": "embedding", "index": 0, "embedding": [0.5, 97.0]}
    assert packed["embedding"] == "AAAAPwAAwkI="


async def test_texts_that_spell_special_tokens_are_text() -> None:
    engine = embedding_engine()
    async with serve(engine) as http:
        await http.post("/embeddings", json={"input": "<|user|>"})
        await http.post("/embeddings", json={"input": [USER]})
    assert engine.requests[0].prompt_token_ids == tuple(b"<|user|>")
    assert engine.requests[1].prompt_token_ids == (USER,)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"input": "a" * (LARGE + 1)}, "input"),
        ({"input": [270]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "colour": 1}, "colour"),
        ({}, "input"),
    ],
)
async def test_what_cannot_be_embedded_is_a_400_that_names_the_field(
    body: dict[str, Any], param: str
) -> None:
    engine = embedding_engine()
    reply = await post("/embeddings", body, engine, body_processes=0)
    assert fault(reply, "param") == (400, param)
    assert not engine.requests


async def test_a_server_without_embeddings_says_how_to_have_them() -> None:
    engine = ScriptedEngine()
    async with openai_client(engine) as client:
        with pytest.raises(BadRequestError, match="--embeddings"):
            await client.embeddings.create(model="test/scripted", input="a")
    reply = await post("http://test/api/embed", {"input": "a"}, engine)
    assert reply.status_code == 400
    assert "--embeddings" in reply.json()["error"]
    assert not engine.requests


async def test_the_ollama_client_gets_vectors() -> None:
    async with serve(embedding_engine()) as http, ollama_of(http) as client:
        several = await client.embed("test/scripted", ["ab", "cde"])
        one = await client.embed("test/scripted:latest", "x", dimensions=2)
        old = await client.embeddings("test/scripted", "y")
        capabilities = (await client.show("test/scripted")).capabilities
        asked = {"input": "a", "keep_alive": "1h", "options": {"num_ctx": 3, "temperature": 1}}
        hinted = await http.post("http://test/api/embed", json=asked)
    assert capabilities == ["completion", "tools", "embedding"]
    assert several.embeddings == [[0.5, ord("a")], [0.5, ord("c")]]
    assert several.prompt_eval_count == 5
    assert several.total_duration == 120_000_000
    assert one.embeddings == [[0.5, ord("x")]]
    assert old.embedding == [0.5, ord("y")]
    told = set(hinted.headers["x-slipstream-ignored"].split(", "))
    assert told == {"options.num_ctx", "options.temperature", "keep_alive"}


async def test_what_ollamas_endpoints_refuse_is_named() -> None:
    async with serve(embedding_engine()) as http:
        for path, body, named in (
            ("embed", {"input": "a" * 600}, "input"),
            ("embed", {"input": [1]}, "input"),
            ("embed", {"input": "a", "dimensions": 3}, "dimensions"),
            ("embeddings", {"prompt": "a" * 600}, "prompt"),
        ):
            reply = await http.post(f"http://test/api/{path}", json=body)
            assert reply.status_code == 400, reply.text
            assert named in reply.json()["error"]
        missing = await http.post("http://test/api/embed", json={"input": "a", "model": "other"})
        assert missing.status_code == 404


async def test_an_embedding_counts_as_a_request_without_a_token() -> None:
    async with serve(embedding_engine()) as http:
        await http.post("/embeddings", json={"input": ["a", "b"]})
        figures = (await http.get("http://test/metrics")).text
        card = (await http.get("/models")).json()["data"][0]
    assert 'slipstream_requests_total{finish_reason="stop"} 2.0' in figures
    assert (card["embeddings"], card["hidden_size"]) == ("mean", 2)
