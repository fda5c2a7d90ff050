"""The app behind the real HTTP server, on a free port of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI

from server.app import build_app
from server.settings import Settings
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import endless, until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def listening(engine: ScriptedEngine) -> AsyncIterator[str]:
    app = build_app(engine, byte_tokenizer(), Settings(drain_seconds=1))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    await until(lambda: server.started or running.done())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running


async def test_the_openai_client_streams_over_http() -> None:
    engine = ScriptedEngine("hello wörld")
    async with listening(engine) as url, AsyncOpenAI(api_key="x", base_url=f"{url}/v1") as client:
        stream = await client.chat.completions.create(
            model="test/scripted",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello wörld"
    assert chunks[-1].usage is not None
    assert engine.stopped_with == 1


async def test_chunks_arrive_while_the_request_runs() -> None:
    engine = endless()
    async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            engine.gate.clear()
            assert len(engine.open) == 1
            assert (await client.get("/health")).status_code == 200
            engine.gate.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_aborts_the_request(stream: bool) -> None:
    engine = endless()
    async with listening(engine) as url, httpx.AsyncClient(base_url=url) as client:
        engine.gate.clear()
        body = {"prompt": "x", "max_tokens": 400, "stream": stream}
        pending = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: len(engine.open) == 1)
        pending.cancel()
        await until(lambda: engine.open == set())
    assert len(engine.closed_early) == 1
