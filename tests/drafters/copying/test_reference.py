"""Following a text along a reference that it mostly repeats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.copying.reference import Place, ReferenceAligner

REFERENCE = [*range(100, 140)]


def after(text: list[int], reference: list[int] = REFERENCE) -> ReferenceAligner:
    aligner = ReferenceAligner(reference)
    for token_id in text:
        aligner.append(token_id)
    return aligner


def test_starts_at_the_references_start_and_stays_in_step() -> None:
    assert after([]).places(1) == [Place(0, 0)]
    assert after(REFERENCE[:7]).places(3) == [Place(7, 7)]
    assert after(REFERENCE).places(3) == []


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
    aligner = ReferenceAligner(reference)
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
