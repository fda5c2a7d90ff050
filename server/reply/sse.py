"""Server-sent events."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

DONE = b"data: [DONE]\n\n"


def event(content: Any, name: str | None = None) -> bytes:
    """JSON made here has no line breaks, so an event's data is one line."""
    data = b"data: %b\n\n" % to_json(content, inf_nan_mode="null")
    return data if name is None else b"event: %b\n%b" % (name.encode(), data)
