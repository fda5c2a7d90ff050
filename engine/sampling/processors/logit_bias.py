"""``logit_bias``: added to the logits of tokens that the request names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from engine.request.errors import RequestError
from engine.sampling.processor import (
    Facts,
    LogitsProcessor,
    Parameter,
    Path,
    Stage,
    Vocabulary,
    check_token_ids,
    register,
    upload,
)

if TYPE_CHECKING:
    from torch import Tensor


_MAX_LISTED = 10
_MAX_SHOWN = 64


@register
class LogitBias(LogitsProcessor):
    stage = Stage.BIAS
    parameters = (
        Parameter(
            "logit_bias",
            dict[str, Annotated[float, Ge(-100), Le(100)]],
            {},
            "Token ids, and what is added to their logits: -100 to 100.",
        ),
    )

    def __init__(self, facts: Facts, logit_bias: Mapping[int, float]) -> None:
        check_token_ids("logit_bias", list(logit_bias), facts.vocab_size)
        self._token_ids = np.array(list(logit_bias), np.int64)
        self._biases = np.array(list(logit_bias.values()), np.float32)

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        given: Mapping[str, float] = values["logit_bias"]
        if wrong := [key for key in given if not re.fullmatch(r"[0-9]{1,10}", key)]:
            shown = ", ".join(repr(key[:_MAX_SHOWN]) for key in wrong[:_MAX_LISTED])
            more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
            raise RequestError(
                f"logit_bias.{wrong[0][:_MAX_SHOWN]}",
                f"logit_bias: keys are token ids, which {shown}{more} are not",
            )
        biases = {int(key): bias for key, bias in given.items()}
        if len(biases) < len(given):
            token_id, count = Counter(map(int, given)).most_common(1)[0]
            raise RequestError("logit_bias", f"logit_bias: token {token_id} is there {count} times")
        check_token_ids("logit_bias", list(biases), vocabulary.size)
        return {"logit_bias": biases}

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        del paths
        token_ids = upload(self._token_ids, logits.device)
        logits[:, token_ids] += upload(self._biases, logits.device)
