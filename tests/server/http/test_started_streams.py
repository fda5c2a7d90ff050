"""Errors after the status has been sent: an event of the endpoint's own, in an answer that ends whole."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from engine.request.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    RequestFailedError,
)
from server.apis.ollama.reply import OllamaWriter
from server.apis.openai.reply import ChunkWriter
from server.apis.responses.reply import ResponsesWriter
from worlds.live_server import Live, RawConnection, live, post
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import until

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
WRITERS = dict.fromkeys(REQUESTS, ChunkWriter) | {"/v1/responses": ResponsesWriter}
SECRET = "secret detail"


async def answer_of(found: Live, path: str, version: str = "1.1") -> bytes:
    request = post(path, REQUESTS[path] | {"stream": True}, "connection: close")
    async with RawConnection(found) as client:
        await client.send(request.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))
        return await client.read_to_end()


def told_last(answer: bytes) -> tuple[str | None, dict[str, Any]]:
    """Name and data of the last event but [DONE], of a stream that ended in order."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.") == 1
    if b"transfer-encoding: chunked" in head:
        text, number = b"", 1
        while number:
            size, _, rest = rest.partition(b"\r\n")
            number = int(size, 16)
            text, rest = text + rest[:number], rest[number + 2 :]
    else:
        text, rest = rest, b""
    assert rest == b""
    assert b"Traceback" not in text
    assert SECRET.encode() not in text
    blocks = text.decode().removesuffix("\n\n").split("\n\n")
    if blocks[-1] == "data: [DONE]":
        blocks.pop()
    *named, data = blocks[-1].split("\n")
    name = named[0].removeprefix("event: ") if named else None
    return name, json.loads(data.removeprefix("data: "))


def assert_told(path: str, answer: bytes, code: str | None) -> None:
    name, data = told_last(answer)
    if path == "/v1/responses":
        assert (name, data["type"]) == ("response.failed", "response.failed")
        assert data["response"]["status"] == "failed"
        assert data["response"]["error"]["code"] == "server_error"
    else:
        assert name is None
        assert data["error"]["code"] == code
        assert data["error"]["message"]
        assert answer.rstrip(b"\r\n0").endswith(b"data: [DONE]")


def broken(*_: Any) -> bytes:
    raise ZeroDivisionError(SECRET)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestFailedError(SECRET), "request_failed"),
        (EngineDeadError(SECRET), "engine_dead"),
        (DeadlineExceededError(2), "deadline_exceeded"),
    ],
)
async def test_what_breaks_in_the_engine_is_told(
    path: str, error: EngineError, code: str, version: str
) -> None:
    engine = ScriptedEngine("hello world", group_sizes=(2,))
    engine.break_after, engine.error = 2, error
    async with live(engine) as found:
        assert_told(path, await answer_of(found, path, version), code)
    assert engine.open == set()


@pytest.mark.parametrize("method", ["events", "finish", "begin"])
@pytest.mark.parametrize("path", REQUESTS)
async def test_what_breaks_in_the_server_is_told(
    monkeypatch: pytest.MonkeyPatch, path: str, method: str
) -> None:
    monkeypatch.setattr(WRITERS[path], method, broken)
    engine = ScriptedEngine("hello world")
    async with live(engine) as found:
        assert_told(path, await answer_of(found, path), "internal_error")
    assert engine.open == set()


@pytest.mark.parametrize("path", REQUESTS)
async def test_where_the_error_cannot_be_told_in_its_form_it_is_told_in_another(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(WRITERS[path], "failure", broken)
    engine = ScriptedEngine("hello world", group_sizes=(2,))
    engine.break_after, engine.error = 2, RequestFailedError(SECRET)
    async with live(engine) as found:
        _, data = told_last(await answer_of(found, path))
    assert data["error"]["code"] == "request_failed"


@pytest.mark.parametrize("breaks", [False, True])
async def test_in_lines_of_json_the_error_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """Also where the writer of that line breaks."""
    if breaks:
        monkeypatch.setattr(OllamaWriter, "failure", broken)
    engine = ScriptedEngine("hello world", group_sizes=(2,))
    engine.break_after, engine.error = 2, RequestFailedError(SECRET)
    body = {"messages": [{"role": "user", "content": "x"}]}
    async with live(engine) as found, RawConnection(found) as client:
        await client.post("/api/chat", body, "connection: close")
        answer = await client.read_to_end()
    lines = [line for line in answer.split(b"\r\n") if line.startswith(b"{")]
    pieces = [json.loads(each) for line in lines for each in line.splitlines()]
    assert pieces[0]["message"]["content"]
    assert set(pieces[-1]) == {"error"}
    assert SECRET not in pieces[-1]["error"]


@pytest.mark.parametrize("path", REQUESTS)
async def test_what_the_drain_cuts_off_is_told(path: str) -> None:
    engine = ScriptedEngine(script=lambda _: [97] * 400, group_sizes=(1,))
    async with live(engine, drain_seconds=0) as found, RawConnection(found) as client:
        await client.post(path, REQUESTS[path] | {"stream": True}, "connection: close")
        head = await client.read()
        engine.gate.clear()
        await until(lambda: engine.open)
        signal.raise_signal(signal.SIGTERM)
        answer = head + await client.read_to_end()
    assert_told(path, answer, "shutting_down")
