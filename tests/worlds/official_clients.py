"""The official clients of OpenAI, Anthropic and Ollama, of a server around a given engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import ollama
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve


@asynccontextmanager
async def openai_client(
    engine: ScriptedEngine, tokenizer: Any = None, **settings: Any
) -> AsyncIterator[AsyncOpenAI]:
    async with serve(engine, tokenizer, **settings) as http:
        yield AsyncOpenAI(
            api_key="unused", base_url="http://test/v1", http_client=http, max_retries=0
        )


@asynccontextmanager
async def anthropic_client(
    engine: ScriptedEngine, tokenizer: Any = None, *, key: str = "unused", **settings: Any
) -> AsyncIterator[AsyncAnthropic]:
    """``key``: the one that it sends."""
    async with serve(engine, tokenizer, **settings) as client:
        app = client.app  # type: ignore[attr-defined]
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as own:
            yield AsyncAnthropic(
                api_key=key, base_url="http://test", http_client=own, max_retries=0
            )


@asynccontextmanager
async def ollama_client(
    engine: ScriptedEngine, tokenizer: Any = None, **settings: Any
) -> AsyncIterator[ollama.AsyncClient]:
    async with serve(engine, tokenizer, **settings) as http, ollama_of(http) as client:
        yield client


def ollama_of(http: httpx.AsyncClient) -> ollama.AsyncClient:
    """Ollama's client of the server that an HTTP client has."""
    transport = httpx.ASGITransport(app=http.app, raise_app_exceptions=False)  # type: ignore[attr-defined]
    return ollama.AsyncClient(host="http://test", transport=transport)
