"""Clients who send too slowly, read too slowly, or say in two ways what they send."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

import server.http.protocol
from server.http.protocol import BoundedProtocol, HttpConfig, Patience
from worlds.live_server import HANG, Live, RawConnection, live
from worlds.scripted_engine import ScriptedEngine, engine_info
from worlds.serving import endless, until

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 400}
NUM_TOKENS = 4000
VERBOSE: dict[str, Any] = {"prompt": "x", "max_tokens": NUM_TOKENS, "stream": True, "logprobs": 5}
SOON = 0.2
IN_TIME = 1.5
"""Seconds in which a request has to come that is meant to: a busy machine stands still for a while."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
HALF = HEAD + b"content-length: 9\r\n\r\n{"


async def figure(found: Live, name: str) -> float:
    async with httpx.AsyncClient(timeout=HANG) as client:
        text = (await client.get(f"{found.url}/metrics")).text
    (line,) = (line for line in text.splitlines() if line.startswith(name + " "))
    return float(line.rsplit(" ", 1)[1])


@asynccontextmanager
async def held(
    engine: ScriptedEngine, body: dict[str, Any]
) -> AsyncIterator[tuple[Live, RawConnection]]:
    """A request is open, and its engine waits."""
    async with live(engine) as found, RawConnection(found) as client:
        engine.gate.clear()
        await client.post("/v1/completions", body)
        await until(lambda: len(engine.open) == 1)
        yield found, client


def verbose() -> ScriptedEngine:
    """Writes more than all buffers on the way hold, asked for log-probabilities as ``VERBOSE`` does."""
    info = engine_info(max_model_len=NUM_TOKENS + 10)
    return ScriptedEngine(script=lambda _: [97] * NUM_TOKENS, group_sizes=(50,), info=info)


async def test_readers_who_never_read_are_cut_off_and_aborted() -> None:
    engine = verbose()
    async with live(engine, write_timeout=SOON) as found:
        async with RawConnection(found, 4096) as one, RawConnection(found, 4096) as other:
            await one.post("/v1/completions", VERBOSE)
            await other.post("/v1/completions", VERBOSE)
            await until(lambda: len(engine.requests) == 2)
            await until(lambda: engine.open == set())
        assert len(engine.closed_early) == 2
        cut_off = 'slipstream_connections_cut_off_total{waiting_for="write"}'
        assert await figure(found, cut_off) == 2
        assert await figure(found, 'slipstream_requests_total{finish_reason="abort"}') == 2


async def test_who_reads_slowly_but_reads_gets_everything() -> None:
    engine = verbose()
    async with live(engine, write_timeout=HANG) as found:
        async with RawConnection(found, 4096) as client:
            await client.post("/v1/completions", VERBOSE, "connection: close")
            text = await client.read_to_end()
        assert text.count(b'"finish_reason":"length"') == 1
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert engine.closed_early == []


class Unread:
    """A transport that holds what the test says, and a loop that calls when the test says so."""

    def __init__(self) -> None:
        self.num_unread = 0
        self.aborted = False
        self.calls: list[Callable[[], None]] = []

    def get_extra_info(self, _: str) -> None:
        return None

    def set_write_buffer_limits(self, _: int) -> None:
        """All is unread."""

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def abort(self) -> None:
        self.aborted = True

    def call_later(self, _: float, call: Callable[[], None]) -> asyncio.Future[None]:
        self.calls.append(call)
        return asyncio.get_running_loop().create_future()


async def test_a_long_answer_may_take_several_times_as_long_as_it_is_being_read() -> None:
    heard: list[tuple[str, str]] = []
    config = HttpConfig(Any, Patience(write=60, count=lambda *told: heard.append(told)))
    protocol = BoundedProtocol(config, ServerState(), {})
    transport: Any = Unread()
    protocol._call_later = transport.call_later
    protocol.connection_made(transport)
    transport.num_unread = 1_000_000
    protocol.pause_writing()
    for _ in range(10):
        transport.num_unread -= 50_000
        transport.calls.pop()()
        assert not transport.aborted
    transport.num_unread -= 1000
    transport.calls.pop()()
    assert transport.aborted
    assert heard == [("connections_cut_off", "write")]
    assert transport.calls == []


@pytest.mark.parametrize("sent", [b"", b"P", HEAD, HALF])
async def test_a_request_that_does_not_come_whole_is_a_408(sent: bytes) -> None:
    async with live(endless(), read_timeout=IN_TIME) as found:
        async with RawConnection(found) as client:
            await client.send(sent)
            reply = await client.read_to_end()
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in reply
        assert b'"code":"request_timeout"' in reply
        assert re.search(rb"\r\nx-request-id: \w{32}\r\n", reply)
        assert await figure(found, 'slipstream_connections_cut_off_total{waiting_for="read"}') == 1
        assert await figure(found, 'slipstream_rejections_total{reason="request_timeout"}') == 1


async def test_a_408_has_the_shape_of_its_path() -> None:
    head = HALF.replace(b"/v1/completions HTTP/1.1", b"/v1/messages HTTP/1.1\r\nx-request-id: mine")
    async with live(endless(), read_timeout=IN_TIME) as found, RawConnection(found) as client:
        await client.send(head)
        reply = await client.read_to_end()
    body = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert (body["type"], body["error"]["code"]) == ("error", "request_timeout")
    assert body["request_id"] == "mine"
    assert b"\r\nx-request-id: mine\r\n" in reply


