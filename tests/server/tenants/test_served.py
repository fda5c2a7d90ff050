"""Tenants and deadlines from outside: over HTTP, in front of an engine that keeps the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.app import build_app
from server.request.large_bodies import LARGE
from server.settings import Settings
from worlds.gated_engine import Engine
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import as_json, fault, serve, until

FILE = """
tenants:
  - {name: few, key: k-few, requests_per_minute: 2}
  - {name: short, key: k-short, tokens_per_minute: 60, max_tokens: 5}
  - {name: two, key: k-two, max_concurrent_requests: 2}
  - {name: late, key: k-late, priority: 7}
  - {name: free, key: k-free}
  - {name: looks-up, key: k-looks-up, drafters: [prediction, nasd]}
  - {name: plain, key: k-plain, drafters: []}
  - {name: slow, key: k-slow, requests_per_minute: 1}
  - {name: one, key: k-one, adapters: [mine]}
  - {name: bare, key: k-bare, adapters: []}
"""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    return str(file)


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer k-{name}"}


async def ask(
    client: httpx.AsyncClient, name: str, prompt: Sequence[Any] = (1, 2, 3), **body: Any
) -> httpx.Response:
    body = {"prompt": list(prompt), "max_tokens": 4, **body}
    return await client.post("/completions", json=body, headers=by(name))


def refusal(reply: httpx.Response) -> tuple[int, str, int]:
    """Status, code and seconds to wait."""
    return *fault(reply), int(reply.headers.get("retry-after", 0))


async def test_only_keys_of_the_file_are_served(keys: str) -> None:
    async with serve(ScriptedEngine(), api_keys_file=keys) as client:
        assert (await ask(client, "free")).status_code == 200
        for headers in ({}, by("nobody"), {"Authorization": "k-free"}):
            reply = await client.post("/completions", json={"prompt": "a"}, headers=headers)
            assert reply.json()["error"]["code"] == "invalid_api_key"


async def test_terms_go_with_the_request_and_no_two_tenants_share_caches(keys: str) -> None:
    engine = ScriptedEngine()
    async with serve(engine, api_keys_file=keys) as client:
        for name, more in (
            ("late", {"priority": 2}),
            ("short", {"max_tokens": 9, "min_tokens": 8}),
            ("free", {}),
            ("free", {"cache_salt": "x"}),
            ("few", {"cache_salt": "x"}),
        ):
            assert (await ask(client, name, **more)).status_code == 200
    late, short, *rest = engine.requests
    assert (late.tenant.name, late.priority) == ("late", 9)
    assert (short.sampling.max_tokens, short.sampling.min_tokens) == (5, 5)
    assert short.tenant.tokens_per_minute == 60
    assert len({each.cache_salt for each in (late, *rest)}) == 4


@pytest.mark.parametrize(
    ("asked", "max_model_len", "reason"),
    [
        (400, 512, "max_tokens"),
        (-1, 512, "max_tokens"),
        (3, 512, "max_tokens"),
        (400, 14, "model_context_window_exceeded"),
    ],
)
async def test_a_text_that_its_terms_end_has_not_filled_the_context(
    keys: str, asked: int, max_model_len: int, reason: str
) -> None:
    engine = ScriptedEngine(info=engine_info(max_model_len=max_model_len))
    async with serve(engine, api_keys_file=keys) as client:
        body = {**CHAT, "max_tokens": asked}
        reply = (await client.post("/messages", json=body, headers=by("short"))).json()
    assert reply["stop_reason"] == reason
    assert reply["usage"]["output_tokens"] == engine.requests[0].sampling.max_tokens <= 5


async def test_limits_are_refusals_with_their_code_and_time(keys: str) -> None:
    async with serve(Engine(), api_keys_file=keys) as client:
        for _ in range(2):
            assert (await ask(client, "few")).status_code == 200
        status, code, seconds = refusal(await ask(client, "few"))
        assert (status, code) == (429, "rate_limited")
        assert 1 <= seconds <= 30
        before = time.monotonic()
        assert (await ask(client, "short", [1] * 40, max_tokens=50)).status_code == 200
        status, code, seconds = refusal(await ask(client, "short", [1] * 40))
        assert (status, code) == (429, "token_limit")
        assert 20 - (time.monotonic() - before) <= seconds <= 25
        # Others are not concerned.
        assert (await ask(client, "free", [1] * 40)).status_code == 200
        text = (await client.get("http://test/metrics")).text
    reason = 'slipstream_tenant_rejections_total{reason="%s",tenant="%s"} 1.0'
    assert reason % ("rate_limited", "few") in text
    assert reason % ("token_limit", "short") in text


async def test_choices_at_a_time(keys: str) -> None:
    engine = Engine(gated=True)
    async with serve(engine, api_keys_file=keys) as client:
        first = asyncio.ensure_future(ask(client, "two"))
        await until(lambda: engine.num_open == 1)
        # One of its choices is admitted, and given back when the other is not.
        assert refusal(await ask(client, "two", n=2))[:2] == (429, "too_many_concurrent")
        await until(lambda: engine.num_open == 1)
        second = asyncio.ensure_future(ask(client, "two"))
        await until(lambda: engine.num_open == 2)
        assert refusal(await ask(client, "two"))[:2] == (429, "too_many_concurrent")
        engine.runner.open_gate()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        assert (await ask(client, "two", n=2)).status_code == 200
    assert engine.num_held_blocks == 0


async def test_more_prompts_than_a_minute_has_are_no_matter_of_time(keys: str) -> None:
    """No time to wait would be enough, and every attempt would take what there is."""
    async with serve(Engine(), api_keys_file=keys) as client:
        refused = await ask(client, "few", prompt=[[1], [2], [3]])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert (await ask(client, "few", prompt=[[1], [2]], n=2)).status_code == 200


async def test_texts_beyond_the_choices_at_a_time_are_embedded_in_parts(keys: str) -> None:
    engine = ScriptedEngine(info=engine_info(embeddings="mean", hidden_size=2))
    async with serve(engine, api_keys_file=keys) as client:
        reply = await client.post("/embeddings", json=THREE, headers=by("two"))
    assert [each["index"] for each in reply.json()["data"]] == [0, 1, 2]


CHAT = {"messages": [{"role": "user", "content": "a"}]}
FIRST = {"priority": -1}
THREE = {"input": ["a", "b", "c"]}


@pytest.mark.parametrize("padding", [0, LARGE])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("v1/completions", {"prompt": "a", **FIRST}, "priority"),
        ("v1/completions", {"prompt": "a", "n": 3}, "n"),
        ("v1/completions", {"prompt": ["a", "b", "c"]}, "prompt"),
        ("v1/chat/completions", {**CHAT, **FIRST}, "priority"),
        ("v1/chat/completions", {**CHAT, "n": 3}, "n"),
        ("v1/embeddings", {"input": "a", **FIRST}, "priority"),
        ("v1/embeddings", THREE, "input"),
        ("v1/responses", {"input": "a", **FIRST}, "priority"),
        ("v1/messages", {**CHAT, "max_tokens": 4, **FIRST}, "priority"),
        ("api/chat", {**CHAT, "options": FIRST}, "options.priority"),
        ("api/generate", {"prompt": "a", "options": FIRST}, "options.priority"),
        ("api/generate", {"prompt": "a", "raw": True, "options": FIRST}, "options.priority"),
        ("api/embed", THREE, "input"),
    ],
)
async def test_terms_are_told_in_the_words_of_each_api(
    keys: str, path: str, body: dict[str, Any], field: str, padding: int
) -> None:
    """A large body is read elsewhere, on the same terms; more choices than may ever be are no matter
    of time."""
    engine = ScriptedEngine(info=engine_info(embeddings="mean", hidden_size=2))
    async with serve(engine, api_keys_file=keys) as client:
        name = "few" if body is THREE else "two"
        reply = await client.post(f"http://test/{path}", **as_json(body, padding, **by(name)))
    assert reply.status_code == 400
    error = reply.json()["error"]
    if path.startswith("v1"):
        assert error["param"] == field
        error = error["message"]
    at_fault = "with this API key it must be" if "priority" in field else "this API key may have 2"
    assert error.startswith(f"{field}: {at_fault}")


async def test_a_reply_that_is_late_is_a_504() -> None:
    engine = Engine()
    async with serve(engine, max_request_seconds=60) as client:
        reply = await ask(client, "", timeout=1e-6)
        assert reply.status_code == 504
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        assert (await ask(client, "", timeout=60)).status_code == 200
        assert fault(await ask(client, "", timeout=61), "param") == (400, "timeout")
        text = (await client.get("http://test/metrics")).text
        assert 'slipstream_requests_total{finish_reason="deadline"} 1.0' in text
        assert engine.num_held_blocks == 0


async def test_the_servers_time_is_every_requests(engine: ScriptedEngine) -> None:
    async with serve(engine, max_request_seconds=60) as client:
        await client.post("/completions", json={"prompt": "a"})
        await client.post("/completions", json={"prompt": "a", "timeout": 5})
    seconds = [round((each.deadline or 0) - each.arrival_time, 6) for each in engine.requests]
    assert seconds == [60, 5]


def test_a_drafter_that_is_not_loaded_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: [{name: a, key: k, drafters: [ngram, eagle3]}]")
    told = r"api-keys-file .*tenants\.0\.drafters\.1: there is no such drafter"
    with pytest.raises(ValueError, match=told):
        build_app(ScriptedEngine(), byte_tokenizer(), Settings(api_keys_file=str(file)))


async def test_a_tenant_gets_the_drafters_of_its_list_and_no_others(keys: str) -> None:
    engine = ScriptedEngine()
    speculative = {"num_speculative_tokens": 3, "adaptive_depth": "fixed"}
    async with serve(engine, api_keys_file=keys, speculative=speculative) as client:
        for name, asked in (
            ("free", {}),
            ("looks-up", {}),
            ("looks-up", {"draft_strategy": "nasd", "options": {"decay": 0.25}}),
            ("looks-up", {"draft_strategy": "none"}),
            ("plain", {}),
        ):
            assert (await ask(client, name, speculative=asked)).status_code == 200
        predicted = {"type": "content", "content": "hello"}
        assert (await ask(client, "looks-up", prediction=predicted)).status_code == 200
        drafters = [each.speculative.draft_strategy for each in engine.requests]
        assert drafters == ["ngram", "nasd", "nasd", "none", "none", "prediction"]
        for name, asked, known in (
            ("looks-up", "ngram", "none, nasd, prediction"),
            ("plain", "nasd", "none"),
        ):
            # A large body is read elsewhere, on the same terms.
            for padding in (0, LARGE):
                body = {"prompt": "a", "speculative": {"draft_strategy": asked}}
                refused = await client.post("/completions", **as_json(body, padding, **by(name)))
                assert fault(refused, "param") == (400, "speculative.draft_strategy")
                told = refused.json()["error"]["message"]
                assert told.endswith(f"must be one of: {known}")
        told = (await client.get("/drafters", headers=by("looks-up"))).json()
        assert [each["id"] for each in told["data"]] == ["none", "nasd", "prediction"]
        assert told["defaults"]["draft_strategy"] == "nasd"


async def test_a_tenant_sees_and_has_the_adapters_of_its_list_and_no_others(keys: str) -> None:
    admin = {"Authorization": "Bearer adm1n"}
    offered = {"free": ["mine", "theirs"], "one": ["mine"], "bare": []}
    async with serve(ScriptedEngine(), api_keys_file=keys, admin_key="adm1n") as client:
        for name in ("mine", "theirs"):
            body = {"name": name, "path": f"/adapters/{name}"}
            loaded = await client.post("http://test/admin/lora", json=body, headers=admin)
            assert loaded.is_success
        for tenant, names in offered.items():
            client.headers.update(by(tenant))
            base, *shown = [each["id"] for each in (await client.get("/models")).json()["data"]]
            assert shown == names
            for path in ("tags", "ps"):
                found = (await client.get(f"http://test/api/{path}")).json()["models"]
                assert [each["name"] for each in found][1:] == [f"{each}:latest" for each in names]
            for name in ("mine", "theirs"):
                status = 200 if name in names else 404
                chat = {"model": name, "messages": [{"role": "user", "content": "a"}]}
                for path, asked in (
                    ("/v1/completions", {"model": name, "prompt": "a"}),
                    ("/v1/chat/completions", chat),
                    ("/v1/messages", chat | {"max_tokens": 4}),
                    ("/v1/messages/count_tokens", chat),
                    ("/v1/responses", {"model": name, "input": "a"}),
                    ("/api/chat", chat),
                    ("/api/show", {"model": name}),
                    ("/tokenize", {"model": name, "prompt": "a"}),
                    ("/detokenize", {"model": name, "tokens": [97]}),
                ):
                    # A large body is read elsewhere, on the same terms.
                    for padding in (0, LARGE):
                        reply = await client.post(f"http://test{path}", **as_json(asked, padding))
                        assert reply.status_code == status, (tenant, path, reply.text)
                        others = reply.text.replace(f"'{name}'", "", 1)
                        assert status == 200 or "theirs" not in others
                loaded = await client.post("http://test/api/generate", json={"model": name})
                assert loaded.status_code == status
                assert (await client.get(f"/models/{name}")).status_code == status
            assert (await client.get(f"/models/{base}")).status_code == 200


async def test_tokens_of_texts_are_requests_too(keys: str) -> None:
    async with serve(Engine(), api_keys_file=keys) as client:

        async def tokens(path: str, name: str, **body: Any) -> httpx.Response:
            return await client.post(f"http://test/{path}", json=body, headers=by(name))

        assert (await tokens("tokenize", "few", prompt="a")).status_code == 200
        assert (await tokens("detokenize", "few", tokens=[1])).status_code == 200
        for refused in (
            await tokens("tokenize", "few", prompt="a"),
            await tokens("detokenize", "few", tokens=[1]),
            await ask(client, "few"),
        ):
            assert refusal(refused)[:2] == (429, "rate_limited")
        assert (await ask(client, "slow")).status_code == 200
        assert refusal(await tokens("tokenize", "slow", prompt="a"))[:2] == (429, "rate_limited")
        for _ in range(3):
            assert (await tokens("tokenize", "free", prompt="a")).status_code == 200
        text = (await client.get("http://test/metrics")).text
    assert 'slipstream_tenant_rejections_total{reason="rate_limited",tenant="few"} 3.0' in text
