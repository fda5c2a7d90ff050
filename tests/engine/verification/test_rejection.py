"""Exact distributions, by enumeration in fractions: every draft that can be drawn, every answer
that chance can give. Nothing here is sampled, so nothing here is a matter of tolerance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest

from drafters.tree import DraftTree, chain
from engine.verification.rejection import Rule, reject_chain, reject_tokens
from worlds.exact_laws import (
    ExactDistributions,
    ExactProbs,
    Model,
    always,
    completed,
    decisions,
    drawn_trees,
    emitted_law,
    exact,
    random_model,
)

CHAINS = [[1], [1, 1], [1, 1, 1]]
TREES = [[2], [3], [1, 2], [2, 1], [2, 2], [3, 1]]
CASES = [(reject_tokens, branching) for branching in CHAINS + TREES]
CASES += [(reject_chain, branching) for branching in CHAINS]


def assert_lossless(rule: Rule, branching: list[int], target: Model, draft: Model) -> None:
    law, _ = emitted_law(rule, drawn_trees(draft, branching), target, draft)
    num_tokens = len(branching) + 1
    assert completed(law, target, num_tokens) == completed({(): Fraction(1)}, target, num_tokens)


@pytest.mark.parametrize(("rule", "branching"), CASES)
@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_emitted_follows_the_target_exactly(
    rule: Rule, branching: list[int], zeros: bool
) -> None:
    for seed in range(2):
        target, draft = random_model(seed, 3, zeros), random_model(100 + seed, 3, zeros)
        assert_lossless(rule, branching, target, draft)


@pytest.mark.parametrize(("rule", "branching"), CASES)
def test_a_draft_model_equal_to_the_target_is_always_accepted(
    rule: Rule, branching: list[int]
) -> None:
    model = random_model(3, 3)
    assert_lossless(rule, branching, model, model)
    _, mean = emitted_law(rule, drawn_trees(model, branching), model, model)
    assert mean == len(branching)


@pytest.mark.parametrize("rule", [reject_tokens, reject_chain])
@pytest.mark.parametrize("tokens", [[0], [2, 1], [1, 1, 0]])
def test_drafts_that_were_chosen_are_accepted_as_often_as_the_target_writes_them(
    rule: Rule, tokens: list[int]
) -> None:
    target = random_model(5, 3)
    tree = chain(tokens)
    law, mean = emitted_law(rule, iter([(Fraction(1), tree)]), target, None)
    num_tokens = len(tokens) + 1
    assert completed(law, target, num_tokens) == completed({(): Fraction(1)}, target, num_tokens)
    expected, reach = Fraction(0), Fraction(1)
    for depth, token_id in enumerate(tokens):
        reach *= target(tuple(tokens[:depth])).of(token_id)
        expected += reach
    assert mean == expected


@pytest.mark.parametrize("rule", [reject_tokens, reject_chain])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_that_its_distribution_gives_nothing_was_chosen(rule: Rule, depth: int) -> None:
    """In a chain whose other tokens are drawn: a distribution that is told there bounds nothing."""
    target, drawn = random_model(10, 3), random_model(11, 3)
    nothing, text = exact(0, 3, 1), (0, 0)[: depth + 1]

    def draft(before: tuple[int, ...]) -> ExactProbs:
        return nothing if before == text[:depth] else drawn(before)

    def trees() -> Iterator[tuple[Fraction, DraftTree]]:
        """All chains of three, of which one token is always the same."""
        for first, second, third in itertools.product(range(3), repeat=3):
            tokens, weight = (first, second, third), Fraction(1)
            for at, token_id in enumerate(tokens):
                if tokens[:at] == text[:depth]:
                    weight *= token_id == text[depth]
                else:
                    weight *= draft(tokens[:at]).of(token_id)
            if weight:
                yield weight, chain(tokens)

    law, _ = emitted_law(rule, trees(), target, draft)
    assert completed(law, target, 4) == completed({(): Fraction(1)}, target, 4)


def test_chosen_trees_are_lossless_too() -> None:
    target = random_model(6, 3)
    tree = DraftTree([2, 0, 1, 0, 1], [-1, -1, 0, 1, 1], [0] * 5)
    law, _ = emitted_law(reject_tokens, iter([(Fraction(1), tree)]), target, None)
    assert completed(law, target, 3) == completed({(): Fraction(1)}, target, 3)


def test_one_draft_is_accepted_with_one_minus_the_total_variation() -> None:
    for seed in range(5):
        target, draft = random_model(seed, 4), random_model(50 + seed, 4)
        pairs = zip(target(()).values, draft(()).values, strict=True)
        overlap = sum(min(pair) for pair in pairs)
        for rule in (reject_tokens, reject_chain):
            _, mean = emitted_law(rule, drawn_trees(draft, [1]), target, draft)
            assert mean == overlap


def test_blocks_accept_more_than_tokens_do() -> None:
    """The example of Sun et al., figure 1: drafts of two from (2/3, 1/3), the target is (1/3, 2/3)."""
    target, draft = always(exact(1, 2)), always(exact(2, 1))
    means = [
        emitted_law(rule, drawn_trees(draft, [1, 1]), target, draft)[1]
        for rule in (reject_tokens, reject_chain)
    ]
    assert means == [Fraction(10, 9), Fraction(11, 9)]
    for seed in range(4):
        models = random_model(seed, 3), random_model(70 + seed, 3)
        by_token, by_block = (
            emitted_law(rule, drawn_trees(models[1], [1, 1, 1]), *models)[1]
            for rule in (reject_tokens, reject_chain)
        )
        assert by_block >= by_token


def test_blocks_refuse_trees() -> None:
    tree = DraftTree([0, 1], [-1, -1], [0, 0])
    distributions = ExactDistributions(tree, random_model(0, 3), None)
    with pytest.raises(ValueError, match="chains"):
        list(decisions(reject_chain, distributions))


def test_later_siblings_may_be_dropped_by_what_earlier_ones_are() -> None:
    target, draft = random_model(8, 3), random_model(9, 3)

    def trees() -> Iterator[tuple[Fraction, DraftTree]]:
        for weight, tree in drawn_trees(draft, [2, 1]):
            kept = [0, 2] if tree.token_ids[0] == 1 else [0, 1, 2, 3]
            yield weight, tree.subtree(kept)

    law, _ = emitted_law(reject_tokens, trees(), target, draft)
    assert completed(law, target, 3) == completed({(): Fraction(1)}, target, 3)


def test_a_draft_verified_only_if_its_token_is_likely_biases_the_text() -> None:
    """Why grants must not look at drawn tokens: this enumeration sees the bias where there is one."""
    target, draft = always(exact(5, 3, 2)), always(exact(2, 3, 5))

    def trees() -> Iterator[tuple[Fraction, DraftTree]]:
        for weight, tree in drawn_trees(draft, [1]):
            likely = draft(()).of(tree.token_ids[0]) >= Fraction(4, 10)
            yield weight, tree if likely else DraftTree()

    law, _ = emitted_law(reject_tokens, trees(), target, draft)
    first = completed(law, target, 2)
    marginal = [sum(p for text, p in first.items() if text[0] == t) for t in range(3)]
    assert marginal == [Fraction(55, 100), Fraction(15, 100), Fraction(30, 100)]
