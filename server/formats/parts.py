"""What a choice's text is made of, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. ``index``: its number within the choice."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallStart | CallArguments


def joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The same parts, with pieces of one text that follow each other put together."""
    held: list[Part] = []
    for part in parts:
        if held and _continues(held[0], part):
            held.append(part)
            continue
        if held:
            yield _sum(held)
        held = [part]
    if held:
        yield _sum(held)


def content_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def _continues(first: Part, part: Part) -> bool:
    if isinstance(first, CallStart) or type(first) is not type(part):
        return False
    return not isinstance(first, CallArguments) or (
        isinstance(part, CallArguments) and part.index == first.index
    )


def _sum(parts: list[Part]) -> Part:
    first = parts[0]
    if isinstance(first, CallStart):
        return first
    return replace(first, text="".join(p.text for p in parts if not isinstance(p, CallStart)))
