from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import APIRouter

from engine.request.errors import EngineError
from engine.request.info import QuantizationInfo
from server import apis
from server.app import build_app, guarded, routers
from server.plan import IGNORED_HEADER
from server.settings import Settings
from worlds.official_clients import openai_client
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import fault, serve


async def test_probes_follow_the_engine(engine: ScriptedEngine) -> None:
    async with serve(engine, drain_seconds=7) as client:
        assert (await client.get("http://test/health")).json() == {"status": "ok"}
        assert (await client.get("http://test/ready")).json() == {"status": "ready"}
        assert (await client.get("http://test/version")).json()["version"]
        engine.is_alive = False
        for probe in ("health", "ready"):
            assert (await client.get(f"http://test/{probe}")).status_code == 503
        assert engine.stopped_with is None
    assert engine.stopped_with == 7


LOCAL = ("plain", "named", "open")
HOSTS = {
    "evil.example": (),
    "127.0.0.1.evil.example:8000": (),
    "localhost.evil.example": (),
    ":8000": (),
    "localhost:8000:evil": (),
    "10.0.0.7:8000": ("open",),
    "[fe80::1]:8000": ("open",),
    "box.lan:8000": ("named",),
    "model.example": ("named",),
    "localhost": LOCAL,
    "LOCALHOST.:8000": LOCAL,
    "app.localhost": LOCAL,
    "127.0.0.9:1": LOCAL,
    "[::1]:8000": LOCAL,
}
SERVED_AS = {
    "plain": {},
    "named": {"host": "box.lan", "allowed_hosts": ["Model.example:8000"]},
    "open": {"host": "0.0.0.0", "allow_open": True},
    "any": {"allowed_hosts": ["*"]},
    "keyed": {"api_key": "k"},
}


@pytest.mark.parametrize("kind", SERVED_AS)
async def test_without_a_key_only_known_hosts_are_answered(kind: str) -> None:
    engine = ScriptedEngine("abc")
    async with serve(engine, **{"allowed_hosts": [], **SERVED_AS[kind]}) as client:
        client.headers["authorization"] = "Bearer k"
        for host, kinds in HOSTS.items():
            headers = {"host": host}
            is_answered = kind in kinds or kind in ("any", "keyed")
            for path in ("/completions", "/messages", "http://test/tokenize"):
                body = {"prompt": "a"} if path != "/messages" else {}
                reply = await client.post(path, json=body, headers=headers)
                assert (reply.status_code != 421) is is_answered, (host, path)
            if not is_answered:
                error = (await client.get("/models", headers=headers)).json()["error"]
                assert error["code"] == "host_not_allowed"
                assert "--allowed-hosts" in error["message"]
                for page in ("metrics", "docs", "playground", "admin/speculative", "v1/models"):
                    found = await client.get(f"http://test/{page}", headers=headers)
                    assert found.status_code == 421, page
            for probe in ("health", "ready"):
                assert (await client.get(f"http://test/{probe}", headers=headers)).is_success


async def test_models_are_listed_and_retrieved() -> None:
    async with openai_client(ScriptedEngine()) as client:
        listed = [model.id async for model in client.models.list()]
        assert listed == ["test/scripted"]
        assert (await client.models.retrieve("test/scripted")).owned_by == "slipstream"


SAID = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
APIS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
OLLAMAS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
BAD = {"temperature": 5, "top_p": "x" * 999, "top_k": True, "min_p": float("nan")}


@pytest.mark.parametrize(
    ("models", "settings", "sent", "stated"),
    [
        ({}, {}, {}, {}),
        (SAID, {}, {}, SAID),
        (SAID, {"generation_config": "none"}, {}, {}),
        ({"temperature": 0.0}, {}, {}, {"temperature": 0}),
        (BAD, {}, {}, {}),
        # The operator's go before the model's, and the request's before both.
        (SAID, {"sampling": {"top_k": 3}}, {}, SAID | {"top_k": 3}),
        (SAID, {}, {"temperature": 1.0, "top_p": 1.0}, SAID),
    ],
)
async def test_what_a_request_does_not_say_is_the_operators_the_models_or_the_apis(
    caplog: Any, models: Any, settings: Any, sent: Any, stated: Any
) -> None:
    engine = ScriptedEngine(info=engine_info(sampling_defaults=models))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **sent}
    async with serve(engine, **settings) as client:
        (card,) = (await client.get("/models")).json()["data"]
        await client.post("/completions", json={"prompt": "a", **sent})
        await client.post("/chat/completions", json=chat | {"min_p": None})
        await client.post("/messages", json=chat)
        response = (await client.post("/responses", json={"input": "hi", **sent})).json()
        for raw in (True, False):
            body = {"prompt": "a", "options": sent, "raw": raw}
            await client.post("http://test/api/generate", json=body)
    assert card["default_sampling_params"] == APIS | stated
    found = [{name: getattr(each.sampling, name) for name in APIS} for each in engine.requests]
    assert found == [APIS | stated | sent] * 4 + [APIS | OLLAMAS | stated | sent] * 2
    for name in ("temperature", "top_p"):
        assert response[name] == found[0][name]
    warnings = [text for text in caplog.messages if "is left out" in text]
    assert len(warnings) == len(BAD) * (models is BAD)
    assert all(len(each) < 200 for each in warnings)


