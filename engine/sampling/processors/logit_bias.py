"""``logit_bias``: added to the logits of tokens that the request names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from engine.errors import RequestError
from engine.sampling.processor import (
    Facts,
    LogitsProcessor,
    Parameter,
    Path,
    Stage,
    Vocabulary,
    check_token_ids,
    register,
)

if TYPE_CHECKING:
    from torch import Tensor


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
        # The server reads what is declared here, and does without torch.
        import torch

        self._token_ids = torch.tensor(list(logit_bias))
        self._biases = torch.tensor(list(logit_bias.values()), dtype=torch.float32)

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        given: Mapping[str, float] = values["logit_bias"]
        for key in given:
            if not re.fullmatch(r"[0-9]{1,10}", key):
                raise RequestError(f"logit_bias.{key}", "logit_bias: keys are token ids")
        biases = {int(key): bias for key, bias in given.items()}
        check_token_ids("logit_bias", list(biases), vocabulary.size)
        return {"logit_bias": biases}

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        from engine.transfer import upload

        del paths
        token_ids, biases = (
            upload(each, logits.device) for each in (self._token_ids, self._biases)
        )
        logits[:, token_ids] += biases
