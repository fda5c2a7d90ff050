"""Merged distributions per context: the published example, and a table kept naively."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.contexts import advanced, levels, pack, window_mask
from drafters.tables.prob_tables import MAX_WAITING, Entry, ProbTable, TextTable, find

WHO, AM, BOB, MARY, TOM, SUE = range(6)


def table(max_contexts: int = 1024) -> ProbTable:
    return ProbTable(max_contexts)


def lookup(found: ProbTable, *context: int) -> tuple[int, bool, Entry] | None:
    return find(pack(context), levels((4, 3, 2)), found, TextTable(8))


def known(found: ProbTable, *context: int) -> dict[int, float]:
    hit = lookup(found, *context)
    assert hit is not None
    return dict(zip(hit[2].token_ids, hit[2].probs, strict=True))


def test_two_visits_merge_as_in_the_published_example() -> None:
    both = table()
    both.learn(pack([WHO, AM]), levels((4, 3, 2)), [BOB, MARY, TOM], [0.7, 0.2, 0.05])
    both.learn(pack([WHO, AM]), levels((4, 3, 2)), [MARY, BOB, SUE], [0.6, 0.3, 0.05])
    merged = known(both, WHO, AM)
    assert list(merged) == [BOB, MARY, TOM, SUE]
    assert list(merged.values()) == pytest.approx([0.5, 0.4, 0.025, 0.025])


def test_the_longest_known_context_answers() -> None:
    text = table()
    text.learn(pack([1, 2, 3, 4]), levels((4, 3, 2)), [5], [1.0])
    text.learn(pack([9, 9, 3, 4]), levels((4, 3, 2)), [6], [1.0])
    for context, length in (([1, 2, 3, 4], 4), ([8, 2, 3, 4], 3), ([8, 8, 3, 4], 2)):
        hit = lookup(text, *context)
        assert hit is not None
        assert hit[0] == length
    assert known(text, 8, 8, 3, 4) == {5: 0.5, 6: 0.5}
    assert lookup(text, 8, 4) is None


def test_a_text_that_is_shorter_than_a_context_does_not_reach_it() -> None:
    short, prompt = table(), TextTable(8)
    short.learn(pack([3]), levels((4, 3, 2)), [5], [1.0])
    prompt.learn(pack([3]), levels((4, 3, 2)), 5)
    assert len(short) == len(prompt) == 0
    assert find(pack([3]), levels((4, 3, 2)), short, prompt) is None


def test_the_prompt_answers_until_the_target_has_spoken_or_where_it_knows_more_context() -> None:
    target, prompt = table(), TextTable(1024)
    for token in (7, 8, 7, 7):
        prompt.learn(pack([0, 1, 2]), levels((3, 2)), token)

    def answer(*context: int) -> tuple[int, bool, dict[int, float]]:
        hit = find(pack(context), levels((3, 2)), target, prompt)
        assert hit is not None
        return hit[0], hit[1], dict(zip(hit[2].token_ids, hit[2].probs, strict=True))

    assert answer(9, 1, 2) == (2, True, {7: 0.75, 8: 0.25})
    target.learn(pack([1, 2]), levels((2,)), [5, 7], [0.6, 0.4])
    assert answer(9, 1, 2) == (2, False, {5: 0.6, 7: 0.4})
    assert answer(0, 1, 2) == (3, True, {7: 0.75, 8: 0.25})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=120))
def test_a_text_is_counted_newest_first_among_equals(pairs: list[tuple[int, int]]) -> None:
    counted = TextTable(1024)
    for context, token in pairs:
        counted.learn(pack([context]), levels((1,)), token)
    for context in range(4):
        seen = [token for each, token in pairs if each == context]
        entry = counted.get(pack([context]))
        if len(set(seen)) > 32:
            continue
        assert (entry is None) == (not seen)
        if entry is not None:
            order = sorted(set(seen), key=lambda t: (-seen.count(t), seen[::-1].index(t)))
            assert list(entry.token_ids) == order[:10]
            assert entry.probs == pytest.approx([seen.count(t) / len(seen) for t in order[:10]])


def test_a_texts_tables_are_bounded() -> None:
    counted, rng = TextTable(64), random.Random(0)
    for step in range(3000):
        counted.learn(pack([step % 7]), levels((1,)), step)
        counted.learn(pack([rng.randrange(10**6)]), levels((1,)), step)
        assert len(counted) <= 64
    newest = counted.get(pack([2999 % 7]))
    assert newest is not None
    assert newest.num_visits == 32
    assert newest.token_ids[0] == 2999


def test_contexts_are_bounded_and_those_in_use_stay() -> None:
    small, rng = table(64), random.Random(0)
    for step in range(500):
        small.learn(pack([1, 2]), levels((2,)), [3], [1.0])
        small.learn(pack([10 + step, rng.randrange(9)]), levels((2,)), [4], [1.0])
        assert len(small) <= 64
    assert known(small, 1, 2) == {3: pytest.approx(1.0)}
    assert all(lookup(small, 10, token) is None for token in range(9))


DISTRIBUTIONS = st.dictionaries(st.integers(0, 15), st.floats(0.01, 1), min_size=1, max_size=10)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), DISTRIBUTIONS), max_size=25))
def test_equals_a_table_kept_naively(visits: list[tuple[int, int, dict[int, float]]]) -> None:
    """The naive one keeps running means as nested dictionaries, straight from the definition."""
    incremental = table()
    naive: dict[tuple[int, ...], tuple[int, dict[int, float]]] = {}
    text = [0, 1]
    for a, b, distribution in visits:
        text += [a, b]
        best = sorted(distribution, key=lambda token: -distribution[token])
        incremental.learn(pack(text[-4:]), levels((4, 3, 2)), best, [distribution[t] for t in best])
        for length in (4, 3, 2):
            key = tuple(text[-length:])
            k, old = naive.get(key, (0, {}))
            new = {
                t: k / (k + 1) * old.get(t, 0) + distribution.get(t, 0) / (k + 1)
                for t in old | distribution
            }
            kept = sorted(new, key=lambda token: -new[token])[:10]
            if len(new) > 10 and new[kept[9]] - sorted(new.values())[-11] < 1e-9:
                return  # a tie at the border: either choice is right
            naive[key] = (k + 1, {t: new[t] for t in kept})
            assert incremental.get(pack(key)) is not None  # merges what waits
            if k:
                break  # shorter contexts are read where this one is not known
    for key, (k, expected) in naive.items():
        entry = incremental.get(pack(key))
        assert entry is not None
        assert entry.num_visits == k
        assert dict(zip(entry.token_ids, entry.probs, strict=True)) == pytest.approx(expected)
        assert list(entry.probs) == sorted(entry.probs, reverse=True)


def test_what_waits_is_merged_when_it_is_read_or_too_much_waits() -> None:
    for num_others in (0, MAX_WAITING + 10):
        kept = table(100_000)
        rows = [{1: 0.6, 2: 0.4}, {2: 0.8, 3: 0.2}, {2: 1.0}]
        for row in rows:
            kept.learn(pack([5, 6]), levels((2,)), list(row), list(row.values()))
        for other in range(num_others):
            kept.learn(pack([7, other % 9]), levels((2,)), [1], [1.0])
        assert known(kept, 5, 6) == pytest.approx({2: 2.2 / 3, 1: 0.2, 3: 0.2 / 3})
        assert known(kept, 5, 6) == pytest.approx({2: 2.2 / 3, 1: 0.2, 3: 0.2 / 3})


@pytest.mark.parametrize("max_contexts", [200, 100_000])
def test_a_text_learned_at_once_is_what_its_tokens_are_one_by_one(max_contexts: int) -> None:
    rng = random.Random(3)
    lengths = levels((3, 2, 1))
    token_ids = [rng.choice((*range(50), 300_000, 300_001)) for _ in range(400)]
    at_once, one_by_one = TextTable(max_contexts), TextTable(max_contexts)
    window = 0
    for token_id in token_ids:
        one_by_one.learn(window, lengths, token_id)
        window = advanced(window, token_id, window_mask(3))
    at_once.learn_text(0, lengths, token_ids[:150])
    at_once.learn_text(pack(token_ids[147:150]), lengths, token_ids[150:])
    at_once.learn_text(window, lengths, [])
    assert len(at_once) == len(one_by_one)
    for first in range(len(token_ids)):
        for num in (1, 2, 3):
            key = pack(token_ids[first : first + num])
            assert at_once.get(key) == one_by_one.get(key)
