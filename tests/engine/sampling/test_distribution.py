"""The table of the target's law against its definition, and against what the sampler draws."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2  # type: ignore[import-untyped]

from engine.request.params import SamplingParams
from engine.sampling.sampler import target_probs
from worlds.sampled_rows import RowGroup, sample_tokens
from worlds.sampling_oracle import new_state, random_row, random_truncation, truncated_probs


@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1500])
def test_rows_are_the_softmax_of_what_truncation_leaves(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    params = [random_truncation(rng, vocab_size) for _ in range(60)]
    logits = torch.stack([random_row(rng, vocab_size) for _ in params])
    groups = [RowGroup(new_state(p, vocab_size), i) for i, p in enumerate(params)]
    found = target_probs(logits, groups)
    for row, each, probs in zip(logits, params, found.tolist(), strict=True):
        expected = truncated_probs(row, each)
        assert [p > 0 for p in probs] == [p > 0 for p in expected]
        assert probs == pytest.approx(expected, rel=1e-9)


def test_the_sampler_draws_from_the_table() -> None:
    """Support and law, at a false alarm rate of 1e-4 over the choice of seeds for each."""
    rng = random.Random(1)
    for _ in range(12):
        params, row = replace(random_truncation(rng, 16), top_k=0), random_row(rng, 16)
        states = [new_state(params, 16) for _ in range(1000)]
        for state in states:
            state.key = rng.randrange(2**62)
        drawn = sample_tokens(
            row.expand(1000, 16).contiguous(), [RowGroup(s, i) for i, s in enumerate(states)]
        )
        (probs,) = target_probs(row[None], [RowGroup(states[0], 0)]).tolist()
        assert all(probs[token_id] > 0 for token_id in drawn)
        cells = [(p * 1000, drawn.count(t)) for t, p in enumerate(probs) if p * 1000 >= 5]
        statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
        assert chi2.sf(statistic, max(1, len(cells) - 1)) > 1e-4


def test_rows_without_a_finite_logit_fall_to_token_zero() -> None:
    logits = torch.tensor([[-math.inf] * 3, [math.nan] * 3])
    groups = [RowGroup(new_state(SamplingParams(), 3), row) for row in range(2)]
    assert target_probs(logits, groups).tolist() == [[1, 0, 0], [1, 0, 0]]
