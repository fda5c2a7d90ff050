"""The formats by name: every file of ``tool_calls`` or ``reasoning`` that has a ``FORMAT`` is one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from server.formats.format import ReasoningFormat, ToolCallFormat

F = TypeVar("F", ReasoningFormat, ToolCallFormat)


@cache
def tool_call_formats() -> dict[str, ToolCallFormat]:
    """Returns the ways of writing tool calls, by name and in that order."""
    return _formats_in("server.formats.tool_calls", ToolCallFormat)


@cache
def reasoning_formats() -> dict[str, ReasoningFormat]:
    """Returns the ways of writing reasoning, by name and in that order."""
    return _formats_in("server.formats.reasoning", ReasoningFormat)


def markers_of(tool_calls: str, reasoning: str) -> tuple[str, ...]:
    """Returns the texts that the parsers of these formats have to see, even where they are special
    tokens."""
    found: tuple[str, ...] = ()
    if reasoning:
        form = reasoning_formats()[reasoning]
        found += form.markers or (form.begin, form.end)
    return found + tool_call_formats()[tool_calls].markers if tool_calls else found


def format_of(formats: dict[str, F], template: str) -> str:
    """Returns the name of the first format that a model with this chat template writes; "" where none is
    known."""
    return next((each.name for each in formats.values() if each.writes(template)), "")


def _formats_in(package: str, kind: type[F]) -> dict[str, F]:
    modules = iter_modules(import_module(package).__path__, f"{package}.")
    found = [getattr(import_module(module.name), "FORMAT", None) for module in modules]
    formats = [each for each in found if isinstance(each, kind)]
    return {each.name: each for each in sorted(formats, key=lambda each: each.name)}
