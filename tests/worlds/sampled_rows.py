"""Rows of no engine's step, sampled, verified and scored at once: what a step begins is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from drafters.tree import EMPTY, DraftTree
from engine.request.events import TokenLogprobs
from engine.request.outcome import Outcome
from engine.sampling.logprobs import Scored, begin_scoring, begin_top_tokens
from engine.sampling.noise import gumbel_list
from engine.sampling.sampler import choose_tokens
from engine.sampling.state import SampledRequest, SamplingState, rows_of
from engine.transfer import read_now
from engine.verification.match import verify
from engine.verification.verify import begin_verification

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@dataclass(slots=True)
class RowGroup:
    """``engine.sampling.state.SampledRequest`` without a request."""

    sampling: SamplingState
    anchor_logit: int
    draft: DraftTree = EMPTY
    outcome: Outcome | None = None


def sample_tokens(logits: Tensor, groups: Sequence[SampledRequest]) -> list[int]:
    tokens: list[int] = choose_tokens(logits, groups).tolist()
    return tokens


def verify_all(groups: Sequence[RowGroup], row_token_ids: Sequence[int]) -> list[Outcome]:
    """Verifies by matching; ``row_token_ids``: the target's token at every row of the step."""
    return [verify(each, [row_token_ids[row] for row in rows_of(each)]) for each in groups]


def verify_step(logits: Tensor, groups: Sequence[SampledRequest]) -> list[Outcome]:
    """Verifies each group in its own way."""
    read_now(lambda readback: begin_verification(logits, groups, readback)[0])
    return [each.outcome for each in groups if each.outcome is not None]


def gumbel_scalar(key: int, position: int, token_id: int) -> float:
    (noise,) = gumbel_list(key, position, [token_id])
    return noise


def emitted_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """``token_ids``: one per row."""
    asked = [Scored(*pair, num_top) for pair in zip(rows, token_ids, strict=True)]
    return read_now(lambda readback: begin_scoring(logits, asked, readback))


def top_tokens(logits: Tensor, rows: Sequence[int], k: int) -> list[list[int]]:
    return read_now(lambda readback: begin_top_tokens(logits, rows, k, readback)[0])[0]


def top_probs(
    logits: Tensor, rows: Sequence[int], k: int
) -> tuple[list[list[int]], list[list[float]]]:
    token_ids, _, probs = read_now(
        lambda readback: begin_top_tokens(logits, rows, k, readback, True)[0]
    )
    assert probs is not None
    return token_ids, probs
