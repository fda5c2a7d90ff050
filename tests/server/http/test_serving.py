"""The application behind the HTTP server that ``slipstream serve`` runs."""

from __future__ import annotations

import httpx
import pytest
from openai import AsyncOpenAI

from worlds.live_server import live
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import endless

pytestmark = pytest.mark.anyio
BODY = {"prompt": "x", "max_tokens": 400}


async def test_the_openai_client_streams_over_http() -> None:
    engine = ScriptedEngine("hello wörld")
    async with (
        live(engine) as found,
        AsyncOpenAI(api_key="x", base_url=f"{found.url}/v1") as client,
    ):
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
    async with (
        live(engine) as found,
        httpx.AsyncClient(base_url=found.url) as client,
        client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as reply,
    ):
        assert (await anext(reply.aiter_lines())).startswith("data: {")
        engine.gate.clear()
        assert len(engine.open) == 1
        assert (await client.get("/health")).status_code == 200
        engine.gate.set()
