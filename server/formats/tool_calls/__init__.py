"""Ways of writing tool calls, one file each: what has a ``FORMAT`` here is known by its name."""

from __future__ import annotations

from functools import cache

from server.formats.registry import formats_in
from server.formats.tool_calls.format import ToolCallFormat


@cache
def tool_call_formats() -> dict[str, ToolCallFormat]:
    """Returns all of them, by name."""
    return formats_in(__name__, __path__, ToolCallFormat)
