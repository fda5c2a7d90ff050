from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from worlds.live_server import Live, RawConnection, live
from worlds.scripted_engine import ScriptedEngine


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The loop that serves: what its transports do with half-closed and unread connections is its own."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def found() -> AsyncIterator[Live]:
    """A server that writes "ab", with the default settings."""
    async with live(ScriptedEngine("ab")) as served:
        yield served


@pytest.fixture
async def raw(found: Live) -> AsyncIterator[RawConnection]:
    async with RawConnection(found) as connection:
        yield connection
