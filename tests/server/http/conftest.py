from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The loop that serves: what its transports do with half-closed and unread connections is its own."""
    return "asyncio", {"use_uvloop": True}
