from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server around a scripted engine, with the default settings."""
    async with serve(ScriptedEngine()) as found:
        yield found
