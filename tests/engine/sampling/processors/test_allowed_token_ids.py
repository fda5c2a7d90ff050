"""Rows keep allowed_token_ids alone, among drafts too, and contradictions are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drafters.tree import chain
from engine.request.errors import RequestError
from engine.request.params import SamplingParams
from engine.sampling.processor import Facts, Vocabulary, sampling_values
from engine.sampling.processors.allowed_token_ids import AllowedTokenIds
from engine.sampling.sampler import edited_logits
from worlds.sampled_rows import RowGroup
from worlds.sampling_oracle import new_state

VOCABULARY = Vocabulary(50, lambda text: [*text.encode()], lambda ids: bytes(ids).decode())


def allowed(*token_ids: int, **others: Any) -> SamplingParams:
    return SamplingParams(further={"allowed_token_ids": token_ids}, **others)


def test_only_those_are_left_in_every_row() -> None:
    logits = torch.randn(5, 50)
    edited = edited_logits(
        logits.clone(), [RowGroup(new_state(allowed(7, 3), 50), 0, chain([1] * 4))]
    )
    others = [each for each in range(50) if each not in (3, 7)]
    assert torch.equal(edited[:, [3, 7]], logits[:, [3, 7]])
    assert (edited[:, others] == -math.inf).all()


def test_requests_without_it_are_not_touched() -> None:
    logits = torch.randn(1, 50)
    assert edited_logits(logits, [RowGroup(new_state(SamplingParams(), 50), 0)]) is logits
    assert sampling_values({"allowed_token_ids": None}, VOCABULARY) == {"further": {}}


@pytest.mark.parametrize(
    ("others", "part"),
    [
        ({"bad_words_token_ids": ((7,), (1, 3))}, "bad_words"),
        ({"bad_words_token_ids": ((7,),), "min_tokens": 2, "stop_token_ids": (3,)}, "min_tokens"),
        ({"min_tokens": 2, "stop_token_ids": (3, 7)}, "min_tokens"),
        ({"grammar": "start: /a/"}, "constraint"),
    ],
)
def test_what_may_leave_nothing_is_refused(others: dict[str, Any], part: str) -> None:
    params = allowed(7, 3, **others)
    facts = Facts(params, (), frozenset(params.stop_token_ids), 50)
    with pytest.raises(RequestError, match=part) as refused:
        AllowedTokenIds(facts, (7, 3))
    assert refused.value.param == "allowed_token_ids"


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="50"):
        AllowedTokenIds.resolve({"allowed_token_ids": [50]}, VOCABULARY)
