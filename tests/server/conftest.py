from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def client(engine: ScriptedEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server around that engine, with the default settings."""
    async with serve(engine) as found:
        yield found
