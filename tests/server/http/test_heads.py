"""Heads, trailers and chunks over a socket: what is refused, when, and who notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from worlds.live_server import HANG, Live, RawConnection, live
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import endless, events, until

LIMIT = 64 << 10
MANY = 10 << 20
STREAM: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "stream": True}
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
IN_CHUNKS, THREE_BYTES = b"transfer-encoding: chunked\r\n", b"content-length: 3\r\n"
CHUNKED = POST + IN_CHUNKS + b"\r\n"
TWO_LENGTHS = (
    *(THREE_BYTES + IN_CHUNKS, IN_CHUNKS + THREE_BYTES),
    THREE_BYTES + b"content-length: 4\r\n",
)
KEYED = b"POST /v1/completions HTTP/1.1\r\nauthorization: Bearer secret\r\n"
ATTACKS = {
    "a header of 10 MB": (GET + b"a: ", b"x" * 1000, 431),
    "a URL without end": (b"GET /v1/models?", b"x" * 1000, 414),
    "10,000 headers": (GET, b"a: b\r\n" * 100, 431),
    "trailers without end": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: " + b"x" * 990 + b"\r\n", 431),
    "an extension without end": (CHUNKED + b"2;", b"x" * 1000, 431),
    "blank lines without end": (b"", b"\r\n" * 500, 431),
}


@asynccontextmanager
async def streaming(found: Live, engine: ScriptedEngine) -> AsyncIterator[None]:
    """A stream goes on for the block's length, and is whole in the end."""
    async with RawConnection(found) as client:
        engine.gate.clear()
        key = "authorization: Bearer secret"
        await client.post("/v1/completions", STREAM, "connection: close", key)
        await until(lambda: len(engine.open) == 1)
        yield
        engine.gate.set()
        text = await client.read_to_end()
    assert text.count(b'"finish_reason":"length"') == 1
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def send_until_refused(client: RawConnection, begin: bytes, more: bytes) -> tuple[bytes, int]:
    """The answer, and how many bytes were sent before it came."""
    reading = asyncio.ensure_future(client.read())
    await client.send(begin)
    num_sent = len(begin)
    while not reading.done() and num_sent < MANY:
        await client.send(more)
        num_sent += len(more)
        await asyncio.sleep(0)
    return await reading, num_sent


async def test_who_has_an_answer_gets_no_second_one_for_the_rest_of_the_request() -> None:
    engine = ScriptedEngine("ab")
    async with live(engine, api_key="secret") as found, RawConnection(found) as client:
        await client.send(CHUNKED)
        assert (await client.read()).startswith(b"HTTP/1.1 401 ")
        await client.send(b"2;" + b"x" * LIMIT)
        assert await client.read() == b""


@pytest.mark.parametrize("length", [10 << 30, 200 << 10])
async def test_of_a_refused_body_no_more_than_a_megabyte_is_read(length: int) -> None:
    head = CHUNKED.replace(b"transfer-encoding: chunked", b"content-length: %d" % length)
    engine = ScriptedEngine("ab")
    async with live(engine, api_key="secret") as found, RawConnection(found) as client:
        reply, _ = await send_until_refused(client, head, b"x")
        assert reply.startswith(b"HTTP/1.1 401 ")
        num_sent = 0
        with suppress(ConnectionError):
            while num_sent < min(length, MANY) - LIMIT:
                await client.send(b"x" * LIMIT)
                num_sent += LIMIT
        if length > MANY:
            await until(lambda: found.num_connections == 0)
        else:
            assert found.num_connections == 1


async def test_heads_without_end_are_refused_and_a_stream_beside_them_is_whole() -> None:
    engine = endless()
    async with live(engine, api_key="secret") as found, streaming(found, engine):

        async def attack(name: str) -> None:
            begin, more, status = ATTACKS[name]
            # Only with a key does a request get as far as the body.
            begin = begin.replace(CHUNKED, KEYED + CHUNKED.partition(b"\r\n")[2])
            async with RawConnection(found) as client:
                reply, num_sent = await send_until_refused(client, begin, more)
                assert reply.startswith(b"HTTP/1.1 %d " % status), name
                # What was under way between the two is no more than their buffers.
                assert num_sent < MANY
                assert b"connection: close" in reply
                assert await client.read() == b""

        await asyncio.gather(*map(attack, ATTACKS))
        await until(lambda: found.num_connections == 1)
    assert len(engine.requests) == 1


