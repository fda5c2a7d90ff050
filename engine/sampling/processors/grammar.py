"""A request's grammar as a logits processor: every row, draft rows too, is masked after its own path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.grammar.constraint import GrammarConstraint
from engine.request.params import SamplingParams
from engine.sampling.processor import Facts, LogitsProcessor, Path, Stage, register, upload

if TYPE_CHECKING:
    from torch import Tensor


@register
class Grammar(LogitsProcessor):
    """Its grammars come from more than one field (``response_format``, ``structured_outputs``,
    ``tools``), so it declares none: the server puts their text into ``SamplingParams.grammar``."""

    stage = Stage.CONSTRAIN
    parameters = ()

    def __init__(self, constraint: GrammarConstraint) -> None:
        self._constraint = constraint

    @classmethod
    def of(cls, params: SamplingParams, facts: Facts) -> Grammar | None:
        del params
        return None if facts.grammar is None else cls(facts.grammar)

    def append(self, token_ids: Sequence[int]) -> None:
        self._constraint.append(token_ids)

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        """Rows whose path the grammar does not allow stay as they are: nothing reaches them."""
        for row, path in enumerate(paths):
            allowed = self._constraint.allowed(path)
            if allowed is None:
                continue
            values = logits[row]
            forbidden = upload(np.logical_not(allowed), logits.device)
            values.masked_fill_(forbidden, float("-inf"))
            # Where something else had ruled out all that the grammar allows, the grammar wins.
            nothing_left = ~(values.amax() > float("-inf"))
            values.masked_fill_(forbidden.logical_not_() & nothing_left, 0.0)
