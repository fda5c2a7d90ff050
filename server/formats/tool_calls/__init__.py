"""Ways of writing tool calls, one file each: what has a ``FORMAT`` here is known by its name."""

from __future__ import annotations

from functools import cache

from server.formats.format import ToolCallFormat, formats_in


@cache
def tool_call_formats() -> dict[str, ToolCallFormat]:
    """Returns all of them, by name."""
    return formats_in(__name__, __path__, ToolCallFormat)
