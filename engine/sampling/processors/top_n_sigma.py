"""``top_n_sigma`` (Tang et al., arXiv 2411.07641): keep what is near the largest logit, in standard
deviations of the row. Unlike top-p and min-p it keeps the same tokens at every temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from engine.sampling.processor import Facts, LogitsProcessor, Parameter, Path, Stage, register

if TYPE_CHECKING:
    from torch import Tensor


@register
class TopNSigma(LogitsProcessor):
    stage = Stage.TRUNCATE
    parameters = (
        Parameter(
            "top_n_sigma",
            Annotated[float, Ge(0), Le(100)],
            0.0,
            "Keep tokens whose logit is at most so many standard deviations of all logits below the "
            "largest; 0: off.",
        ),
    )

    def __init__(self, facts: Facts, top_n_sigma: float) -> None:
        del facts
        self._num_deviations = top_n_sigma

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        del paths
        for row in logits:
            possible = row[row > float("-inf")].double()
            if len(possible):
                least = possible.max() - self._num_deviations * possible.std(correction=0)
                row.masked_fill_(row < least, float("-inf"))
