"""Ways of writing reasoning, one file each: what has a ``FORMAT`` in this folder is known by its name."""

from __future__ import annotations

from functools import cache

from server.formats.format import ReasoningFormat, formats_in


@cache
def reasoning_formats() -> dict[str, ReasoningFormat]:
    """Returns all of them, by name."""
    return formats_in(__name__, __path__, ReasoningFormat)
