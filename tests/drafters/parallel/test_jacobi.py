"""Jacobi decoding against its definition, over targets that are arbitrary functions of the text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftShape, Observation
from drafters.parallel.jacobi import CHANGED, FRESH, UNCHANGED, JacobiDrafter
from drafters.tree import chain
from worlds.lanes import examples
from worlds.simulated_target import Target, ask, decode, greedy, propose_once, random_target, tell

PROMPT = [5, 1, 2, 3, 1, 4]


def iterate(target: Target, text: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """One Jacobi iteration by the definition, and the token after the last guess."""
    return [target([*text, *guesses[:i]]) for i in range(len(guesses) + 1)]


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 5),
    order=st.integers(0, 3),
    window=st.integers(1, 9),
)
def test_every_draft_is_the_definitions_next_iterate(
    seed: int, vocab_size: int, order: int, window: int
) -> None:
    target = random_target(seed, vocab_size, order)
    run = decode(JacobiDrafter(), PROMPT, target, 24, max_nodes=64, options={"window": window})
    assert run.token_ids == greedy(target, PROMPT, len(run.token_ids) - len(PROMPT))
    end = len(PROMPT)
    for tree, after, num_emitted in zip(run.trees, run.trees[1:], run.num_emitted, strict=False):
        assert len(tree) == window
        refined = iterate(target, run.token_ids[:end], tree.token_ids)
        slid = refined[num_emitted:]
        assert list(after.token_ids[: len(slid)]) == slid
        end += num_emitted


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 10**6), vocab_size=st.integers(2, 4), window=st.integers(1, 9))
def test_after_r_steps_r_tokens_are_final_so_m_tokens_take_at_most_m(
    seed: int, vocab_size: int, window: int
) -> None:
    """The text's end never moves back, and tokens once emitted are those of greedy decoding."""
    target = random_target(seed, vocab_size, 2)
    expected = greedy(target, PROMPT, 40)[len(PROMPT) :]
    guesses = [0] * window
    for step in range(1, window + 1):
        guesses = iterate(target, PROMPT, guesses)[:window]
        assert guesses[:step] == expected[:step]  # the definition, over a block that stays
    run = decode(JacobiDrafter(), PROMPT, target, window, max_nodes=64, options={"window": window})
    assert len(run.num_emitted) <= window


def test_a_target_that_looks_at_nothing_is_solved_by_one_iteration() -> None:
    def by_position(token_ids: Sequence[int]) -> int:
        return len(token_ids) * 7 % 11 + 20

    run = decode(JacobiDrafter(), PROMPT, by_position, 40, options={"window": 8})
    # The first step refines all eight and yields the ninth: from then on everything is right, but
    # for the tokens that the window's end adds.
    assert run.num_emitted[0] == 1
    assert run.num_emitted[1] == 9
    assert sum(run.num_emitted) / len(run.num_emitted) > 4


def test_a_fixed_point_is_accepted_whole_with_the_bonus_token() -> None:
    def constant(_: Sequence[int]) -> int:
        return 4  # what the prompt ends with, so `last` guesses it from the start

    run = decode(JacobiDrafter(), PROMPT, constant, 18, options={"first_guess": "last"})
    assert set(run.num_emitted) == {9}


def test_first_guesses_follow_the_text_or_repeat_its_last_token() -> None:
    def guesses(first_guess: str) -> list[int]:
        options = {"window": 5, "first_guess": first_guess}
        tree = propose_once(JacobiDrafter(), [1, 2, 9, 3, 1, 4, 2], 8, options=options)
        return list(tree.token_ids)

    assert guesses("text") == [9, 3, 1, 4, 2]
    assert guesses("last") == [2] * 5


def test_the_window_is_bounded_by_nodes_and_depth() -> None:
    for max_nodes, depth, expected in ((3, 16, 3), (64, 2, 2), (64, 64, 8)):
        tree = propose_once(JacobiDrafter(), PROMPT, max_nodes, DraftShape(1, depth))
        assert len(tree) == expected
        assert tree.is_chain()


def _step(drafter: JacobiDrafter, text: Sequence[int]) -> tuple[list[int], list[int]]:
    tree = ask(drafter, text, 4)
    return list(tree.token_ids), list(tree.features)


def test_rows_that_were_not_verified_keep_their_guesses() -> None:
    drafter = JacobiDrafter()
    drafter.open("r", PROMPT, {"window": 4, "first_guess": "last"}, "")
    assert _step(drafter, PROMPT) == ([4, 4, 4, 4], [FRESH] * 4)
    # Only two of the four nodes had room; the first was right.
    drafter.observe([Observation("r", [*PROMPT, 4, 7], chain([4, 4]), [4, 7, 8], [0, 1], [4, 7])])
    assert _step(drafter, [*PROMPT, 4, 7]) == ([8, 4, 4, 4], [CHANGED, FRESH, FRESH, FRESH])
    # Nothing was verified: the guesses only slide on.
    tell(drafter, [*PROMPT, 4, 7, 9])
    assert _step(drafter, [*PROMPT, 4, 7, 9]) == ([4, 4, 4, 4], [FRESH] * 4)


def test_features_tell_guesses_that_stood_from_those_that_moved() -> None:
    drafter = JacobiDrafter()
    drafter.open("r", PROMPT, {"window": 3, "first_guess": "last"}, "")
    guesses, _ = _step(drafter, PROMPT)
    text = [*PROMPT, 6]
    drafter.observe([Observation("r", text, chain(guesses), [6, 4, 5, 8], [0], [6])])
    assert _step(drafter, text) == ([4, 5, 8], [UNCHANGED, CHANGED, CHANGED])
