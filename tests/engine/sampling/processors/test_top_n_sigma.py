"""Rows are cut by top_n_sigma, and their neighbours have no say in it."""

from __future__ import annotations

import math

import torch

from drafters.tree import chain
from engine.request.params import SamplingParams
from engine.sampling.sampler import edited_logits
from worlds.sampled_rows import RowGroup, sample_tokens
from worlds.sampling_oracle import new_state


def sigma(num: float, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, further={"top_n_sigma": num})


def test_greedy_rows_and_rows_without_it_are_not_touched() -> None:
    logits = torch.randn(3, 50)
    groups = [RowGroup(new_state(p, 50), i) for i, p in enumerate([sigma(1, 0.0), sigma(0)])]
    assert edited_logits(logits, groups) is logits
    assert sample_tokens(logits, groups)[0] == int(logits[0].argmax())


def test_a_row_is_cut_alike_alone_and_among_drafts() -> None:
    logits = torch.randn(9, 40_000, generator=torch.Generator().manual_seed(0)) * 3
    state = new_state(sigma(1.0), 40_000)
    together = edited_logits(logits, [RowGroup(state, 0, chain([5] * 8))])
    for row in range(len(logits)):
        alone = edited_logits(logits[row : row + 1], [RowGroup(state, 0)])
        assert torch.equal(alone[0], together[row])
    assert 0 < (together > -math.inf).sum() < logits.numel()
