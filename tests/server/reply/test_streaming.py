"""How replies end other than well: clients that leave, engines that break, queues that are full."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import server.reply.streaming
from engine.request.errors import EngineDeadError, RequestError, RequestFailedError
from worlds.scripted_engine import AsgiCall, ScriptedEngine
from worlds.serving import endless, events, fault, post, serve, until

ENDLESS = {"prompt": "x", "max_tokens": 400}


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_aborts_its_choices(n: int) -> None:
    engine = endless()
    async with serve(engine) as client:
        body = ENDLESS | {"stream": True, "n": n}
        async with AsgiCall(client.app, "/v1/completions", body) as call:
            start = await call.messages.get()
            await call.messages.get()
            engine.gate.clear()
            await call.hang_up()
            assert engine.open == set()
        metrics = (await client.get("http://test/metrics")).text
    assert start["status"] == 200
    assert len(engine.closed_early) == n
    assert f'slipstream_requests_total{{finish_reason="abort"}} {n}.0' in metrics


@pytest.mark.parametrize(("stream", "n"), [(False, 1), (False, 3), (True, 1)])
async def test_leaving_before_the_first_token_aborts_all_choices(stream: bool, n: int) -> None:
    engine = endless()
    engine.gate.clear()
    body = ENDLESS | {"stream": stream, "n": n}
    async with serve(engine) as client, AsgiCall(client.app, "/v1/completions", body) as call:
        await until(lambda: len(engine.open) == n)
        await call.hang_up()
        assert engine.open == set()
        if not stream:
            assert (await call.messages.get())["status"] == 499
    assert len(engine.closed_early) == n


async def test_a_stream_starts_even_if_no_token_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue must not look like a dead server: the head is sent, then comments."""
    monkeypatch.setattr(server.reply.streaming, "ADMISSION_SECONDS", 0.01)
    monkeypatch.setattr(server.reply.streaming, "KEEPALIVE_SECONDS", 0.01)
    engine = ScriptedEngine("abc")
    engine.gate.clear()
    async with serve(engine) as client:
        body = {"prompt": "x", "stream": True}
        async with AsgiCall(client.app, "/v1/completions", body) as call:
            assert (await call.messages.get())["status"] == 200
            assert (await call.messages.get())["body"] == b": ping\n\n"
            engine.gate.set()
            text = b""
            while (message := await call.messages.get())["more_body"]:
                text += message["body"]
    chunks = events(text.replace(b": ping\n\n", b"").decode())
    assert "".join(each["choices"][0]["text"] for each in chunks[:-1]) == "abc"


@pytest.mark.parametrize("path", ["/completions", "http://test/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_with_retry_after(path: str, stream: bool) -> None:
    engine = ScriptedEngine()
    engine.capacity = 0
    async with serve(engine) as client:
        refused = await client.post(path, json={"prompt": "x", "stream": stream})
        metrics = (await client.get("http://test/metrics")).text
    assert refused.status_code == 429
    # The engine said 2.5 s; the header holds whole seconds.
    assert refused.headers["retry-after"] == "3"
    error = refused.json()["error"]
    assert "queue" in error if "api" in path else error["type"] == "rate_limit_error"
    assert 'slipstream_rejections_total{reason="queue_full"} 1.0' in metrics
    assert 'slipstream_requests_total{finish_reason="rejected"} 1.0' in metrics


async def test_choices_beyond_the_queue_take_the_others_with_them() -> None:
    engine = endless()
    engine.capacity = 2
    engine.gate.clear()
    assert (await post("/completions", ENDLESS | {"n": 3}, engine)).status_code == 429
    assert engine.open == set()


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (EngineDeadError("boom at 0x1234"), 503, "engine_dead", None),
        (RequestFailedError("boom at 0x1234"), 500, "request_failed", None),
        (RequestError("top_k", "boom"), 400, "invalid_value", "top_k"),
    ],
)
async def test_an_engine_error_before_the_first_token_has_its_status(
    error: Any, status: int, code: str, param: str | None, engine: ScriptedEngine, client: Any
) -> None:
    engine.break_after, engine.error = 0, error
    for stream in (False, True):
        reply = await client.post("/completions", json={"prompt": "x", "stream": stream})
        assert (*fault(reply), reply.json()["error"]["param"]) == (status, code, param)
        assert "0x1234" not in reply.text
    assert engine.open == set()


async def test_an_unexpected_error_tells_nothing() -> None:
    def broken(_: Any) -> list[int]:
        raise ZeroDivisionError("secret detail")

    reply = await post("/completions", {"prompt": "x"}, ScriptedEngine(script=broken))
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "Internal server error."
    assert "secret" not in reply.text


async def test_a_slow_reader_holds_up_its_own_choice_only() -> None:
    """A choice waits until its delta is sent, so an unread stream stops asking the engine for more."""
    engine = endless()
    async with serve(engine) as client:
        blocked = asyncio.Event()

        async def send(_: Any) -> None:
            await blocked.wait()

        call = AsgiCall(client.app, "/v1/completions", ENDLESS | {"stream": True})
        call.messages.put = send  # type: ignore[method-assign]
        async with call:
            await until(lambda: engine.num_events >= 1)
            whole = await client.post("/completions", json={"prompt": "y", "max_tokens": 300})
            assert whole.status_code == 200
            assert engine.num_events < 300 + 50
