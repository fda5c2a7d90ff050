"""``nasd_one_level``, ``nasd``: worked examples, the original's errors corrected, trees, bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape, Observation
from drafters.contexts import pack
from drafters.tables.nasd import (
    MAX_CONTINUATIONS,
    NasdDrafter,
    NasdOneLevelDrafter,
    NgramCounts,
    share_feature,
)
from drafters.tree import EMPTY, ROOT, chain
from worlds.simulated_target import decode, propose_once

THE, CAPITAL, OF, FRANCE, IS, PARIS, SPAIN = range(10, 17)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def chain_of(drafter, token_ids, num_tokens, **options):
    tree = propose_once(drafter, token_ids, num_tokens, DraftShape(1, 64), options)
    assert tree.is_chain()
    return list(tree.token_ids)


def naive_next(token_ids, context):
    """What followed ``context`` most often in the text, and last among equals; None: nothing."""
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


def test_prompt_of_n_tokens_teaches_its_one_context_per_level():
    """The original's own example, n = 4 on 1 2 3 4 5, plus the one-token contexts it left out."""
    for text, expected in (([1, 2, 3, 4, 5, 1, 2, 3], 4), ([1, 2, 3, 4, 5, 9, 2, 3], 4)):
        assert chain_of(NasdDrafter(), text, 1, n=4) == [expected]
    assert chain_of(NasdDrafter(), [1, 2, 3, 4, 5, 9, 9, 3], 1, n=4) == [4]


def test_bigrams_are_known_at_n_2():
    """The original's multi-level store had an empty range of levels at n = 2: it never knew any."""
    assert chain_of(NasdDrafter(), [7, 8, 7], 3, n=2, min_context=1) == [8, 7, 8]


def test_text_shorter_than_every_context_is_unknown_not_an_error():
    """The original raised KeyError for a level that nothing had been learned for."""
    for length in range(1, 4):
        assert chain_of(NasdDrafter(), [1, 2, 3][:length], 4, n=8) == []


def test_first_complete_context_is_learned_while_decoding():
    """The original skipped updates until n tokens were there, one more than the context needs."""
    drafter = NasdOneLevelDrafter()
    token_ids = [1, 2]
    drafter.open("r", token_ids, {"n": 3}, "")
    token_ids += [3]
    drafter.observe([Observation("r", token_ids, EMPTY, [2], [0], [3])])
    token_ids += [1, 2]
    drafter.observe([Observation("r", token_ids, EMPTY, [3], [0], [1, 2])])
    (tree,) = drafter.propose([DraftRequest("r", token_ids, 1, DraftShape())])
    assert list(tree.token_ids) == [3]


def test_highest_count_wins_and_ties_go_to_the_one_counted_last():
    drafter = NasdOneLevelDrafter()
    assert chain_of(drafter, [1, 5, 1, 6, 1], 1, n=2) == [6]
    assert chain_of(drafter, [1, 5, 1, 6, 1, 5, 1], 1, n=2) == [5]
    assert chain_of(drafter, [1, 5, 1, 5, 1, 6, 1], 1, n=2) == [5]


@given(texts, st.integers(2, 5), st.integers(1, 4))
def test_chain_is_the_argmax_chain_of_a_naive_reference(token_ids, n, min_context):
    min_context = min(min_context, n - 1)
    one_level = naive_chain(token_ids, 5, [n - 1])
    assert chain_of(NasdOneLevelDrafter(), token_ids, 5, n=n) == one_level
    lengths = range(n - 1, min_context - 1, -1)
    expected = naive_chain(token_ids, 5, lengths)
    assert chain_of(NasdDrafter(), token_ids, 5, n=n, min_context=min_context) == expected


@given(texts, st.lists(texts, max_size=4), st.integers(1, 3))
def test_learning_online_equals_learning_the_whole_text_at_once(prompt, runs, width):
    shape = DraftShape(width, 6)
    for drafter, fresh in (
        (NasdDrafter(), NasdDrafter()),
        (NasdOneLevelDrafter(), NasdOneLevelDrafter()),
    ):
        token_ids = list(prompt)
        drafter.open("grown", token_ids, {}, "")
        for run in runs:
            token_ids.extend(run)
            drafter.observe([Observation("grown", token_ids, EMPTY, [0], [0], run)])
        (grown,) = drafter.propose([DraftRequest("grown", token_ids, 10, shape)])
        assert grown == propose_once(fresh, token_ids, 10, shape)


@pytest.mark.parametrize("period", [2, 3, 5])
def test_periodic_text_emits_a_full_draft_and_one_more_at_every_step(period):
    for drafter in (NasdDrafter(), NasdOneLevelDrafter()):
        prompt = [i % period for i in range(2 * period)]
        run = decode(drafter, prompt, lambda text: len(text) % period, 60, max_nodes=5)
        assert set(run.num_emitted) == {6}


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(1, 8),
    st.booleans(),
)
def test_trees_keep_budget_depth_and_width_and_begin_with_the_chain(
    token_ids, max_nodes, width, depth, stops
):
    options = {"stop_if_unknown": stops}
    for drafter in (NasdDrafter(), NasdOneLevelDrafter()):
        tree = propose_once(drafter, token_ids, max_nodes, DraftShape(width, depth), options)
        best = propose_once(drafter, token_ids, max_nodes, DraftShape(1, depth), options)
        spine = 0
        while spine < len(tree) and tree.parents[spine] == spine - 1:
            spine += 1
        assert list(tree.token_ids[:spine]) == list(best.token_ids[:spine])
        assert (len(tree) == 0) == (len(best) == 0)


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


