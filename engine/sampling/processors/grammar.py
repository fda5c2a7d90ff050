"""A request's grammar as a logits processor: every row, draft rows too, is masked after its own path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from engine.sampling.processor import Facts, LogitsProcessor, Path, Stage, register, upload

if TYPE_CHECKING:
    from torch import Tensor


@register
class Grammar(LogitsProcessor):
    """Its grammars come from more than one field (``response_format``, ``structured_outputs``,
    ``tools``), so it declares none: the server puts their text into ``SamplingParams.grammar``."""

    stage = Stage.CONSTRAIN
    parameters = ()
    fields: ClassVar = {"grammar": ""}

    def __init__(self, facts: Facts, grammar: str) -> None:
        del grammar  # compiled, it is the constraint
        assert facts.grammar is not None
        self._constraint = facts.grammar

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
