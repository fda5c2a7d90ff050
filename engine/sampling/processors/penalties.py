"""Penalties on tokens that occurred: CTRL's (arXiv 1909.05858), then OpenAI's two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

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


class TokenCounts:
    """Output counts of the tokens seen, as arrays that grow in place. Prompt tokens count 0."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._token_ids: NDArray[np.int64] = np.zeros(64, np.int64)
        self._counts: NDArray[np.float32] = np.zeros(64, np.float32)

    def add(self, token_ids: Iterable[int], amount: int) -> None:
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._token_ids):
                self._token_ids = np.resize(self._token_ids, 2 * slot)
                self._counts = np.concatenate([self._counts, np.zeros(slot, np.float32)])
            self._token_ids[slot] = token_id
            self._counts[slot] += amount

    def get(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The distinct tokens seen, in the order of first sight."""
        return self._token_ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """The number of times that each of ``token_ids`` was emitted."""
        return self._counts[: len(self._slots)]


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
        self._counts = TokenCounts()
        if repetition_penalty != 1:
            self._counts.add(facts.prompt_token_ids, 0)

    def append(self, token_ids: Sequence[int]) -> None:
        self._counts.add(token_ids, 1)

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        counts = self._counts
        on_path = [
            (row, token_id, counts.get(token_id) + path.count(token_id))
            for row, path in enumerate(paths)
            for token_id in set(path)
        ]
        at = upload(np.array(on_path, np.int64).reshape(-1, 3), logits.device)
        unpenalised = logits[at[:, 0], at[:, 1]]
        if len(counts.token_ids):
            token_ids = upload(counts.token_ids, logits.device)
            seen = upload(counts.counts, logits.device)
            logits[:, token_ids] = self._penalised(logits[:, token_ids], seen)
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
