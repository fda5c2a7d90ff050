"""What top_n_sigma keeps, and that a row's neighbours have no say in it."""

from __future__ import annotations

import math

import pytest
import torch

from drafters.tree import chain
from engine.request.params import SamplingParams
from engine.sampling.sampler import edited_logits, target_probs
from worlds.sampled_rows import RowGroup, sample_tokens
from worlds.sampling_oracle import new_state


def sigma(num: float, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, further={"top_n_sigma": num})


@pytest.mark.parametrize(("num", "kept"), [(0.5, [3]), (1.0, [2, 3]), (2.0, [1, 2, 3])])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_it_keeps_so_many_deviations_at_every_temperature(
    num: float, kept: list[int], temperature: float
) -> None:
    """Of 0, 2, 3 and 4, with a deviation of 1.48; what is ruled out already does not count."""
    row = torch.tensor([[0.0, 2.0, 3.0, 4.0, -math.inf]])
    (probs,) = target_probs(row, [RowGroup(new_state(sigma(num, temperature), 5), 0)])
    assert probs.nonzero()[:, 0].tolist() == kept
    expected = torch.softmax(row[0, kept].double() / temperature, -1)
    torch.testing.assert_close(probs[kept], expected)


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