def observe_row(drafter, token_ids, emitted, top_token_ids, tree=EMPTY, path=(0,)):
    rows = [token_ids[-1], *tree.token_ids]
    token_ids.extend(emitted)
    drafter.observe([Observation("r", token_ids, tree, rows, path, emitted, top_token_ids)])


def first_draft(drafter, token_ids, width=1):
    request = DraftRequest("r", token_ids, width, DraftShape(width, 1))
    return list(drafter.propose([request])[0].token_ids)


def test_filler_makes_the_targets_top_tokens_siblings_best_first():
    drafter = NasdOneLevelDrafter()
    token_ids = [1]
    drafter.open("r", token_ids, {"n": 2, "filler_top_k": 3}, "")
    assert drafter.num_top_tokens("r") == 3
    observe_row(drafter, token_ids, [5], [[5, 6, 7]])
    observe_row(drafter, token_ids, [1], [[1]])
    assert first_draft(drafter, token_ids, width=4) == [5, 6, 7]


def test_emitted_token_outweighs_the_filler_it_was_sampled_against():
    drafter = NasdOneLevelDrafter()
    token_ids = [1]
    drafter.open("r", token_ids, {"n": 2, "filler_top_k": 2}, "")
    observe_row(drafter, token_ids, [8], [[6, 7]])
    observe_row(drafter, token_ids, [1], [[1]])
    assert first_draft(drafter, token_ids) == [8]


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


def test_filler_top_k_limits_what_is_counted():
    drafter = NasdOneLevelDrafter()
    token_ids = [1]
    drafter.open("r", token_ids, {"n": 2, "filler_top_k": 1}, "")
    observe_row(drafter, token_ids, [5, 1], [[5, 6, 7], [1]], chain([5]), (0, 1))
    assert first_draft(drafter, token_ids, width=4) == [5]


def test_a_run_trimmed_by_a_stop_teaches_only_what_was_emitted():
    drafter = NasdOneLevelDrafter()
    token_ids = [1]
    drafter.open("r", token_ids, {"n": 2, "filler_top_k": 1}, "")
    observe_row(drafter, token_ids, [5], [[5], [6], [7]], chain([5, 6]), (0, 1, 2))
    assert first_draft(drafter, token_ids) == []


def test_no_top_tokens_are_wanted_without_filler():
    drafter = NasdDrafter()
    drafter.open("r", [1], {}, "")
    assert drafter.num_top_tokens("r") == 0


def test_unknown_contexts_draft_seen_tokens_when_asked_and_repeatably():
    text = [1, 2, 3, 4]
    assert chain_of(NasdDrafter(), text, 6) == []
    first = chain_of(NasdDrafter(), text, 6, stop_if_unknown=False)
    assert len(first) == 6
    assert set(first) <= set(text)
    assert first == chain_of(NasdDrafter(), text, 6, stop_if_unknown=False)


def test_requests_are_isolated_and_close_forgets():
    drafter = NasdDrafter()
    taught, fresh = [1, 2, 3, 1, 2], [1, 2]
    drafter.open("taught", taught, {}, "tenant")
    drafter.open("fresh", fresh, {}, "tenant")
    trees = drafter.propose([DraftRequest(r, fresh, 4, DraftShape()) for r in ("fresh", "taught")])
    assert [len(tree) for tree in trees] == [0, 4]
    drafter.close("taught")
    drafter.open("taught", fresh, {}, "tenant")
    assert len(drafter.propose([DraftRequest("taught", fresh, 4, DraftShape())])[0]) == 0


def test_options_that_contradict_each_other_are_refused_by_name():
    with pytest.raises(ValueError, match="min_context"):
        NasdDrafter.info.resolve({"n": 3, "min_context": 3})


def test_contexts_are_bounded_and_the_ones_in_use_survive():
    counts = NgramCounts((1,), max_contexts=100)
    for i in range(1000, 11_000):
        counts.add(pack([i]), 1)
        if i % 10 == 0:
            counts.add(pack([7]), 8)
        assert len(counts) <= 100
    assert counts.best(pack([7]))[0] == 8
    assert counts.best(pack([1000])) == (0, 0, 0.0)
    assert counts.best(pack([10_999]))[0] == 1


def test_each_token_adds_at_most_one_context_per_length():
    counts = NgramCounts((3, 2, 1), max_contexts=10**6)
    sizes = []
    for i in range(1, 3001):
        counts.add(pack([2 * i, 3 * i, 5 * i]), i)
        sizes.append(len(counts))
    assert max(b - a for a, b in zip(sizes, sizes[1:], strict=False)) <= 3


def test_continuations_of_a_context_are_bounded_and_still_learn():
    counts = NgramCounts((1,), max_contexts=100)
    for token_id in range(100):
        counts.add(pack([1]), token_id)
    found = counts.likeliest(pack([1]), 100)
    assert [token_id for token_id, _, _ in found] == list(range(99, 99 - MAX_CONTINUATIONS, -1))
    counts.add(pack([1]), 99)
    for token_id in range(200, 240):
        counts.add(pack([1]), token_id)
    assert counts.best(pack([1]))[0] == 99


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
        assert found[0] == pytest.approx(counts.best(window))
