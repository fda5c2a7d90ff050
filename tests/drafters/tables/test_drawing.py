"""Candidates come in the order in which the verifier's noise draws them."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftSampling
from drafters.tables.drawing import LEAST_SHARE, drawn_probs, in_drawn_order
from engine.sampling.noise import gumbel_list, gumbel_scalar, request_key

PROBS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=10).map(
    lambda probs: sorted(probs, reverse=True)
)


@given(PROBS, st.floats(0.3, 2.0), st.integers(0, 99))
def test_order_is_that_of_the_verifiers_own_scores(
    probs: list[float], temperature: float, seed: int
) -> None:
    """The definition: largest ``log(prob) / T + g`` first, over what is drawn at all."""
    key, position = request_key(seed, 0), 40 + seed
    sampling = DraftSampling(temperature, noise=partial(gumbel_list, key), key=key)
    token_ids = [1000 + 7 * index for index in range(len(probs))]
    drawn = drawn_probs(probs, sampling)
    score = {
        token: math.log(prob) / temperature + gumbel_scalar(key, position, token)
        for token, prob in zip(token_ids, probs, strict=True)
    }
    expected = sorted(token_ids[: len(drawn)], key=lambda token: -score[token])
    assert in_drawn_order(token_ids, drawn, position, sampling)[0] == expected


@given(PROBS, st.floats(0.2, 2.0))
def test_what_is_drawn_is_the_tempered_distribution(probs: list[float], temperature: float) -> None:
    drawn = drawn_probs(probs, DraftSampling(temperature))
    tempered = [prob ** (1 / temperature) for prob in probs]
    kept = [each for each in tempered if each >= LEAST_SHARE * tempered[0] * (1 - 1e-9)]
    assert sum(drawn) == pytest.approx(1)
    assert abs(len(drawn) - len(kept)) <= 1  # one may lie on the border
    if len(drawn) == len(kept):
        assert drawn == pytest.approx([each / sum(kept) for each in kept])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (DraftSampling(1.0, top_k=2), [0.625, 0.375]),
        (DraftSampling(1.0, top_p=0.75), [0.625, 0.375]),
        (DraftSampling(1.0, top_p=0.5), [1.0]),
        (DraftSampling(1.0, min_p=0.5), [0.625, 0.375]),
        (DraftSampling(0.5, min_p=0.5), [1.0]),
        (DraftSampling(1.0), [0.5, 0.3, 0.2]),
        (DraftSampling(0.01), [1.0]),
    ],
)
def test_truncation_follows_the_request(sampling: DraftSampling, expected: list[float]) -> None:
    assert drawn_probs([0.5, 0.3, 0.2], sampling) == pytest.approx(expected)


def test_firsts_are_distributed_as_drawn_probs_says() -> None:
    """Chi-squared with 2 degrees of freedom, 3000 draws: above 27.6 with probability 1e-6."""
    rng, probs = random.Random(3), [0.6, 0.3, 0.1]
    counts: Counter[int] = Counter()
    for _ in range(3000):
        key = request_key(rng.randrange(2**63), 0)
        sampling = DraftSampling(1.0, noise=partial(gumbel_list, key))
        counts[in_drawn_order([5, 6, 7], probs, 9, sampling)[0][0]] += 1
    expected = {5: 1800, 6: 900, 7: 300}
    assert sum((counts[t] - n) ** 2 / n for t, n in expected.items()) < 27.6
