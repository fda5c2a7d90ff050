"""What there is to say of a way of writing reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Piece: TypeAlias = tuple[str, str]
"""Reasoning and content, in this order; pieces follow each other."""


class Splitter(Protocol):
    """Takes the reasoning out of one choice's text, as ``server.formats.scanner.Scanner`` does."""

    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...
    def is_reasoning(self, at: int) -> bool:
        """Returns whether the character there is, markers included."""
        ...


@dataclass(frozen=True)
class ReasoningFormat:
    """A file of this folder whose ``FORMAT`` is one of these adds a format: reasoning stands between
    ``begin`` and ``end``, before the answer.

    ``assumed``: whether a text reasons from its first word where the prompt has neither opened nor
    closed the reasoning. ``writes``: whether a model with this chat template writes so. Of several that
    say so, the first by name is taken.

    ``markers``: further texts that may be special tokens and have to be seen. ``answer``: what an answer
    begins with, for a model that always reasons before it. ``splitter``: where reasoning does not just
    come first; made with whether the text begins inside it.
    """

    name: str
    begin: str
    end: str
    assumed: bool
    writes: Callable[[str], bool]
    markers: tuple[str, ...] = ()
    answer: str = ""
    splitter: Callable[[bool], Splitter] | None = None

    def is_open_after(self, prompt: str) -> bool:
        """Whether what is written after this prompt begins inside the reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (self.assumed and not prompt.endswith(self.end))
