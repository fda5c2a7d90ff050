"""``allowed_token_ids``: the only tokens that may be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import MaxLen, MinLen

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

_NAME = "allowed_token_ids"


@register
class AllowedTokenIds(LogitsProcessor):
    """Rules out all others, the tokens that end a text included."""

    stage = Stage.FORBID
    parameters = (
        Parameter(
            _NAME,
            Annotated[list[int], MinLen(1), MaxLen(1 << 18)],
            None,
            "The only tokens that may be written; the end-of-sequence token is not among them unless "
            "named.",
        ),
    )

    def __init__(self, facts: Facts, allowed_token_ids: Sequence[int]) -> None:
        check_token_ids(_NAME, allowed_token_ids, facts.vocab_size)
        params = facts.params
        if params.grammar:
            raise RequestError(_NAME, f"{_NAME}: the constraint of the output names the tokens")
        # Where there may come a row that leaves no token at all.
        bad = {word[-1] for word in params.bad_words_token_ids if word}
        ends = facts.stop_token_ids if params.min_tokens else frozenset()
        for name, ruled_out in (("bad_words", bad), ("min_tokens", bad | ends)):
            if ruled_out.issuperset(allowed_token_ids):
                raise RequestError(_NAME, f"{_NAME}: {name} may rule out all of them")
        self._is_forbidden = np.ones(facts.vocab_size, np.bool_)
        self._is_forbidden[list(allowed_token_ids)] = False

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        check_token_ids(_NAME, values[_NAME], vocabulary.size)
        return {_NAME: tuple(values[_NAME])}

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        del paths
        mask = upload(self._is_forbidden, logits.device)
        logits.masked_fill_(mask[: logits.shape[1]], float("-inf"))
