"""The figures that rules ask for: right, and read for all requests together."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from drafters.tree import DraftTree
from engine.transfer import read_now
from engine.verification import probs as module
from engine.verification.probs import (
    Questions,
    TensorDistributions,
    begin_distributions,
    decide,
    sample_all,
)
from engine.verification.rejection import Rule, reject_chain, reject_tokens

VOCAB = 7


def never(row: int, chance: float) -> bool:
    """No draft is accepted that may be refused."""
    del row
    return chance >= 1


def tree(parents: list[int], seed: int) -> DraftTree:
    """Distinct tokens, sampled from something."""
    generator = torch.Generator().manual_seed(seed)
    sampled = {parent: torch.rand(VOCAB, generator=generator).softmax(0) for parent in parents}
    return DraftTree(list(range(len(parents))), parents, [0] * len(parents), sampled)


def step_distributions(
    probs: torch.Tensor, trees: list[DraftTree]
) -> tuple[list[TensorDistributions], Questions]:
    return read_now(lambda readback: begin_distributions(probs, trees, readback))


@pytest.mark.parametrize(
    ("rule", "parents", "most"),
    [(reject_tokens, [-1, 0, 1], 1), (reject_chain, [-1, 0, 1], 1), (reject_tokens, [-1] * 3, 5)],
)
def test_a_step_waits_no_more_often_for_many_requests_than_for_one(
    rule: Rule, parents: list[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []
    answer = module._answer
    monkeypatch.setattr(
        module, "_answer", lambda asked: answers.append(len(asked)) or answer(asked)
    )
    trees = [tree(parents, seed) for seed in range(9)]
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(len(trees) * 4, VOCAB, dtype=torch.float64, generator=generator).softmax(-1)
    distributions, questions = step_distributions(target, trees)
    runs = [partial(rule, each, own, never) for each, own in zip(trees, distributions, strict=True)]
    decisions = decide(runs, questions)
    assert len(decisions) == 9
    assert len(answers) <= most
    assert sum(answers) > len(answers)
    tokens = sample_all([each.last for each in decisions], [0.5] * 9)
    assert all(0 <= token < VOCAB for token in tokens)


def test_what_a_refused_draft_leaves() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2, 0, 0, 0, 0]] * 2, dtype=torch.float64)
    drafted = torch.tensor([0.25, 0.75, 0, 0, 0, 0, 0], dtype=torch.float64)
    refused = DraftTree([1], [-1], [0], {-1: drafted})
    (own,), questions = step_distributions(target, [refused])
    (decision,) = decide([partial(reject_tokens, refused, own, never)], questions)
    assert decision.path == [0]
    # max(0, target - draft) is (1/4, 0, 1/5), of which the first is five ninths.
    assert sample_all([decision.last] * 3, [0.0, 0.55, 0.56]) == [0, 0, 2]


def test_where_nothing_is_left_the_target_stands() -> None:
    target = torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0]] * 2, dtype=torch.float64)
    same = DraftTree([1], [-1], [0], {-1: target[0].clone()})
    (own,), questions = step_distributions(target, [same])
    (decision,) = decide([partial(reject_tokens, same, own, lambda *_: False)], questions)
    assert sample_all([decision.last] * 2, [0.49, 0.51]) == [0, 1]
