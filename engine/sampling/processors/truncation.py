"""``top_k``, ``top_p`` and ``min_p``, in this order: the truncations that the search for the sampled
token applies itself, as does ``target_probs`` (``engine/sampling/sampler.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from engine.sampling.processor import LogitsProcessor, Parameter, Stage, Vocabulary, register


@register
class Truncation(LogitsProcessor):
    stage = Stage.TRUNCATE
    fields: ClassVar = {}  # no value makes it needed
    parameters = (
        Parameter(
            "top_k",
            Annotated[int, Ge(-1), Le(2**31 - 1)],
            0,
            "Keep so many of the likeliest tokens; 0 and -1: off.",
        ),
        Parameter(
            "top_p",
            Annotated[float, Gt(0), Le(1)],
            1.0,
            "Keep the likeliest tokens of this total probability.",
        ),
        Parameter(
            "min_p",
            Annotated[float, Ge(0), Le(1)],
            0.0,
            "Keep tokens of at least this share of the likeliest one's probability.",
        ),
    )

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        del vocabulary
        return {**values, "top_k": max(0, values["top_k"])}
