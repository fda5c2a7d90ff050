from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engine.request.info import QuantizationInfo
from server.app import build_app
from server.settings import Settings
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import Connect, openai_client

pytestmark = pytest.mark.anyio


async def test_probes_follow_the_engine(connect: Connect) -> None:
    engine = ScriptedEngine()
    async with connect(engine, drain_seconds=7) as client:
        assert (await client.get("http://test/health")).json() == {"status": "ok"}
        assert (await client.get("http://test/ready")).json() == {"status": "ready"}
        assert (await client.get("http://test/version")).json()["version"]
        assert engine.stopped_with is None
    assert engine.stopped_with == 7


async def test_models_are_listed_and_retrieved(connect: Connect) -> None:
    async with openai_client(connect, ScriptedEngine()) as client:
        listed = [model.id async for model in client.models.list()]
        assert listed == ["test/scripted"]
        assert (await client.models.retrieve("test/scripted")).owned_by == "slipstream"


async def test_a_served_name_replaces_the_models(connect: Connect) -> None:
    local = ScriptedEngine(info=engine_info(model="/some/where/tiny"))
    async with connect(local) as client:  # of a folder its name is shown only
        assert (await client.get("/models")).json()["data"][0]["id"] == "tiny"
    async with connect(ScriptedEngine(), served_model_name="mine") as client:
        reply = await client.post("/completions", json={"model": "mine", "prompt": "a"})
        assert reply.json()["model"] == "mine"
        old = await client.post("/completions", json={"model": "test/scripted", "prompt": "a"})
        assert old.status_code == 404


async def test_the_card_and_the_fingerprint_tell_8_bits_from_16(connect: Connect) -> None:
    in_8_bits = QuantizationInfo(
        "int8", "start", 8, 8, {"8 bits": 600}, 7, 600, 1000, 1400, head=False
    )
    keeping_inputs = replace(in_8_bits, activation_bits=16)
    cards, fingerprints = [], set()
    for quantization in (None, in_8_bits, keeping_inputs):
        info = engine_info(quantization=quantization)
        async with connect(ScriptedEngine(info=info)) as client:
            cards.append((await client.get("/models")).json()["data"][0]["quantization"])
            reply = await client.post("/completions", json={"model": info.model, "prompt": "a"})
            fingerprints.add(reply.json()["system_fingerprint"])
    assert cards[0] is None
    assert cards[1]["bits"] == 8
    assert cards[1]["num_quantized"] == 600
    assert len(fingerprints) == 3


async def test_drafters_are_listed_with_options_defaults_and_caps(connect: Connect) -> None:
    settings = {
        "speculative": {"num_speculative_tokens": 6},
        "speculative_caps": {"max_speculative_tokens": 12, "draft_strategies": ["ngram"]},
    }
    async with connect(ScriptedEngine(), **settings) as client:
        listed = (await client.get("/drafters")).json()
    assert [each["id"] for each in listed["data"]] == ["none", "ngram"]
    assert listed["data"][1]["options"] == [
        {
            "name": "max_match",
            "default": 4,
            "description": "longest match",
            "minimum": 1,
            "maximum": 16,
        }
    ]
    assert listed["data"][1]["drafts_trees"] is False
    assert listed["policies"] == ["fixed", "target_rate", "goodput"]
    assert listed["tree_strategies"] == ["none", "linear", "tree"]
    assert listed["defaults"]["draft_strategy"] == "ngram"
    assert listed["defaults"]["max_speculative_tokens"] == 6
    assert listed["caps"]["max_speculative_tokens"] == 12


