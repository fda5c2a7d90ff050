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
            values, impossible = row.double(), ~(row > float("-inf"))
            num_possible = len(row) - impossible.sum()
            mean = values.masked_fill(impossible, 0.0).sum() / num_possible
            squares = (values - mean).square_().masked_fill_(impossible, 0.0)
            deviation = (squares.sum() / num_possible).sqrt_()
            # Where nothing is possible this is no number, and nothing lies below it.
            least = values.amax() - self._num_deviations * deviation
            row.masked_fill_(row < least, float("-inf"))
