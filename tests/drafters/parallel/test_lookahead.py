"""Lookahead decoding against its recipe, its worked examples and its bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape, Observation
from drafters.parallel.lookahead import (
    WINDOW_FEATURE,
    LookaheadDrafter,
    LookaheadState,
    LookaheadWindow,
    NgramPool,
    fit,
    num_window_nodes,
)
from drafters.tree import EMPTY, TreeBuilder
from worlds.lanes import examples
from worlds.lookahead_reference import ReferenceLookahead
from worlds.simulated_target import (
    Target,
    check_tree,
    decode,
    greedy,
    node_paths,
    propose_once,
    random_target,
    verify_step,
)

WIDE = DraftShape(64, 64)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def alphabet(token_ids: Sequence[int]) -> int:
    return token_ids[-1] + 1


def word(letters: str) -> tuple[int, ...]:
    return tuple(map(ord, letters))


def state(prompt: Sequence[int] = PROMPT, **options: bool | int) -> LookaheadState:
    drafter = LookaheadDrafter()
    return LookaheadState(prompt, drafter.info.resolve(options))


def observed(text: Sequence[int], tree, target: Target) -> Observation:
    """One verification of ``tree``, row by row."""
    path, emitted = verify_step(tree, text, target)
    rows = [target(text), *(target([*text, *each]) for each in node_paths(tree))]
    return Observation("r", [*text, *emitted], tree, rows, path, emitted)


# --- the recipe ---


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 6),
    order=st.integers(0, 3),
    width=st.integers(1, 6),
    n=st.integers(2, 6),
    num_guesses=st.integers(1, 4),
    pool_from_prompt=st.booleans(),
)
def test_every_step_is_the_naive_recipes(
    seed: int,
    vocab_size: int,
    order: int,
    width: int,
    n: int,
    num_guesses: int,
    pool_from_prompt: bool,
) -> None:
    """Window, pool, draft and emitted tokens, step by step."""
    target = random_target(seed, vocab_size, order)
    prompt = [token_id % vocab_size for token_id in PROMPT]
    options = {"window": width, "ngram": n, "guesses": num_guesses}
    mine = state(prompt, **options, pool_from_prompt=pool_from_prompt)
    row0 = mine._window.levels[0]
    assert len(row0) == width + n - 3
    reference = ReferenceLookahead(row0, width, n, num_guesses)
    if pool_from_prompt:
        for start in range(len(prompt) - n + 1):
            reference.insert(prompt[start : start + n])
    text = list(prompt)
    for _ in range(12):
        tree = mine.propose(DraftRequest("r", text, 10**4, WIDE))
        check_tree(tree, 10**4, WIDE)
        assert set(node_paths(tree)) == reference.paths(text[-1])
        seen = observed(text, tree, target)
        assert list(seen.emitted_token_ids) == reference.step(text, target)
        mine.observe(seen)
        assert mine._window.levels == reference.rows
        text = list(seen.token_ids)
        for token_id in range(vocab_size):
            newest_first = reference.guesses(token_id)[::-1]
            assert mine._pool.newest(token_id, 99) == newest_first
    assert text == greedy(target, prompt, len(text) - len(prompt))


def _advance_with_new_tokens(window: LookaheadWindow, _counter: list[int] = [1000]) -> None:  # noqa: B006
    builder = TreeBuilder()
    window.add_to(builder, 0)
    tree = builder.best(999)
    _counter[0] += 1000
    window.advance(0, tree, range(_counter[0], _counter[0] + len(tree) + 1))


def test_the_worked_example_of_the_alphabet() -> None:
    """ABC with CDEF, CDFE and CDFG in the pool: DEF is accepted, and G comes on top of it."""
    mine = state(word("ABC"), window=3, ngram=4, guesses=7, pool_from_prompt=False)
    for ngram in ("CDEF", "CDFE", "CDFG"):
        mine._pool.insert(ord(ngram[0]), word(ngram[1:]))
    tree = mine.propose(DraftRequest("r", word("ABC"), 64, WIDE))
    assert set(node_paths(tree)) >= {word("DEF"), word("DFE"), word("DFG")}
    seen = observed(list(word("ABC")), tree, alphabet)
    assert tuple(seen.emitted_token_ids) == word("DEFG")


def test_it_learns_ngrams_that_the_text_has_never_shown() -> None:
    """The prompt repeats nothing, nor does the text within a period of 61."""

    def walk(token_ids: Sequence[int]) -> int:
        return token_ids[-1] * 2 % 61

    prompt = [10, 3, 48, 27, 33, 7, 55]
    run = decode(LookaheadDrafter(), prompt, walk, 50, max_nodes=64, shape=WIDE)
    assert len(set(run.token_ids[len(prompt) :][:50])) == 50
    assert sum(run.num_emitted) / len(run.num_emitted) > 2.0
    assert max(run.num_emitted) >= 5


# --- bounds ---


@settings(max_examples=examples(200))
@given(st.integers(0, 80), st.integers(1, 60), st.integers(2, 8), st.integers(1, 60))
def test_sizes_fit_and_give_way_in_order(
    max_nodes: int, width: int, n: int, num_guesses: int
) -> None:
    fitting, num_fitting = fit(max_nodes, width, n, num_guesses)
    needed = num_window_nodes(fitting, n) if fitting else 0
    if fitting:
        assert needed + num_fitting * (n - 1) <= max_nodes
    if fitting < width:
        # One column more would leave no room for any guess.
        assert num_window_nodes(fitting + 1, n) + n - 1 > max_nodes
    if num_fitting < num_guesses:
        assert needed + (num_fitting + 1) * (n - 1) > max_nodes


def test_window_nodes_are_counted_over_the_warm_up_too() -> None:
    for width in range(1, 9):
        for n in range(2, 9):
            window = LookaheadWindow(width, n, range(10**6, 2 * 10**6))
            most = 0
            for _ in range(n + 1):
                builder = TreeBuilder()
                window.add_to(builder, 0)
                most = max(most, len(builder.best(999)))
                _advance_with_new_tokens(window)
            assert most == num_window_nodes(width, n)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 9),
    budgets=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=12),
    cut=st.integers(0, 40),
)
def test_any_budget_and_any_cut_leave_it_sound_and_the_text_greedy(
    seed: int, vocab_size: int, budgets: list[tuple[int, int]], cut: int
) -> None:
    """Budgets change from step to step, and blocks run short after the grant."""
    target = random_target(seed, vocab_size, 2)
    prompt = [token_id % vocab_size for token_id in PROMPT]
    mine = state(prompt, window=4, ngram=4, guesses=3)
    text = list(prompt)
    for max_nodes, depth in budgets:
        shape = DraftShape(64, depth)
        tree = mine.propose(DraftRequest("r", text, max_nodes, shape))
        check_tree(tree, max_nodes, shape)
        tree = tree.subtree(range(min(cut, len(tree))))
        seen = observed(text, tree, target)
        mine.observe(seen)
        text = list(seen.token_ids)
    assert text == greedy(target, prompt, len(text) - len(prompt))


def test_a_window_stays_where_its_rows_were_not_all_verified() -> None:
    mine = state(window=3, ngram=3)
    text = list(PROMPT)
    for _ in range(2):
        tree = mine.propose(DraftRequest("r", text, 64, WIDE))
        mine.observe(seen := observed(text, tree, alphabet))
        text = list(seen.token_ids)
    before = deepcopy(mine._window.levels)
    tree = mine.propose(DraftRequest("r", text, 64, WIDE))
    mine.observe(observed(text, tree.subtree(range(len(tree) - 1)), alphabet))
    assert mine._window.levels == before
    mine.observe(observed([*text, 1], EMPTY, alphabet))
    assert mine._window.levels == before


def test_columns_come_and_go_at_the_end() -> None:
    window = LookaheadWindow(4, 3, [5, 6, 7])
    _advance_with_new_tokens(window)
    wide = deepcopy(window.levels)
    window.resize(2)
    assert window.levels == [wide[0][:1], wide[1][:2]]
    window.resize(4)
    again = window.levels
    assert [level[: len(cut)] for level, cut in zip(again, (wide[0][:1], wide[1][:2]), strict=True)]
    assert [len(level) for level in again] == [3, 4]
    assert again[0][:1] == wide[0][:1]
    assert again[1][:2] == wide[1][:2]
    assert set(again[0][1:] + again[1][2:]) <= {5, 6, 7}


# --- randomness and features ---


def test_the_first_window_is_random_by_the_prompt_alone() -> None:
    random.seed(1)
    before = random.getstate()
    first = propose_once(LookaheadDrafter(), PROMPT, 64, WIDE)
    assert random.getstate() == before
    random.seed(2)
    assert propose_once(LookaheadDrafter(), PROMPT, 64, WIDE) == first
    other = propose_once(LookaheadDrafter(), [*PROMPT[:-1], 8, 5], 64, WIDE)
    assert other != first
    assert set(first.token_ids) <= set(PROMPT)


def test_features_tell_guesses_by_rank_and_window_rows_apart() -> None:
    mine = state([7, 1, 2], window=2, ngram=3, pool_from_prompt=False)
    for token_id in (30, 40, 50):
        mine._pool.insert(2, (token_id, 9))
    tree = mine.propose(DraftRequest("r", [7, 1, 2], 64, WIDE))
    by_path = dict(zip(node_paths(tree), tree.features, strict=True))
    assert [by_path[token_id, 9] for token_id in (50, 40, 30)] == [0, 1, 2]
    assert {by_path[path] for path in by_path if path[0] in (7, 1, 2)} == {WINDOW_FEATURE}


def test_one_token_prompts_and_prompts_without_ngrams_draft() -> None:
    def circle(token_ids: Sequence[int]) -> int:
        return (token_ids[-1] + 1) % 8

    for prompt in ([4], [4, 4]):
        run = decode(LookaheadDrafter(), prompt, circle, 30, max_nodes=64, shape=WIDE)
        assert run.num_accepted > 0


def test_keys_are_bounded_and_the_one_not_inserted_to_for_longest_goes() -> None:
    pool = NgramPool(2, num_per_key=2, max_keys=2)
    for key in (1, 2, 1, 3):
        pool.insert(key, (9,))
    assert (pool.newest(1, 9), pool.newest(2, 9), pool.newest(3, 9)) == ([(9,)], [], [(9,)])


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 5), st.integers(1, 4))
def test_a_text_gives_the_newest_of_all_its_ngrams(text: list[int], n: int, num: int) -> None:
    pool = NgramPool(n, num, max_keys=99)
    pool.insert_text(text)
    for key in range(4):
        starts = [i for i in range(len(text) - n, -1, -1) if text[i] == key]
        distinct = list(dict.fromkeys(tuple(text[i + 1 : i + n]) for i in starts))
        assert pool.newest(key, num) == distinct[:num]