async def test_wrong_paths_methods_and_bodies_have_the_error_shape(connect: Connect) -> None:
    headers = {"content-type": "application/json"}
    async with connect(ScriptedEngine()) as client:
        for method, path, status, code in (
            ("GET", "/nowhere", 404, "not_found"),
            ("GET", "/models/gpt-4", 404, "model_not_found"),
            ("GET", "/completions", 405, "method_not_allowed"),
            ("DELETE", "/chat/completions", 405, "method_not_allowed"),
        ):
            reply = await client.request(method, path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        text = {"content": '{"prompt": "a"}', "headers": {"content-type": "text/plain"}}
        no_objects = ("{", "[1]", '"text"', "", b"\xff\xfe")
        for body in (text, *({"content": each, "headers": headers} for each in no_objects)):
            reply = await client.post("/completions", **body)
            assert reply.status_code == 400, body
            assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_a_413(connect: Connect) -> None:
    async with connect(ScriptedEngine(), max_body_bytes=2000) as client:
        assert (await client.post("/completions", json={"prompt": "a"})).status_code == 200
        declared = await client.post("/completions", json={"prompt": "a" * 3000})

        async def undeclared() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"a" * 1000

        headers = {"content-type": "application/json"}
        chunked = await client.post("/completions", content=undeclared(), headers=headers)
    for reply in (declared, chunked):
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"


async def test_an_api_key_guards_v1_only(connect: Connect) -> None:
    async with connect(ScriptedEngine(), api_key="s3cret") as client:
        no_ascii = ("schlüssel".encode(), "s3creté".encode("latin-1"), bytes([255, 254]), b"")
        wrong = [b"s3cret", *(b"Bearer " + key for key in (b"wrong", *no_ascii))]
        for headers in ({}, *({b"authorization": each} for each in wrong)):
            reply = await client.get("/models", headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):
            good = await client.get("/models", headers={"authorization": f"{scheme} s3cret"})
            assert good.status_code == 200
        for headers, status in (
            ({"x-api-key": "s3cret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "unused", "authorization": "Bearer s3cret"}, 200),
            ({"x-api-key": "s3cret", "authorization": "Bearer wrong"}, 401),
        ):
            assert (await client.get("/models", headers=headers)).status_code == status
        for path in ("health", "ready", "version", "metrics"):
            assert (await client.get(f"http://test/{path}")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/admin/speculative", "/health"])
async def test_two_keys_are_a_400_wherever_the_right_one_stands(
    connect: Connect, path: str
) -> None:
    right, wrong = (b"authorization", b"Bearer s3cret"), (b"Authorization", b"Bearer wrong")
    async with connect(ScriptedEngine(), api_key="s3cret", admin_key="s3cret") as client:
        for headers in ([right, wrong], [wrong, right], [right, right]):
            reply = await client.get(f"http://test{path}", headers=headers)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "invalid_http"
            assert "Authorization" in reply.json()["error"]["message"]


async def test_answers_carry_a_request_id(connect: Connect) -> None:
    async with connect(ScriptedEngine()) as client:
        own = await client.get("/models", headers={"x-request-id": "abc-1"})
        drawn = [(await client.get("/models")).headers["x-request-id"] for _ in range(2)]
        unsound = await client.get("/models", headers={"x-request-id": "a b\tc"})
        refused = await client.post("/completions", json={})
    assert own.headers["x-request-id"] == own.headers["request-id"] == "abc-1"
    assert len(set(drawn)) == 2
    assert unsound.headers["x-request-id"] != "a b\tc"
    assert refused.headers["x-request-id"]


async def test_the_request_log_names_the_sender(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="slipstream.requests"):
        async with connect(ScriptedEngine("abc")) as client:
            body = {"prompt": "a", "user": "line\nbreak"}
            await client.post("/completions", json=body, headers={"x-request-id": "abc-1"})
    (line,) = [record.getMessage() for record in caplog.records]
    sender = "x-request-id=abc-1 user='line\\nbreak' safety_identifier=None prompt_cache_key=None"
    assert f"{sender} metadata={{}} prompt=1 completion=3 finish=stop" in line


async def test_two_apps_in_one_process_do_not_mix(connect: Connect) -> None:
    first, second = ScriptedEngine("one"), ScriptedEngine("two")
    async with connect(first) as one, connect(second, served_model_name="other") as two:
        assert (await one.post("/completions", json={"prompt": "a"})).json()["choices"][0][
            "text"
        ] == "one"
        assert (await two.get("/models")).json()["data"][0]["id"] == "other"
        line = 'slipstream_requests_total{finish_reason="stop"} 1.0'
        assert line in (await one.get("http://test/metrics")).text
        assert line not in (await two.get("http://test/metrics")).text
    assert second.requests == []


def test_defaults_that_the_engine_cannot_serve_stop_the_start() -> None:
    for speculative in (
        {"draft_strategy": "eagle3"},
        {"tree_strategy": "tree"},
        {"options": {"colour": 1}},
        {"max_speculative_tokens": 33},
    ):
        with pytest.raises(ValueError, match="speculative"):
            build_app(ScriptedEngine(), byte_tokenizer(), Settings(speculative=speculative))
    caps = {"draft_strategies": ["eagle3"]}
    with pytest.raises(ValueError, match="not loaded: eagle3"):
        build_app(ScriptedEngine(), byte_tokenizer(), Settings(speculative_caps=caps))


async def test_a_hung_step_is_seen_by_probes(connect: Connect) -> None:
    engine = ScriptedEngine()
    async with connect(engine, step_timeout=30) as client:
        for seconds, status in ((29.0, 200), (31.0, 503), (0.0, 200)):
            engine.stalled_seconds = seconds
            for path in ("health", "ready"):
                reply = await client.get(f"http://test/{path}")
                assert reply.status_code == status
            said = (await client.get("http://test/health")).json()["status"]
            assert said == ("ok" if status == 200 else "hung")
