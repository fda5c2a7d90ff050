"""``nasd_one_level``, ``nasd``: worked examples, the original's errors corrected, trees, bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftShape, Observation
from drafters.contexts import pack
from drafters.tables.nasd import (
    MAX_CONTINUATIONS,
    NasdDrafter,
    NasdOneLevelDrafter,
    NgramCounts,
    share_feature,
)
from drafters.tree import EMPTY, ROOT, chain
from worlds.simulated_target import ask, propose_once

THE, CAPITAL, OF, FRANCE, IS, PARIS, SPAIN = range(10, 17)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def chain_of(drafter, token_ids, num_tokens, **options):
    tree = propose_once(drafter, token_ids, num_tokens, DraftShape(1, 64), options)
    assert tree.is_chain()
    return list(tree.token_ids)


def naive_next(token_ids, context):
    """Returns the token that followed ``context`` most often in the text, the latest of equals; None:
    there is none."""
    counts, newest = Counter(), {}
    for end in range(len(context), len(token_ids)):
        if token_ids[end - len(context) : end] == context:
            counts[token_ids[end]] += 1
            newest[token_ids[end]] = end
    return max(counts, key=lambda token_id: (counts[token_id], newest[token_id]), default=None)


def naive_chain(token_ids, num_tokens, lengths):
    """Drafted tokens are context for the next one; they are not counted."""
    extended = list(token_ids)
    for _ in range(num_tokens):
        contexts = [extended[-length:] for length in lengths if length <= len(extended)]
        known = (naive_next(token_ids, context) for context in contexts)
        token_id = next((token_id for token_id in known if token_id is not None), None)
        if token_id is None:
            break
        extended.append(token_id)
    return extended[len(token_ids) :]


def test_context_is_the_last_two_tokens_at_n_3():
    text = [THE, CAPITAL, OF, FRANCE, IS, PARIS, THE, CAPITAL, OF]
    assert chain_of(NasdOneLevelDrafter(), text, 3, n=3) == [FRANCE, IS, PARIS]


def test_one_level_stops_where_back_off_goes_on():
    text = [THE, CAPITAL, OF, FRANCE, 99, OF]
    assert chain_of(NasdOneLevelDrafter(), text, 1, n=3) == []
    assert chain_of(NasdDrafter(), text, 1, n=3) == [FRANCE]


@given(texts, st.integers(2, 5), st.integers(1, 4))
def test_chain_is_the_argmax_chain_of_a_naive_reference(token_ids, n, min_context):
    min_context = min(min_context, n - 1)
    one_level = naive_chain(token_ids, 5, [n - 1])
    assert chain_of(NasdOneLevelDrafter(), token_ids, 5, n=n) == one_level
    lengths = range(n - 1, min_context - 1, -1)
    expected = naive_chain(token_ids, 5, lengths)
    assert chain_of(NasdDrafter(), token_ids, 5, n=n, min_context=min_context) == expected


def test_siblings_are_ordered_by_count_and_shares_become_features():
    text = [1, 5, 1, 6, 1, 6, 1, 7, 1, 6, 1, 5, 1]
    tree = propose_once(NasdOneLevelDrafter(), text, 3, DraftShape(3, 1), {"n": 2})
    assert list(tree.token_ids) == [6, 5, 7]
    assert list(tree.features) == [share_feature(1, count / 7) for count in (3, 2, 1)]


def test_trees_fill_up_with_continuations_of_shorter_contexts():
    text = [1, 2, 3, 9, 2, 4, 1, 2]
    tree = propose_once(NasdDrafter(), text, 2, DraftShape(2, 1), {"n": 3})
    assert list(tree.token_ids) == [3, 4]
    assert list(tree.parents) == [ROOT, ROOT]
    assert list(tree.features) == [share_feature(2, 0.5), share_feature(1, 0.5 * 1 / 3)]


def observe_row(drafter, token_ids, emitted, top_token_ids, tree, path):
    rows = [token_ids[-1], *tree.token_ids]
    token_ids.extend(emitted)
    drafter.observe([Observation("r", token_ids, tree, rows, path, emitted, top_token_ids)])


def first_draft(drafter, token_ids, width=1):
    return list(ask(drafter, token_ids, width, DraftShape(width, 1)).token_ids)


ONE_ROW = (EMPTY, (0,))


@pytest.mark.parametrize(
    ("top_k", "steps", "width", "expected"),
    [
        (3, [([5], [[5, 6, 7]], *ONE_ROW), ([1], [[1]], *ONE_ROW)], 4, [5, 6, 7]),
        (2, [([8], [[6, 7]], *ONE_ROW), ([1], [[1]], *ONE_ROW)], 1, [8]),
        (1, [([5, 1], [[5, 6, 7], [1]], chain([5]), (0, 1))], 4, [5]),
        (1, [([5], [[5], [6], [7]], chain([5, 6]), (0, 1, 2))], 1, []),
    ],
    ids=["best first", "emitted outweighs", "as many as asked for", "a trimmed run"],
)
def test_filler_is_counted_beside_what_was_emitted(top_k, steps, width, expected):
    drafter = NasdOneLevelDrafter()
    token_ids = [1]
    drafter.open("r", token_ids, {"n": 2, "filler_top_k": top_k}, "")
    assert drafter.num_top_tokens("r") == top_k
    for emitted, top_token_ids, tree, path in steps:
        observe_row(drafter, token_ids, emitted, top_token_ids, tree, path)
    assert first_draft(drafter, token_ids, width) == expected


def test_filler_is_learned_at_every_row_of_the_path_under_the_tokens_before_it():
    """Row 1 is the accepted draft 5: its top tokens follow 5, not 1 and not the token emitted."""
    drafter = NasdOneLevelDrafter()
    token_ids = [1]
    drafter.open("r", token_ids, {"n": 2, "filler_top_k": 2}, "")
    tree = chain([5, 9])
    observe_row(drafter, token_ids, [5, 6], [[5, 2], [6, 3], [4, 4]], tree, (0, 1))
    assert first_draft(drafter, [*token_ids, 5], width=4) == [6, 3]
    assert first_draft(drafter, [*token_ids, 5, 1], width=4) == [5, 2]
    assert first_draft(drafter, [*token_ids, 5, 1, 9], width=4) == []  # rejected: not learned


def test_unknown_contexts_draft_seen_tokens_when_asked_and_repeatably():
    text = [1, 2, 3, 4]
    assert chain_of(NasdDrafter(), text, 6) == []
    first = chain_of(NasdDrafter(), text, 6, stop_if_unknown=False)
    assert len(first) == 6
    assert set(first) <= set(text)
    assert first == chain_of(NasdDrafter(), text, 6, stop_if_unknown=False)


def test_contexts_are_bounded_and_the_ones_in_use_survive():
    counts = NgramCounts((1,), max_contexts=100)
    for i in range(1000, 11_000):
        counts.add(pack([i]), 1)
        if i % 10 == 0:
            counts.add(pack([7]), 8)
        assert len(counts) <= 100
    assert counts.best(pack([7]))[0][0] == 8
    assert counts.best(pack([1000])) == []
    assert counts.best(pack([10_999]))[0][0] == 1


def test_continuations_of_a_context_are_bounded_and_still_learn():
    counts = NgramCounts((1,), max_contexts=100)
    for token_id in range(100):
        counts.add(pack([1]), token_id)
    found = counts.likeliest(pack([1]), 100)
    assert [token_id for token_id, _, _ in found] == list(range(99, 99 - MAX_CONTINUATIONS, -1))
    counts.add(pack([1]), 99)
    for token_id in range(200, 240):
        counts.add(pack([1]), token_id)
    assert counts.best(pack([1]))[0][0] == 99


@given(texts)
def test_the_likeliest_are_ordered_and_begin_with_the_best(token_ids):
    counts = NgramCounts((2, 1), max_contexts=100)
    for end in range(1, len(token_ids)):
        counts.add(pack(token_ids[:end][-2:]), token_ids[end])
    window = pack(token_ids[-2:])
    found = counts.likeliest(window, 8)
    shares = [share for _, _, share in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) < 1
    if found:
        assert found[0] == pytest.approx(counts.best(window)[0])