async def test_bytes_in_time_do_not_make_a_request_in_time() -> None:
    async with live(endless(), read_timeout=SOON) as found, RawConnection(found) as client:
        reading = asyncio.ensure_future(client.read_to_end())
        await client.send(HEAD)
        while not reading.done():
            await client.send(b"x: y\r\n")
            await asyncio.wait((reading,), timeout=SOON / 10)
        assert (await reading).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("is_behind", [False, True])
async def test_a_second_request_has_to_come_whole_too(is_behind: bool) -> None:
    first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    engine = ScriptedEngine("ab")
    async with live(engine, read_timeout=IN_TIME) as found, RawConnection(found) as client:
        replies = b""
        await client.send(first + HALF if is_behind else first)
        if not is_behind:
            replies = await client.read()
            await client.send(HALF)
        replies += await client.read_to_end()
    assert replies.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in replies


async def test_an_answer_may_take_longer_than_a_request() -> None:
    engine = endless()
    async with live(engine, read_timeout=IN_TIME, keep_alive_timeout=60) as found:
        engine.gate.clear()
        async with RawConnection(found) as client, RawConnection(found) as late:
            await client.post("/v1/completions", BODY)
            await until(lambda: len(engine.open) == 1)
            # Its end shows that the time is over.
            assert (await late.read_to_end()).startswith(b"HTTP/1.1 408 ")
            engine.gate.set()
            assert (await client.read()).startswith(b"HTTP/1.1 200 ")


async def test_connections_without_requests_end() -> None:
    async with live(ScriptedEngine("ab"), read_timeout=0, keep_alive_timeout=1) as found:
        async with RawConnection(found) as client:
            await client.post("/v1/completions", BODY)
            assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 ")
        await until(lambda: found.num_connections == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_sends_no_more_still_gets_the_whole_answer(stream: bool) -> None:
    engine = endless()
    async with held(engine, BODY | {"stream": stream}) as (_, client):
        client.send_no_more()
        # The first byte of its answer shows that the server has noticed.
        assert await client.read() == b"H"
        engine.gate.set()
        answer = b"H" + await client.read_to_end()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert (b"data: [DONE]" if stream else b'"finish_reason":"length"') in answer
    assert engine.closed_early == []


async def test_all_that_answers_begin_with_may_be_sent_ahead_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.http.protocol, "_FIRST_PAUSE_SECONDS", 0.0001)
    engine = endless()
    async with held(engine, BODY) as (found, client):
        client.send_no_more()
        begun = b""
        while len(begun) < len(b"HTTP/1.1 "):
            begun += await client.read()
        (connection,) = found.server.server_state.connections
        assert not connection._exchange.send_ahead()  # type: ignore[union-attr]
        engine.gate.set()
        answer = begun + await client.read_to_end()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"finish_reason":"length"' in answer


async def test_who_sends_no_more_from_the_first_on_gets_the_answer_too(raw: RawConnection) -> None:
    await raw.post("/v1/completions", BODY)
    raw.send_no_more()
    answer = await raw.read_to_end()
    assert b"HTTP/1.1 200 OK" in answer
    assert b"connection: close" in answer


async def test_requests_one_behind_the_other_are_answered_in_turn() -> None:
    engine = ScriptedEngine("ab")
    async with live(engine, read_timeout=HANG) as found, RawConnection(found) as client:
        await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        await client.post("/v1/completions", BODY, "connection: close")
        answers = await client.read_to_end()
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert b'"finish_reason":"stop"' in answers


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_for_good_is_noticed_before_anything_is_written(stream: bool) -> None:
    engine = endless()
    async with live(engine) as found:
        engine.gate.clear()
        async with RawConnection(found) as client:
            await client.post("/v1/completions", BODY | {"stream": stream})
            await until(lambda: len(engine.open) == 1)
        await until(lambda: engine.open == set())
    assert len(engine.closed_early) == 1


async def test_what_is_no_http_behind_a_request_does_not_get_into_its_answer() -> None:
    engine = endless()
    async with held(engine, BODY | {"stream": True}) as (_, client):
        head = await client.read()
        assert head.startswith(b"HTTP/1.1 200 ")
        await client.send(b"\x00\x01\x02\r\n\r\n")
        engine.gate.set()
        end = b"data: [DONE]\n\n\r\n0\r\n\r\n"
        answer, _, refusal = (await client.read_to_end()).partition(end)
    assert b"HTTP/1.1" not in answer
    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert engine.closed_early == []


async def test_chunks_arrive_while_the_request_runs() -> None:
    engine = endless()
    async with (
        live(engine) as found,
        httpx.AsyncClient(base_url=found.url, timeout=HANG) as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as reply,
    ):
        assert (await anext(reply.aiter_lines())).startswith("data: {")
        engine.gate.clear()
        assert len(engine.open) == 1
        assert (await client.get("/health")).status_code == 200
        engine.gate.set()
