from __future__ import annotations

import pytest

from worlds.serving import Connect, serve


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def connect() -> Connect:
    """Serves an engine for a block's length; gives an HTTP client whose ``app`` is the server."""
    return serve
