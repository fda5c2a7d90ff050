"""From a draft model's logits to candidates: the verifier's draws, as far as a draft can know them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from drafters.base import GREEDY, DraftSampling
from drafters.model.protocol import Candidates
from engine.drafting.draft_model import ScoredRow, begin_candidates
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.sampler import target_probs
from engine.sampling.state import SamplingState
from engine.transfer import read_now
from worlds.sampled_rows import RowGroup, sample_tokens

VOCAB_SIZE = 200
NUM_ROWS = 40
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0, seed=3),
    "cold": SamplingParams(temperature=0.3, seed=4),
    "top_k": SamplingParams(temperature=1.2, top_k=5, seed=5),
    "top_p": SamplingParams(temperature=0.9, top_p=0.7, seed=6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1, seed=7),
    "all": SamplingParams(temperature=1.4, top_k=40, top_p=0.9, min_p=0.02, seed=8),
}


def logits(seed: int = 0, num_rows: int = NUM_ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)


def states(sampling: SamplingParams, verification: str = "match") -> list[SamplingState]:
    """One request per row, each with a prompt as long as its number and so a position of its own."""
    speculative = SpeculativeParams(verification=verification)  # type: ignore[arg-type]
    return [
        SamplingState(
            GenerationRequest("r", (1,) * (row + 1), sampling, speculative), (), VOCAB_SIZE, 999
        )
        for row in range(NUM_ROWS)
    ]


def choose_candidates(
    values: torch.Tensor,
    rows: Sequence[ScoredRow],
    vocab_size: int,
    token_map: torch.Tensor | None = None,
) -> list[Candidates]:
    return read_now(
        lambda readback: begin_candidates(values, rows, vocab_size, readback, token_map).finish
    )


def rows_of(of: list[SamplingState], num_candidates: int) -> list[ScoredRow]:
    return [ScoredRow(each.draft_sampling(), each.num_tokens, num_candidates) for each in of]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("num_candidates", [1, 4])
def test_the_first_candidate_is_what_the_verifier_would_choose(
    name: str, num_candidates: int
) -> None:
    of = states(SAMPLINGS[name])
    values = logits()
    chosen = sample_tokens(values, [RowGroup(each, row) for row, each in enumerate(of)])
    found = choose_candidates(values, rows_of(of, num_candidates), VOCAB_SIZE)
    assert [each.token_ids[0] for each in found] == chosen
    for each in found:
        assert len(set(each.token_ids)) == len(each.token_ids) <= num_candidates
        assert list(each.confidences) == sorted(each.confidences, reverse=True)
        assert 0 < sum(each.confidences) <= 1 + 1e-5


def test_greedy_confidence_is_the_probability_and_mixing_rows_changes_nothing() -> None:
    values = logits()
    greedy = [ScoredRow(GREEDY, row, 3) for row in range(NUM_ROWS)]
    alone = choose_candidates(values, greedy, VOCAB_SIZE)
    probs = values.softmax(-1)
    for row, each in enumerate(alone):
        assert list(each.confidences) == pytest.approx(
            probs[row, list(each.token_ids)].tolist(), rel=1e-4
        )
    mixed = [*greedy[:-1], ScoredRow(DraftSampling(1.0, key=3), 7, 3)]
    for one, other in zip(alone[:-1], choose_candidates(values, mixed, VOCAB_SIZE), strict=False):
        assert one.token_ids == other.token_ids
        assert list(one.confidences) == pytest.approx(list(other.confidences), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in SAMPLINGS if name != "greedy"])
def test_distributions_are_what_the_verifier_reckons_with(name: str) -> None:
    of = states(SAMPLINGS[name], "rejection")
    values = logits()
    wanted = target_probs(values, [RowGroup(each, row) for row, each in enumerate(of)])
    found = choose_candidates(values, rows_of(of, 3), VOCAB_SIZE)
    for each, probs in zip(found, wanted, strict=True):
        assert tuple(each.distribution.shape) == (VOCAB_SIZE,)
        torch.testing.assert_close(each.distribution.double(), probs, atol=1e-5, rtol=1e-3)
        assert len(set(each.confidences)) == 1
        assert each.confidences[0] == pytest.approx(float(each.distribution.max()))
        assert all(each.distribution[token] > 0 for token in each.token_ids)


def test_drawn_tokens_follow_their_distribution() -> None:
    values = logits(1, 1)[:, :6]
    num = 4000
    keys = [
        ScoredRow(DraftSampling(1.0, key=key, verification="rejection"), 9, 2) for key in range(num)
    ]
    found = choose_candidates(values.expand(num, -1), keys, 6)
    firsts = torch.bincount(torch.tensor([each.token_ids[0] for each in found]), minlength=6) / num
    probs = values[0].softmax(-1)
    assert (firsts - probs).abs().max() < 0.03
    # The second of a pair: what is left, without the first.
    pairs = torch.tensor([each.token_ids for each in found])
    likely = int(probs.argmax())
    rest = probs.clone()
    rest[likely] = 0
    seconds = pairs[pairs[:, 0] == likely][:, 1]
    share = torch.bincount(seconds, minlength=6) / len(seconds)
    assert (share - rest / rest.sum()).abs().max() < 0.04


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_a_part_of_the_vocabulary_is_all_of_it_with_the_rest_ruled_out(
    name: str, verification: str
) -> None:
    """In any order of the draft's own ids."""
    generator = torch.Generator().manual_seed(4)
    token_map = torch.randperm(VOCAB_SIZE, generator=generator)[:70]
    values = logits(num_rows=NUM_ROWS)
    whole = torch.full_like(values, float("-inf"))
    whole[:, token_map] = values[:, token_map]
    rows = rows_of(states(SAMPLINGS[name], verification), 5)
    found = choose_candidates(values[:, token_map], rows, VOCAB_SIZE, token_map)
    for each, wanted in zip(found, choose_candidates(whole, rows, VOCAB_SIZE), strict=True):
        assert each.token_ids == wanted.token_ids
        assert {*each.token_ids} <= {*token_map.tolist()}
        assert list(each.confidences) == pytest.approx(list(wanted.confidences), rel=1e-4)
        is_drawn = verification == "rejection" and name != "greedy"
        assert (each.distribution is not None) == is_drawn
        if is_drawn:
            assert each.distribution.sum() == pytest.approx(1)
            torch.testing.assert_close(each.distribution, wanted.distribution)


def test_tokens_that_the_target_does_not_have_are_never_candidates() -> None:
    values = logits()
    values[:, 150:] += 50
    for each in choose_candidates(values, [ScoredRow(GREEDY, 5, 4)] * NUM_ROWS, 150):
        assert max(each.token_ids) < 150
    smaller = choose_candidates(values, rows_of(states(SAMPLINGS["plain"], "rejection"), 2), 900)
    assert smaller[0].distribution.shape == (900,)


def test_nothing_beyond_the_truncation_is_offered() -> None:
    sampling = DraftSampling(1.0, top_k=2, key=9)
    found = choose_candidates(logits(), [ScoredRow(sampling, 5, 4)] * NUM_ROWS, VOCAB_SIZE)
    assert {len(each.token_ids) for each in found} == {2}
