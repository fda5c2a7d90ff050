"""Anthropic's own client of a server around a given engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from anthropic import AsyncAnthropic

from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve


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
