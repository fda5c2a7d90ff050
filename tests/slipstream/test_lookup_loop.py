"""The small speculative loop: equal output, fewer runs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.lookup_loop import ngram_propose, run_baseline, run_speculative, verify_greedy


def periodic(text: Sequence[int]) -> int:
    return len(text) % 3


def hashed(text: Sequence[int]) -> int:
    """Depends on the last three tokens, so that repetition is likely but never certain."""
    return random.Random(repr(tuple(text[-3:]))).randrange(4)


@pytest.mark.parametrize(
    ("context", "n", "k", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 3, []),
        # The most recent occurrence, where the earliest would give 100.
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 2, [300, 1]),
        ([5, 5, 5], 2, 4, [5]),
        ([1, 2], 2, 3, []),
        ([1, 1, 1], 0, 3, []),
        ([1, 1, 1], 1, 0, []),
        ([], 1, 1, []),
    ],
)
def test_proposals(context: list[int], n: int, k: int, expected: list[int]) -> None:
    assert ngram_propose(context, n, k) == expected


def test_a_cyclic_proposal_goes_on_into_itself() -> None:
    assert ngram_propose([0, 1, 2, 0, 1, 2], 2, 7, is_cyclic=True) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("proposed", "emitted", "num_accepted"),
    [([1, 2, 3], [1, 2, 3, 4], 3), ([1, 5, 3], [1, 2], 1), ([], [1], 0), ([9], [1], 0)],
)
def test_verification(proposed: list[int], emitted: list[int], num_accepted: int) -> None:
    assert verify_greedy([0], proposed, len) == (emitted, num_accepted)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 6))
def test_the_output_is_the_baselines_and_the_counts_add_up(
    context: list[int], n: int, k: int
) -> None:
    for cyclic in (False, True):
        result = run_speculative(context, hashed, n, k, 40, cyclic)
        assert result.token_ids[:40] == run_baseline(context, hashed, 40).token_ids
        assert 40 <= len(result.token_ids) <= 40 + k
        assert len(result.token_ids) == result.num_accepted + result.num_runs
        assert 0 <= result.num_accepted <= result.num_proposed


def test_periodic_text_takes_few_runs_and_random_text_saves_none() -> None:
    context = [0, 1, 2, 0, 1, 2]
    # A draft that stops at the text's end is as long as the period; a cyclic one as k.
    assert run_speculative(context, periodic, 2, 6, 400).tokens_per_run == pytest.approx(4)
    assert run_speculative(context, periodic, 2, 6, 700, True).tokens_per_run == pytest.approx(7)
    values = random.Random(3).choices(range(5000), k=600)
    result = run_speculative([1, 2], lambda text: values[len(text)], 2, 6, 500)
    assert result.tokens_per_run < 1.05
    assert run_baseline(context, periodic, 9).tokens_per_run == 1