async def test_no_more_than_the_limit_is_kept_whatever_comes_at_once(
    found: Live, raw: RawConnection
) -> None:
    """Bytes are counted before they are parsed: what comes in one go is not kept whole either."""
    await raw.send(GET + b"a: ")
    await until(lambda: found.num_connections == 1)
    (connection,) = found.server.server_state.connections
    await until(lambda: not connection._framing.is_between)  # type: ignore[union-attr]
    kept = 0
    plain = connection._feed  # type: ignore[union-attr]

    def feed(piece: memoryview) -> bool:
        nonlocal kept
        kept += len(piece)
        return plain(piece)

    connection._feed = feed  # type: ignore[union-attr]
    await raw.send(b"x" * (1 << 20))
    assert (await raw.read()).startswith(b"HTTP/1.1 431 ")
    assert kept + len(GET + b"a: ") == LIMIT


async def test_a_refusal_is_read_by_who_still_sends(raw: RawConnection) -> None:
    await raw.send(GET + b"a: " + b"x" * (LIMIT + 100_000) + b"\r\n\r\n")
    reply = await raw.read_to_end()
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in reply
    assert b'"type":"invalid_request_error"' in reply


@pytest.mark.parametrize("is_large", [False, True])
async def test_the_limits_are_settings(is_large: bool) -> None:
    limits = {"max_header_bytes": 2000, "max_headers": 5}
    async with live(ScriptedEngine("ab"), **limits) as found, RawConnection(found) as client:
        more = b"a: " + b"x" * 2000 + b"\r\n" if is_large else b"a: b\r\n" * 4
        await client.send(GET + b"a: b\r\n" * 4 + b"\r\n" + GET + more + b"a: b\r\n\r\n")
        replies = await client.read_to_end()
    assert replies.startswith(b"HTTP/1.1 200 ")
    assert replies.count(b"HTTP/1.1 431 ") == 1
    assert (b"2,000 bytes" if is_large else b"5.") in replies


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_head_that_comes_byte_by_byte_is_a_head(raw: RawConnection, is_alone: bool) -> None:
    """Also behind another request on the same connection."""
    if not is_alone:
        await raw.send(GET + b"\r\n")
        assert (await raw.read()).startswith(b"HTTP/1.1 200 ")
    for byte in GET + b"connection: close\r\n\r\n":
        await raw.send(bytes([byte]))
    replies = await raw.read_to_end()
    assert replies.startswith(b"HTTP/1.1 200 ")
    assert replies.count(b"HTTP/1.1 ") == 1


async def test_bodies_of_any_framing_do_not_count() -> None:
    body = b'{"prompt": "hi"}' + b" \n\r\n" * 20_000
    pieces = [body[at : at + 3] for at in range(0, len(body), 3)]
    engine = ScriptedEngine("ab")
    async with live(engine) as found, RawConnection(found) as client:
        head = CHUNKED.replace(b"transfer-encoding: chunked", b"content-length: %d" % len(body))
        await client.send(head + body)
        for parts in (pieces, [body]):
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in parts)
            await client.send(CHUNKED + chunks + b"0\r\na: b\r\n\r\n")
        await client.send(GET + b"connection: close\r\n\r\n")
        replies = await client.read_to_end()
    assert replies.count(b"HTTP/1.1 200 OK") == 4
    assert [each.prompt_token_ids for each in engine.requests] == [tuple(b"hi")] * 3


async def test_trailers_are_no_headers() -> None:
    """Nothing that the application reads comes behind the body."""
    engine = ScriptedEngine("ab")
    async with live(engine, api_key="secret") as found, RawConnection(found) as client:
        await client.send(CHUNKED + b"3\r\n{}\n\r\n0\r\nauthorization: Bearer secret\r\n\r\n")
        assert (await client.read()).startswith(b"HTTP/1.1 401 ")
    assert engine.requests == []


