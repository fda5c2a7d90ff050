"""``bench.replicas``: what it sends, and what it makes of the answers."""

from __future__ import annotations

import asyncio

import pytest

from bench.replicas import Asked, ask_all, mixed_requests
from drafters.registry import build_drafters
from worlds.client_servers import ScriptedEngine, slipstream

pytestmark = pytest.mark.slow


def test_the_mix_is_a_mix_and_the_same_again() -> None:
    found = mixed_requests(100)
    assert found == mixed_requests(100)
    bodies = [each.body for each in found]
    assert len({body["seed"] for body in bodies}) == 100
    assert {each.path for each in found} == {"/v1/completions", "/v1/chat/completions"}
    for part in ("response_format", "stop"):
        assert 5 < sum(part in body for body in bodies) < 50
    assert 30 < sum(body["stream"] for body in bodies) < 70
    assert {body.get("n", 1) for body in bodies} == {1, 3}
    assert {body["temperature"] for body in bodies} == {0, 0.7, 1.0}
    drafters = {body["speculative"]["draft_strategy"] for body in bodies}
    assert drafters == {*build_drafters(), "small_model", "medusa"} - {"grammar"}


def test_answers_are_read_whole_streamed_and_refused() -> None:
    body = {"model": "scripted", "prompt": "x", "max_tokens": 20}
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": True}
    requests = [
        Asked("/v1/completions", {**body, "n": 2}),
        Asked("/v1/completions", {**body, "n": 2, "stream": True}),
        Asked("/v1/chat/completions", chat),
        Asked("/v1/completions", {**body, "stream": True, "max_tokens": 0.5}),
    ]
    engine = ScriptedEngine("hello world")
    with slipstream(engine, served_model_name="scripted") as url:
        whole, stream, talk, refused = asyncio.run(ask_all(url, requests, 2))
    assert whole.texts == stream.texts == ("hello world", "hello world")
    assert talk.texts == ("hello world",)
    assert whole.usage["completion_tokens"] == stream.usage["completion_tokens"]
    assert (whole.error, stream.error, talk.error) == (None, None, None)
    assert (refused.texts, refused.error) == ((), "invalid_value")
    gone = asyncio.run(ask_all(url, requests[:1], 1))
    assert gone[0].error == "ConnectError"
