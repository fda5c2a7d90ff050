"""Drafting from what the client predicts."""

from __future__ import annotations

import pytest

from drafters.base import DraftRequest, DraftShape, Observation, ReferenceDrafter
from drafters.copying.prediction import PredictionDrafter, run_feature
from drafters.tree import EMPTY, DraftTree

PROMPT = [7, 8, 9]
BEFORE = [*range(100, 160)]
AFTER = [*BEFORE[:20], 1, 2, *BEFORE[21:40], *BEFORE[45:]]


def drafter_for(reference: list[int]) -> PredictionDrafter:
    drafter = PredictionDrafter()
    assert isinstance(drafter, ReferenceDrafter)
    drafter.open("r", PROMPT, {}, "")
    drafter.refer("r", reference)
    return drafter


def propose(drafter: PredictionDrafter, text: list[int], num: int, width: int = 1) -> DraftTree:
    shape = DraftShape(width, 16)
    (tree,) = drafter.propose([DraftRequest("r", [*PROMPT, *text], num, shape)])
    tree.validate()
    assert len(tree) <= num
    return tree


def steps(after: list[int], width: int, num_nodes: int) -> int:
    """Steps that writing ``after`` takes when BEFORE was predicted."""
    drafter, text, count = drafter_for(BEFORE), [], 0
    while len(text) < len(after):
        tree = propose(drafter, text, num_nodes, width)
        node, coming = -1, after[len(text) :]
        emitted = []
        for token_id in coming:
            emitted.append(token_id)
            children = [
                i
                for i, (parent, child) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
                if parent == node and child == token_id
            ]
            if not children:
                break
            (node,) = children
        text += emitted
        seen = Observation("r", [*PROMPT, *text], EMPTY, emitted, range(len(emitted)), emitted)
        drafter.observe([seen])
        count += 1
    return count


def test_a_right_prediction_is_drafted_to_its_end() -> None:
    drafter = drafter_for(BEFORE)
    assert list(propose(drafter, [], 5).token_ids) == BEFORE[:5]
    assert list(propose(drafter, BEFORE[:57], 16).token_ids) == BEFORE[57:]
    assert propose(drafter, BEFORE, 16) == EMPTY


def test_changes_cost_a_step_or_two_each() -> None:
    # Without a change 60 tokens at 17 a step take 4 steps; here are two changes.
    assert steps(AFTER, width=1, num_nodes=16) <= 8


def test_a_tree_saves_steps_where_it_is_uncertain_what_changed() -> None:
    # Every tenth token something new comes in between: a chain takes it for a replacement.
    after = [t for at, token in enumerate(BEFORE) for t in ([1 + at] * (at % 10 == 9) + [token])]
    assert steps(after, width=2, num_nodes=24) < steps(after, width=1, num_nodes=24)


def test_a_tree_follows_several_places() -> None:
    tree = propose(drafter_for(BEFORE), [*BEFORE[:20], 1], 9, width=3)
    firsts = [t for t, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == -1]
    assert firsts == [BEFORE[21], BEFORE[20]]


def test_without_a_prediction_nothing_is_drafted() -> None:
    drafter = PredictionDrafter()
    drafter.open("r", PROMPT, {}, "")
    assert propose(drafter, BEFORE[:4], 8) == EMPTY


def test_features_say_how_long_the_run_is_and_which_place() -> None:
    features = {run_feature(run, rank) for run in range(60) for rank in range(6)}
    assert features == set(range(32))
    tree = propose(drafter_for(BEFORE), BEFORE[:20], 3)
    assert list(tree.features) == [run_feature(20, 0), run_feature(21, 0), run_feature(22, 0)]


def test_only_open_requests_have_predictions() -> None:
    drafter = PredictionDrafter()
    with pytest.raises(KeyError):
        drafter.refer("r", BEFORE)