async def test_a_flood_of_requests_waits_unparsed() -> None:
    """Behind a request that is being answered nothing is made of what comes."""
    engine = endless()
    async with live(engine) as found, RawConnection(found) as client:
        engine.gate.clear()
        await client.post("/v1/completions", STREAM)
        await until(lambda: len(engine.open) == 1)
        (connection,) = found.server.server_state.connections
        sending = asyncio.ensure_future(client.send((GET + b"\r\n") * 20_000))
        await until(lambda: connection.flow.read_paused)
        assert len(connection.pipeline) == 0
        assert len(connection._unparsed) <= 1 << 20  # type: ignore[union-attr]
        engine.gate.set()
        text = b""
        while b"data: [DONE]" not in text:
            text += await client.read()
        sending.cancel()
        await asyncio.wait((sending,))


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"has to have a Host header"),
        (GET + b"host: y\r\n\r\n", b"more than one Host header"),
        (b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n", b"speaks HTTP/1.1 and HTTP/1.0"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
            b"content-length: 44\r\n\r\n" + GET + b"\r\n",
            b"cannot ask for an Upgrade",
        ),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n a: folded\r\n\r\n", b"Invalid HTTP request"),
        *(
            (POST + lengths + b"\r\n0\r\n\r\n" + GET + b"\r\n", b"Invalid HTTP")
            for lengths in TWO_LENGTHS
        ),
    ],
)
async def test_heads_that_say_too_little_or_too_much_are_a_400(
    raw: RawConnection, head: bytes, says: bytes
) -> None:
    await raw.send(head)
    reply = await raw.read_to_end()
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1 400 ") == 1
    assert b"HTTP/1.1 200 " not in reply
    assert b"connection: close" in reply
    assert says in reply
    assert b'"code":"invalid_http"' in reply


async def test_who_asks_for_another_protocol_is_answered_in_this_one(raw: RawConnection) -> None:
    await raw.send(GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n" + GET)
    await raw.send(b"connection: close\r\n\r\n")
    replies = await raw.read_to_end()
    assert replies.count(b"HTTP/1.1 200 OK") == 2


async def test_http_1_0_needs_no_host_and_gets_streams_without_chunks() -> None:
    async with live(endless()) as found, RawConnection(found) as client:
        body = b'{"prompt": "x", "max_tokens": 3, "stream": true}'
        await client.send(
            b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
            b"connection: keep-alive\r\nexpect: 100-continue\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        head, _, text = (await client.read_to_end()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    *chunks, done = events(text.decode())
    assert "".join(each["choices"][0]["text"] for each in chunks) == "aaa"
    assert done == "[DONE]"


@pytest.mark.parametrize("path", [b"/health", b"/nothing"])
async def test_http_1_0_gets_whole_answers_with_their_length(
    raw: RawConnection, path: bytes
) -> None:
    await raw.send(b"GET %b HTTP/1.0\r\n\r\n" % path)
    head, _, body = (await raw.read_to_end()).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"


@pytest.mark.parametrize("asks", [False, True])
async def test_only_who_asks_for_leave_is_told_to_continue(raw: RawConnection, asks: bool) -> None:
    body = b'{"prompt": "hi"}'
    expect = b"expect: 100-continue\r\n" if asks else b""
    await raw.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"%bconnection: close\r\ncontent-length: %d\r\n\r\n" % (expect, len(body))
    )
    if asks:
        assert await raw.read() == b"HTTP/1.1 100 Continue\r\n\r\n"
    await raw.send(body)
    reply = await raw.read_to_end()
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert reply.count(b"HTTP/1.1") == 1


async def test_who_stops_in_the_middle_of_a_request_has_left() -> None:
    engine = ScriptedEngine("ab")
    async with live(engine, read_timeout=HANG) as found, RawConnection(found) as client:
        await client.send(CHUNKED + b"5\r\n{")
        await until(lambda: len(found.server.server_state.tasks) == 1)
        client.send_no_more()
        assert await client.read_to_end() == b""
        await until(lambda: not found.server.server_state.tasks)
