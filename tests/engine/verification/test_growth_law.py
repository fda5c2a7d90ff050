"""Trees that a draft model grows level by level, or that are products of positions guessed apart, under a
budget, verified by rejection: every draw and every answer over three tokens, in fractions.

What policies grant is a function of the tree's shape, so a shape that tells something of the tokens
lets grants depend on them. Here grants are as unreasonable as functions of a shape
can be, and the emitted law is the target's all the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod

import pytest

from drafters.base import DraftRequest, DraftSampling, DraftShape
from drafters.model.growth import DraftGrowth, is_first_child, product_tree
from drafters.model.protocol import Candidates
from drafters.tree import ROOT, DraftTree
from engine.verification.rejection import reject_tokens
from worlds.exact_laws import (
    ExactProbs,
    Model,
    Text,
    completed,
    draws,
    emitted_law,
    exact,
    random_model,
)

pytestmark = pytest.mark.slow

DRAWN = DraftSampling(temperature=1.0, verification="rejection")
BUDGETS = [
    # width, depth, max_nodes, least survival of a node that is run
    (2, 2, 3, 0.0),
    (2, 2, 5, 0.0),
    (2, 2, 6, 0.0),
    (2, 3, 6, 0.4),
    (3, 2, 5, 0.0),
]


def by_rank(feature: int, confidence: float) -> float:
    """First children are accepted more often than others."""
    return confidence if is_first_child(feature) else 0.3


def grown_trees(
    model: Model, budget: tuple[int, int, int, float]
) -> Iterator[tuple[Fraction, DraftTree]]:
    """All trees that a growth can end in, with their probabilities."""
    width, depth, max_nodes, least = budget
    ask = DraftRequest("r", [0, 1], max_nodes, DraftShape(width, depth), DRAWN)
    pending: list[tuple[Fraction, list[Text]]] = [(Fraction(1), [])]
    while pending:
        weight, drawn = pending.pop()
        growth = DraftGrowth(ask, least, depth, by_rank)
        open_at = _grow(growth, model, drawn)
        if open_at is None:
            yield weight, growth.tree()
        else:
            possible = draws(model(open_at), growth.num_candidates)
            pending += [(weight * chance, [*drawn, tokens]) for chance, tokens in possible]


def _grow(growth: DraftGrowth, model: Model, drawn: Sequence[Text]) -> Text | None:
    """Grow by these draws, one per node that is run; the text at which the next one is missing."""
    left = iter(drawn)
    nodes = [ROOT]
    while nodes:
        found = []
        for node in nodes:
            text = _text_of(growth, node)
            tokens = next(left, None)
            if tokens is None:
                return text
            probs = model(text)
            sure = float(max(probs.values))
            found.append(Candidates(tokens, [sure] * len(tokens), probs))
        growth.add_level(nodes, found)
        nodes = list(growth.frontier)
        if nodes:
            growth.next_rows()
    return None


def _text_of(growth: DraftGrowth, node: int) -> Text:
    text: list[int] = []
    while node != ROOT:
        text.insert(0, growth.nodes.token_ids[node])
        node = growth.nodes.parents[node]
    return tuple(text)


def granted(tree: DraftTree) -> DraftTree:
    """So many of the first nodes as a random function of the shape says."""
    count = random.Random(str(list(tree.parents))).randrange(len(tree) + 1)
    return tree.subtree(range(count))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("zeros", [False, True])
def test_grown_trees_have_one_shape_and_leave_the_law_alone(
    budget: tuple[int, int, int, float], zeros: bool
) -> None:
    """With ``zeros`` the draft model rules out tokens, so that nodes lack children to draw."""
    target, draft = random_model(3, 3, zeros), random_model(104, 3, zeros)
    trees = list(grown_trees(draft, budget))
    assert len(trees) > 3
    assert sum(weight for weight, _ in trees) == 1
    assert len({tuple(tree.parents) for _, tree in trees}) == 1
    assert {len(tree) for _, tree in trees} == {budget[2]}
    num_tokens = max(max(tree.depths()) for _, tree in trees) + 1
    plain = completed({(): Fraction(1)}, target, num_tokens)
    for kept in (lambda tree: tree, granted):
        law, _ = emitted_law(
            reject_tokens, ((weight, kept(tree)) for weight, tree in trees), target, draft
        )
        assert completed(law, target, num_tokens) == plain


# Of the last two, the draft model's vocabulary lacks tokens of the target's.
POSITIONS = [
    [exact(3, 1, 2), exact(1, 4, 1)],
    [exact(1, 1, 1), exact(5, 2, 1), exact(1, 1, 6)],
    [exact(3, 0, 2), exact(0, 4, 1)],
    [exact(0, 0, 1), exact(5, 2, 0)],
]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("width", "max_nodes"), [(1, 3), (2, 3), (2, 6), (3, 5)])
def test_products_of_positions_have_one_shape_and_leave_the_law_alone(
    positions: list[ExactProbs], width: int, max_nodes: int
) -> None:
    target = random_model(3, 3)

    def draft(text: Text) -> ExactProbs:
        return positions[min(len(text), len(positions) - 1)]  # behind the last no token is drafted

    trees = list(drawn_products(positions, width, max_nodes))
    assert sum(weight for weight, _ in trees) == 1
    assert len({tuple(tree.parents) for _, tree in trees}) == 1
    assert all(tree.draft_probs.keys() == set(tree.parents) for _, tree in trees)
    num_tokens = len(positions) + 1
    plain = completed({(): Fraction(1)}, target, num_tokens)
    for kept in (lambda tree: tree, granted):
        law, _ = emitted_law(
            reject_tokens, ((weight, kept(tree)) for weight, tree in trees), target, draft
        )
        assert completed(law, target, num_tokens) == plain


def drawn_products(
    positions: Sequence[ExactProbs], width: int, max_nodes: int
) -> Iterator[tuple[Fraction, DraftTree]]:
    """All trees of what may be drawn at each position, once for all nodes that stand there."""
    shape = DraftShape(width, len(positions))
    for drawn in product(*(list(draws(probs, width)) for probs in positions)):
        levels = [
            Candidates(tokens, [float(max(probs.values))] * len(tokens), probs)
            for (_, tokens), probs in zip(drawn, positions, strict=True)
        ]
        weight = prod((chance for chance, _ in drawn), start=Fraction(1))
        yield weight, product_tree(levels, max_nodes, shape, by_rank)
