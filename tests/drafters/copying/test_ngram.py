"""``ngram``: oracles, a naive reference, trees, and what it must not do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape
from drafters.copying.ngram import (
    MAX_INDEXED_TOKENS,
    MAX_MATCH_LENGTH,
    NgramDrafter,
    NgramState,
    match_feature,
)
from worlds.simulated_target import children_of, propose_once

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def chain_of(token_ids, num_tokens, ngram_min, ngram_max):
    options = {"ngram_min": ngram_min, "ngram_max": ngram_max}
    tree = propose_once(NgramDrafter(), token_ids, num_tokens, DraftShape(1, 64), options)
    assert tree.is_chain()
    return list(tree.token_ids)


def naive_match(token_ids, ngram_min, ngram_max):
    """Quadratic: the end of the longest, then most recent, earlier occurrence of the ending."""
    last = len(token_ids) - 1
    for order in range(ngram_max, ngram_min - 1, -1):
        for end in range(last - 1, order - 2, -1):
            window = token_ids[end - order + 1 : end + 1]
            if len(token_ids) >= order and window == token_ids[last - order + 1 :]:
                return end
    return None


def naive_chain(token_ids, num_tokens, ngram_min, ngram_max):
    end = naive_match(token_ids, ngram_min, ngram_max)
    if end is None:
        return []
    extended = list(token_ids)
    for _ in range(num_tokens):
        end += 1
        extended.append(extended[end])
    return extended[len(token_ids) :]


@pytest.mark.parametrize(
    ("token_ids", "ngram_min", "ngram_max", "num_tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 1, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 3, []),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
        ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),
    ],
)
def test_agrees_with_published_prompt_lookup_cases(
    token_ids, ngram_min, ngram_max, num_tokens, expected
):
    assert chain_of(token_ids, num_tokens, ngram_min, ngram_max) == expected


@given(texts, st.integers(1, 12), st.integers(1, 3), st.integers(0, 4))
def test_chain_equals_the_naive_reference(token_ids, num_tokens, ngram_min, more):
    """Which takes the most recent match, vLLM the earliest. Text drifts: what followed the last time is a
    better guess than the first time's."""
    ngram_max = ngram_min + more
    expected = naive_chain(token_ids, num_tokens, ngram_min, ngram_max)
    assert chain_of(token_ids, num_tokens, ngram_min, ngram_max) == expected


def test_tree_offers_the_other_known_continuations_at_the_first_position():
    token_ids = [1, 2, 7, 9, 1, 2, 8, 9, 5, 1, 2, 6, 4, 1, 2]
    for width, expected in ((2, [6, 8]), (3, [6, 8, 7])):
        tree = propose_once(NgramDrafter(), token_ids, 12, DraftShape(width, 2))
        assert children_of(tree) == expected


def test_tree_branches_further_along_the_spine():
    """After 1 2 always 3; after 2 3 either 4 or 5: the branch belongs at depth 2."""
    token_ids = [1, 2, 3, 4, 0, 1, 2, 3, 5, 9, 1, 2]
    tree = propose_once(NgramDrafter(), token_ids, 8, DraftShape(2, 3))
    assert tree.token_ids[0] == 3
    assert children_of(tree, 0) == [5, 4]


def test_features_tell_long_matches_from_short_ones_and_siblings_apart():
    features = {match_feature(n, rank) for n in range(1, 100) for rank in range(10)}
    assert features == set(range(40))
    assert match_feature(2, 0) != match_feature(12, 0) != match_feature(12, 1)
    short = propose_once(NgramDrafter(), [1, 2, 3, 9, 1, 2], 1)
    long = propose_once(NgramDrafter(), [*range(30), 99, *range(30)], 1)
    assert short.features[0] == match_feature(2, 0)
    assert long.features[0] == match_feature(30, 0)


def test_a_long_texts_recent_part_is_still_found():
    options = NgramDrafter.info.resolve({"ngram_max": 3})
    phrase = [900_001, 900_002, 900_003, 900_004]
    token_ids = [i % 70_000 for i in range(2 * MAX_INDEXED_TOKENS)] + phrase + [5] + phrase[:2]
    state = NgramState(token_ids[:10], options)
    for end in range(5_000, len(token_ids), 5_000):
        state.propose(DraftRequest("r", token_ids[:end], 1, DraftShape()))
    tree = state.propose(DraftRequest("r", token_ids, 4, DraftShape()))
    assert list(tree.token_ids) == [*phrase[2:], 5, phrase[0]]


def test_match_length_is_measured_beyond_ngram_max():
    token_ids = [*range(50), 99, *range(50)]
    tree = propose_once(NgramDrafter(), token_ids, 1, options={"ngram_max": 3})
    assert tree.features[0] == match_feature(MAX_MATCH_LENGTH, 0)


def test_a_device_is_told_what_it_may_copy_as_long_as_no_text_is_forgotten():
    drafter = NgramDrafter()
    drafter.open("r", [1, 2, 1], {"ngram_min": 3, "ngram_max": 5}, "")
    assert drafter.copies("r", MAX_INDEXED_TOKENS) == (3, 5)
    assert drafter.copies("r", MAX_INDEXED_TOKENS + 1) is None
