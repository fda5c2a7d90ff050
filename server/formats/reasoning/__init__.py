"""Ways of writing reasoning, one file each: what has a ``FORMAT`` in this folder is known by its name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from server.formats.reasoning.format import ReasoningFormat


@cache
def reasoning_formats() -> dict[str, ReasoningFormat]:
    """All of them, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {each.name: each for each in sorted(found, key=lambda each: each.name)}


def reasoning_format_of(template: str) -> str:
    """The name of the format that a model with this chat template writes; "" where none is known."""
    return next((each.name for each in reasoning_formats().values() if each.writes(template)), "")
