"""Penalties on tokens that occurred: CTRL's (arXiv 1909.05858), then OpenAI's two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Gt, Le

from engine.sampling.processor import (
    Facts,
    LogitsProcessor,
    Parameter,
    Path,
    Stage,
    register,
    upload,
)

if TYPE_CHECKING:
    from torch import Tensor


@register
class Penalties(LogitsProcessor):
    """The request's own tokens for all its rows, and each path's tokens in its row."""

    stage = Stage.PENALTY
    parameters = (
        Parameter(
            "presence_penalty",
            Annotated[float, Ge(-2), Le(2)],
            0.0,
            "Taken off the logits of tokens that the output has.",
        ),
        Parameter(
            "frequency_penalty",
            Annotated[float, Ge(-2), Le(2)],
            0.0,
            "Taken off a token's logit as often as the output has it.",
        ),
        Parameter(
            "repetition_penalty",
            Annotated[float, Gt(0), Le(10)],
            1.0,
            "Divides the logits of tokens that prompt or output have; multiplies negative ones.",
        ),
    )

    def __init__(
        self,
        facts: Facts,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
    ) -> None:
        self._factors = [[repetition_penalty], [frequency_penalty], [presence_penalty]]
        self._counts = np.zeros(facts.vocab_size, np.float32)
        self._is_seen = np.zeros(facts.vocab_size, np.bool_)
        if repetition_penalty != 1:
            self._is_seen[list(facts.prompt_token_ids)] = True

    def append(self, token_ids: Sequence[int]) -> None:
        ids = list(token_ids)
        np.add.at(self._counts, ids, 1)
        self._is_seen[ids] = True

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        seen = np.flatnonzero(self._is_seen)
        on_path = [
            (row, token_id, int(self._counts[token_id]) + path.count(token_id))
            for row, path in enumerate(paths)
            for token_id in set(path)
        ]
        at = upload(np.array(on_path, np.int64).reshape(-1, 3), logits.device)
        unpenalised = logits[at[:, 0], at[:, 1]]
        if len(seen):
            token_ids = upload(seen, logits.device)
            counts = upload(self._counts[seen], logits.device)
            logits[:, token_ids] = self._penalised(logits[:, token_ids], counts)
        if on_path:
            logits[at[:, 0], at[:, 1]] = self._penalised(unpenalised, at[:, 2].float())

    def _penalised(self, logits: Tensor, counts: Tensor) -> Tensor:
        """All of ``logits`` were seen."""
        # As tensors: a Python divisor may be turned into a product with its reciprocal.
        repetition, frequency, presence = upload(self._factors, logits.device, logits.dtype)
        penalised: Tensor = (logits / repetition).where(logits > 0, logits * repetition)
        penalised = penalised - frequency * counts
        penalised -= presence * (counts > 0)
        return penalised
