"""``min_tokens``: what ends a text is ruled out before so many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from annotated_types import Ge, Le

from engine.sampling.processor import Facts, LogitsProcessor, Parameter, Path, Stage, register


@register
class MinTokens(LogitsProcessor):
    stage = Stage.FORBID
    parameters = (
        Parameter(
            "min_tokens",
            Annotated[int, Ge(0), Le(2**31 - 1)],
            0,
            "Neither the end-of-sequence token nor stop ids before so many tokens.",
        ),
    )

    def __init__(self, facts: Facts, min_tokens: int) -> None:
        self._stop_token_ids = facts.stop_token_ids
        self._num_left = min_tokens

    def append(self, token_ids: Sequence[int]) -> None:
        self._num_left -= len(token_ids)

    def is_active(self) -> bool:
        return self._num_left > 0

    def forbidden(self, path: Path) -> Iterable[int]:
        return self._stop_token_ids if len(path) < self._num_left else ()
