"""What there is to say of a way of writing reasoning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """A file of this folder whose ``FORMAT`` is one of these adds a format: reasoning stands between
    ``begin`` and ``end``, before the answer.

    ``assumed``: whether a text reasons from its first word where the prompt has neither opened nor
    closed the reasoning. ``writes``: whether a model with this chat template writes so. Of several that
    say so, the first by name is taken.
    """

    name: str
    begin: str
    end: str
    assumed: bool
    writes: Callable[[str], bool]

    def is_open_after(self, prompt: str) -> bool:
        """Whether what is written after this prompt begins inside the reasoning."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (self.assumed and not prompt.endswith(self.end))
