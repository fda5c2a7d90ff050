"""The table of the target's law against its definition, and against what the sampler draws."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy.stats import chi2  # type: ignore[import-untyped]

from engine.request.params import SamplingParams
from engine.sampling.sampler import target_probs
from engine.sampling.state import paths
from worlds.sampled_rows import RowGroup, sample_tokens
from worlds.sampling_oracle import edited_row, new_state, random_tree, truncated_probs

torch.set_num_threads(1)


def random_row(rng: random.Random, vocab_size: int) -> torch.Tensor:
    """Peaked or flat, with ties, with impossible tokens."""
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    row = torch.randn(vocab_size, generator=generator) * rng.choice([0.3, 2.0, 8.0])
    if rng.random() < 0.5:
        row = (row * 2).round() / 2
    if rng.random() < 0.3:
        row[rng.randrange(vocab_size) :] = -math.inf
        row[0] = 0.0
    return row


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.05, 0.7, 1.0, 1.3, 5.0]),
        top_k=rng.choice([0, 0, 1, 3, 50, vocab_size, 2 * vocab_size]),
        top_p=rng.choice([1.0, 0.95, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rng.randrange(2**64),
    )


@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1500])
def test_rows_are_the_softmax_of_what_truncation_leaves(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    params = [random_params(rng, vocab_size) for _ in range(60)]
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
        params, row = random_params(rng, 16), random_row(rng, 16)
        params = SamplingParams(
            params.max_tokens, params.temperature, 0, params.top_p, params.min_p
        )
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


def test_rows_are_edited_by_the_state_after_their_path() -> None:
    rng = random.Random(2)
    params = SamplingParams(
        temperature=0.9,
        top_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        logit_bias={3: 1.5},
        bad_words_token_ids=((7,), (2, 4)),
        stop_token_ids=(5,),
        min_tokens=3,
    )
    num_rows = 0
    for seed in range(12):
        state, tree = new_state(params, 12), random_tree(rng, 12, 8)
        output = [rng.randrange(12) for _ in range(seed % 4)]
        state.append(output)
        group = RowGroup(state, 2, tree)
        logits = torch.stack([random_row(rng, 12) for _ in range(3 + len(tree))])
        before = logits.clone()
        found = target_probs(logits, [group]).tolist()
        assert torch.equal(logits, before)
        for row, path, probs in zip(logits[2:], paths(tree), found, strict=True):
            edited = edited_row(row, params, [0, 1, 2], [*output, *path])
            assert probs == pytest.approx(truncated_probs(edited, params), rel=1e-5)
            num_rows += 1
    assert num_rows > 30


def test_greedy_rows_are_certain_and_empty_ones_fall_to_token_zero() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-math.inf] * 3, [math.nan] * 3])
    states = [new_state(SamplingParams(temperature=t), 3) for t in (0.0, 1.0, 1.0)]
    found = target_probs(logits, [RowGroup(state, i) for i, state in enumerate(states)])
    assert found.tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0]]