async def test_a_served_name_replaces_the_models() -> None:
    local = ScriptedEngine(info=engine_info(model="/some/where/tiny"))
    async with serve(local) as client:  # of a folder its name is shown only
        assert (await client.get("/models")).json()["data"][0]["id"] == "tiny"
    async with serve(ScriptedEngine(), served_model_name="mine") as client:
        reply = await client.post("/completions", json={"model": "mine", "prompt": "a"})
        assert reply.json()["model"] == "mine"
        old = await client.post("/completions", json={"model": "test/scripted", "prompt": "a"})
        assert fault(old) == (404, "model_not_found")


async def test_the_card_and_the_fingerprint_tell_8_bits_from_16() -> None:
    sizes = (7, 600, 1000, 1400)
    in_8_bits = QuantizationInfo("int8", "start", 8, 8, {"8 bits": 600}, *sizes, head=False)
    keeping_inputs = replace(in_8_bits, activation_bits=16)
    cards, fingerprints = [], set()
    for quantization in (None, in_8_bits, keeping_inputs):
        info = engine_info(quantization=quantization)
        async with serve(ScriptedEngine(info=info)) as client:
            cards.append((await client.get("/models")).json()["data"][0]["quantization"])
            reply = await client.post("/completions", json={"model": info.model, "prompt": "a"})
            fingerprints.add(reply.json()["system_fingerprint"])
    assert cards[0] is None
    assert (cards[1]["bits"], cards[1]["num_quantized"]) == (8, 600)
    assert len(fingerprints) == 3


async def test_wrong_paths_methods_and_bodies_have_the_error_shape(client: Any) -> None:
    for method, path, status, code in (
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/models/gpt-4", 404, "model_not_found"),
        ("GET", "/completions", 405, "method_not_allowed"),
        ("DELETE", "/chat/completions", 405, "method_not_allowed"),
    ):
        reply = await client.request(method, path)
        assert fault(reply) == (status, code)
    # tests/server/request/test_parsing.py has all the ways to be no JSON object.
    for kind, content in (("text/plain", b'{"prompt": "a"}'), ("application/json", b"\xff\xfe")):
        reply = await client.post("/completions", content=content, headers={"content-type": kind})
        assert fault(reply, "type") == (400, "invalid_request_error")


