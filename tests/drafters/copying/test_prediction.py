"""Drafting from what the client predicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftShape
from drafters.copying.prediction import Place, PredictionAligner, PredictionDrafter, run_feature
from drafters.tree import EMPTY, DraftTree
from worlds.simulated_target import ask, children_of, tell

PROMPT = [7, 8, 9]
BEFORE = [*range(100, 160)]
AFTER = [*BEFORE[:20], 1, 2, *BEFORE[21:40], *BEFORE[45:]]


def drafter_for(reference: list[int]) -> PredictionDrafter:
    drafter = PredictionDrafter()
    assert drafter.info.takes_prediction
    drafter.open("r", PROMPT, {}, "")
    drafter.predict("r", reference)
    return drafter


def propose(drafter: PredictionDrafter, text: list[int], num: int, width: int = 1) -> DraftTree:
    return ask(drafter, [*PROMPT, *text], num, DraftShape(width, 16))


def steps(after: list[int], width: int, num_nodes: int) -> int:
    """Steps that writing ``after`` takes when BEFORE was predicted."""
    drafter, text, count = drafter_for(BEFORE), [], 0
    while len(text) < len(after):
        tree = propose(drafter, text, num_nodes, width)
        coming = after[len(text) :]
        num_emitted = min(len(tree.follow(coming)) + 1, len(coming))
        text += coming[:num_emitted]
        tell(drafter, [*PROMPT, *text], num_emitted)
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
    assert children_of(tree) == [BEFORE[21], BEFORE[20]]


def test_without_a_prediction_nothing_is_drafted() -> None:
    drafter = PredictionDrafter()
    drafter.open("r", PROMPT, {}, "")
    assert propose(drafter, BEFORE[:4], 8) == EMPTY


def test_features_say_how_long_the_run_is_and_which_place() -> None:
    features = {run_feature(run, rank) for run in range(60) for rank in range(6)}
    assert features == set(range(32))
    tree = propose(drafter_for(BEFORE), BEFORE[:20], 3)
    assert list(tree.features) == [run_feature(20, 0), run_feature(21, 0), run_feature(22, 0)]


REFERENCE = [*range(100, 140)]


def after(text: list[int], reference: list[int] = REFERENCE) -> PredictionAligner:
    aligner = PredictionAligner(reference)
    for token_id in text:
        aligner.append(token_id)
    return aligner


@pytest.mark.parametrize(
    ("name", "text", "position"),
    [
        ("replaced", [*REFERENCE[:10], 1, *REFERENCE[11:13]], 13),
        ("replaced by more", [*REFERENCE[:10], 1, 2, 3, *REFERENCE[11:13]], 13),
        ("inserted", [*REFERENCE[:10], 1, 2, *REFERENCE[10:12]], 12),
        ("left out", [*REFERENCE[:10], *REFERENCE[15:17]], 17),
        ("moved far", [*REFERENCE[:3], *REFERENCE[30:32]], 32),
        ("begun late", REFERENCE[20:22], 22),
    ],
)
def test_finds_its_place_two_tokens_after_a_change(
    name: str, text: list[int], position: int
) -> None:
    assert after(text).places(1)[0].position == position, name


def test_one_token_after_a_deletion_is_enough_nearby() -> None:
    assert after([*REFERENCE[:10], REFERENCE[13]]).places(1)[0] == Place(14, 1)


def test_right_after_a_new_token_both_guesses_are_there() -> None:
    places = after([*REFERENCE[:10], 1]).places(4)
    assert places == [Place(11, 0), Place(10, 0)]  # replaced; inserted


def test_of_equal_matches_the_nearest_wins() -> None:
    block = [1, 2, 3, 4, 5]
    reference = [*block, 50, *block, 51, *block, 52]
    text = [*block, 50, *block[:2], 99, *block[3:]]
    assert after(text, reference).places(1)[0].position == 11


@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=60))
def test_places_are_always_inside_and_their_next_tokens_differ(
    reference: list[int], text: list[int]
) -> None:
    aligner = PredictionAligner(reference)
    for done in range(len(text) + 1):
        places = aligner.places(3)
        following = [reference[place.position] for place in places]
        assert len(set(following)) == len(following) <= 3
        for place in places:
            said = text[max(0, done - place.run) : done]
            expected = reference[max(0, place.position - place.run) : place.position]
            assert said[-8:] == expected[-8:]
        if done < len(text):
            aligner.append(text[done])
