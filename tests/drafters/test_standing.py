"""What members of ``auto`` add and take, and whose turn it is to be tried."""

from __future__ import annotations

import pytest

from drafters.standing import Gain, Standing, Trials


def test_a_request_starts_from_what_all_have_seen_and_goes_its_own_way() -> None:
    standing = Standing.first(False)
    first = Gain(standing, standing.gain)
    for _ in range(200):
        first.add(2)
    assert first.tokens == pytest.approx(2.0, rel=0.01)
    second = Gain(standing, standing.gain)
    assert 1.0 < second.tokens < first.tokens
    for _ in range(100):
        second.add(0)
    assert second.tokens < 0.1 < standing.gain
    second.hope()
    assert second.tokens == Standing.first(True).gain
    first.hope()
    assert first.tokens > 1.9


def test_the_price_is_what_the_batch_writes_meanwhile() -> None:
    standing = Standing.first(True)
    assert standing.price(1_000.0) == 2 * standing.price(500.0) > 0
    for _ in range(100):
        standing.took(0.001)
    usual = standing.price(1_000.0)
    assert 1.0 <= usual <= 4.0  # its own time, and what is done with its draft
    standing.took(10.0)
    assert standing.price(1_000.0) < 1.5 * usual  # one slow step does not count far


def test_trials_cost_a_small_part_of_what_is_written() -> None:
    trials = Trials()
    assert not trials.allow(0.1)
    num_trials = 0
    for _ in range(10_000):
        trials.wrote(2)
        num_trials += trials.allow(0.1)
    assert 0.001 * 20_000 < 0.1 * num_trials < 0.005 * 20_000