async def test_a_body_over_the_limit_is_a_413() -> None:
    async with serve(ScriptedEngine(), max_body_bytes=2000) as client:
        assert (await client.post("/completions", json={"prompt": "a"})).status_code == 200
        declared = await client.post("/completions", json={"prompt": "a" * 3000})

        async def undeclared() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"a" * 1000

        headers = {"content-type": "application/json"}
        chunked = await client.post("/completions", content=undeclared(), headers=headers)
        figures = (await client.get("http://test/metrics")).text
    assert 'slipstream_rejections_total{reason="body_too_large"} 2.0' in figures
    for reply in (declared, chunked):
        assert fault(reply) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("allowed", "origin", "told"),
    [
        (None, "https://a.example", None),
        (["https://a.example", "https://b.example"], "https://a.example", "https://a.example"),
        (["https://a.example"], "https://a.example.evil", None),
        (["*"], "null", "*"),
    ],
)
async def test_pages_of_other_origins_may_read_what_the_operator_lets_them(
    allowed: Any, origin: str, told: str | None
) -> None:
    engine, body = ScriptedEngine(), {"prompt": "a", "store": True}
    asked = {"origin": origin, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
    sent = {"origin": origin, "authorization": "Bearer s3cret"}
    settings = {"api_key": "s3cret", "max_body_bytes": 2000, "cors_origins": allowed}
    async with serve(engine, **settings) as client:
        preflight = await client.options("/completions", headers=asked)
        replies = [
            await client.post("/completions", json=each, headers=sent)
            for each in (body, body | {"stream": True}, {}, {"prompt": "a" * 3000})
        ]
        replies.append(await client.get("/models", headers={"origin": origin}))
        for error in (EngineError("broken"), RuntimeError("unexpected")):
            engine.break_after, engine.error = 0, error  # type: ignore[assignment]
            replies.append(await client.post("/completions", json=body, headers=sent))
    assert [each.status_code for each in replies] == [200, 200, 400, 413, 401, 500, 500]
    for reply in replies:
        assert reply.headers.get("access-control-allow-origin") == told
        exposed = reply.headers.get("access-control-expose-headers", "").split(", ")
        assert not told or {"x-request-id", IGNORED_HEADER} <= set(exposed)
        assert reply.headers["x-request-id"]
    assert (preflight.status_code == 200) == (told is not None)
    allows = preflight.headers.get("access-control-allow-headers")
    assert not told or allows == asked["access-control-request-headers"]


async def test_an_api_key_guards_v1_only() -> None:
    async with serve(ScriptedEngine(), api_key="s3cret") as client:
        no_ascii = ("schlüssel".encode(), "s3creté".encode("latin-1"), bytes([255, 254]), b"")
        wrong = [b"s3cret", *(b"Bearer " + key for key in (b"wrong", *no_ascii))]
        for headers in ({}, *({b"authorization": each} for each in wrong)):
            reply = await client.get("/models", headers=headers)
            assert fault(reply) == (401, "invalid_api_key")
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
        told = (await client.get("http://test/metrics")).text
        # Each that was refused above, and a page that is not there is no refusal.
        assert (await client.get("http://test/admin/models")).status_code == 404
        assert f'slipstream_rejections_total{{reason="invalid_api_key"}} {len(wrong) + 3}.0' in told
        assert 'reason="not_found"' not in told


async def test_an_api_key_guards_every_api_wherever_its_paths_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = APIRouter()
    own.add_api_route("/own/{name}", lambda name: name, methods=["POST"])
    of_apis = [*routers(apis), own]
    monkeypatch.setattr(
        "server.app.routers", lambda package: of_apis if package is apis else routers(package)
    )
    async with serve(ScriptedEngine(), api_key="s3cret") as client:
        for path in ("own/a", "tokenize", "detokenize", "api/tags"):
            refused = await client.post(f"http://test/{path}", json={})
            assert refused.status_code == 401
        good = await client.post("http://test/own/a", headers={"x-api-key": "s3cret"})
        assert good.json() == "a"


def test_the_paths_of_apis_that_want_the_key_are_these() -> None:
    first_segments = {f"/{path.split('/')[1]}" for path in guarded(routers(apis))}
    assert first_segments == {"/v1", "/api", "/tokenize", "/detokenize"}


def test_a_path_that_begins_with_a_parameter_is_refused_at_start() -> None:
    own = APIRouter()
    own.add_api_route("/{model}/generate", lambda model: model)
    with pytest.raises(ValueError, match=r"path /\{model\}/generate of an API has to begin"):
        guarded([own])


@pytest.mark.parametrize("path", ["/v1/models", "/admin/speculative", "/health"])
async def test_two_keys_are_a_400_wherever_the_right_one_stands(path: str) -> None:
    right, wrong = (b"authorization", b"Bearer s3cret"), (b"Authorization", b"Bearer wrong")
    async with serve(ScriptedEngine(), api_key="s3cret", admin_key="s3cret") as client:
        for headers in ([right, wrong], [wrong, right], [right, right]):
            reply = await client.get(f"http://test{path}", headers=headers)
            assert fault(reply) == (400, "invalid_http")
            assert "Authorization" in reply.json()["error"]["message"]


async def test_answers_carry_a_request_id(client: Any) -> None:
    own = await client.get("/models", headers={"x-request-id": "abc-1"})
    drawn = [(await client.get("/models")).headers["x-request-id"] for _ in range(2)]
    unsound = await client.get("/models", headers={"x-request-id": "a b\tc"})
    refused = await client.post("/completions", json={})
    assert own.headers["x-request-id"] == own.headers["request-id"] == "abc-1"
    assert len(set(drawn)) == 2
    assert unsound.headers["x-request-id"] != "a b\tc"
    assert refused.headers["x-request-id"]


async def test_two_apps_in_one_process_do_not_mix() -> None:
    first, second = ScriptedEngine("one"), ScriptedEngine("two")
    async with serve(first) as one, serve(second, served_model_name="other") as two:
        reply = await one.post("/completions", json={"prompt": "a"})
        assert reply.json()["choices"][0]["text"] == "one"
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


async def test_a_hung_step_is_seen_by_probes(engine: ScriptedEngine) -> None:
    async with serve(engine, step_timeout=30) as client:
        for seconds, status in ((29.0, 200), (31.0, 503), (0.0, 200)):
            engine.stalled_seconds = seconds
            for path in ("health", "ready"):
                reply = await client.get(f"http://test/{path}")
                assert reply.status_code == status
            said = (await client.get("http://test/health")).json()["status"]
            assert said == ("ok" if status == 200 else "hung")
