"""The parts of a choice's text, in the order in which it was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
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
    for _, pieces in groupby(parts, lambda part: (type(part), getattr(part, "index", None))):
        first, *others = pieces
        if others and not isinstance(first, CallStart):
            texts = (each.text for each in others if not isinstance(each, CallStart))
            first = replace(first, text=first.text + "".join(texts))
        yield first


def content_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Reasoning))
