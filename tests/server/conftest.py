from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, byte_tokenizer

from server.app import build_app
from server.settings import Settings

Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def serve(
    engine: ScriptedEngine, tokenizer: Any = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(engine, tokenizer or byte_tokenizer(), Settings(**settings))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
            client.app = app  # type: ignore[attr-defined]
            yield client


@pytest.fixture
def connect() -> Connect:
    """Serves an engine for a block's length; gives an HTTP client whose ``app`` is the server."""
    return serve
