"""Clients get answers that say so while the server ends."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import httpx
import pytest

from server.http.listener import bind
from worlds.live_server import HANG, live
from worlds.serving import endless, events, fault, until

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 400}


async def test_requests_that_outlast_the_drain_end_in_an_event_or_a_503() -> None:
    engine = endless()
    async with live(engine, drain_seconds=0.2) as found, httpx.AsyncClient(timeout=HANG) as client:
        engine.gate.clear()
        url = f"{found.url}/v1/completions"
        asked = [client.build_request("POST", url, json=BODY | {"stream": True})] * 4
        # With its head, a stream has begun.
        streams = await asyncio.gather(*(client.send(each, stream=True) for each in asked))
        wholes = [asyncio.ensure_future(client.post(url, json=BODY)) for _ in range(4)]
        await until(lambda: len(engine.open) == 8)
        signal.raise_signal(signal.SIGTERM)
        for reply in streams:
            assert reply.status_code == 200
            await reply.aread()
            *_, last, done = events(reply.text)
            assert done == "[DONE]"
            assert last["error"]["code"] == "shutting_down"
        for reply in await asyncio.gather(*wholes):
            assert fault(reply) == (503, "shutting_down")
            assert int(reply.headers["retry-after"]) >= 1
        await asyncio.wait_for(found.running, HANG)
        # All were told: that is an end in order, too.
        assert found.raised == []


async def test_connections_that_the_kernel_remembers_keep_no_successor_from_the_port() -> None:
    async with (
        live(endless()) as found,
        httpx.AsyncClient(base_url=found.url, timeout=HANG) as client,
    ):
        # The server closes first, and so its side waits for what may still be on its way.
        reply = await client.get("/health", headers={"connection": "close"})
        assert reply.headers["connection"] == "close"
        await until(lambda: not found.num_connections)
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(found.address)
    with bind(*found.address), pytest.raises(OSError, match="cannot listen"):
        # Nor does the successor share it with a third that starts at once.
        bind(*found.address)


async def test_the_port_answers_until_the_last_request_has_finished() -> None:
    engine = endless()
    async with live(engine, drain_seconds=60) as found, httpx.AsyncClient(timeout=HANG) as client:
        url = f"{found.url}/v1/completions"
        engine.gate.clear()
        open_ = asyncio.ensure_future(client.post(url, json=BODY))
        await until(lambda: len(engine.open) == 1)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: engine.stopping)
        for _ in range(3):
            # A client each: new connections are taken, too.
            async with httpx.AsyncClient(base_url=found.url, timeout=HANG) as other:
                assert (await other.get("/health")).status_code == 200
                ready = await other.get("/ready")
                assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
                assert "\nslipstream_draining 1.0\n" in (await other.get("/metrics")).text
                models = await other.get("/v1/models")
                for refused in (models, await other.post("/v1/completions", json=BODY)):
                    assert fault(refused) == (503, "shutting_down")
                    assert int(refused.headers["retry-after"]) >= 1
        assert not found.running.done()
        engine.gate.set()
        reply = await open_
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        await asyncio.wait_for(found.running, HANG)
        assert found.raised == []
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{found.url}/health")


async def test_a_second_signal_ends_at_once() -> None:
    engine = endless()
    async with live(engine, drain_seconds=3600) as found, httpx.AsyncClient(timeout=HANG) as client:
        engine.gate.clear()
        url = f"{found.url}/v1/completions"
        open_ = asyncio.ensure_future(client.post(url, json=BODY | {"stream": True}))
        await until(lambda: len(engine.open) == 1)
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: engine.stopping)
        assert not found.running.done()
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(found.running, HANG)
        assert found.raised == [signal.SIGTERM]
        with pytest.raises(httpx.TransportError):
            await open_
        await until(lambda: engine.open == set())


async def test_a_request_that_is_being_sent_is_refused_by_name() -> None:
    async with live(endless(), drain_seconds=0) as found:
        reading, writing = await asyncio.open_connection(*found.address)
        writing.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await until(lambda: found.num_connections == 1)
        await until(lambda: len(found.server.server_state.tasks) == 1)
        signal.raise_signal(signal.SIGTERM)
        reply = await asyncio.wait_for(reading.read(), HANG)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in reply
        writing.close()
