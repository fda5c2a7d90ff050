"""Who gets which request."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.simulate.routing import Affinity, LeastLoaded, RoundRobin


def test_round_robin_takes_turns() -> None:
    router = RoundRobin(3)
    assert [router.send("a") for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_goes_where_fewest_are_open() -> None:
    router = LeastLoaded(3)
    assert [router.send("a") for _ in range(4)] == [0, 1, 2, 0]
    router.done(1)
    assert router.send("a") == 1
    router.done(2)
    router.done(0)
    router.done(0)
    assert [router.send("a") for _ in range(3)] == [0, 2, 0]
    assert router.loads == [2, 1, 1]


def test_affinity_keeps_a_key_where_it_is_while_there_is_room() -> None:
    router = Affinity(50)
    for key in map(str, range(20)):
        replica = router.send(key)
        assert replica == router.ranked(key)[0]
        router.done(replica)
        assert router.send(key) == replica
        router.done(replica)


def test_affinity_spreads_keys_evenly() -> None:
    router = Affinity(10)
    counts = Counter(router.ranked(f"tenant-{number}")[0] for number in range(2000))
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_a_replica_more_takes_keys_and_moves_no_others() -> None:
    before, after = Affinity(10), Affinity(11)
    keys = [f"tenant-{number}" for number in range(500)]
    moved = [key for key in keys if before.ranked(key)[0] != after.ranked(key)[0]]
    assert {after.ranked(key)[0] for key in moved} == {10}
    assert 500 / 11 * 0.6 < len(moved) < 500 / 11 * 1.5


def test_affinity_spills_over_in_the_order_of_ranks() -> None:
    router = Affinity(4, spill=1.0)
    first, second, third, fourth = router.ranked("a")
    # Two may always be open at one; beyond that nobody takes more than the mean.
    sent = [router.send("a") for _ in range(8)]
    assert sent == [first] * 2 + [second] * 2 + [third] * 2 + [fourth] * 2
    assert router.send("a") in range(4)


def test_a_key_whose_replicas_are_all_full_goes_to_the_least_loaded() -> None:
    router = Affinity(20, spill=1.0)
    ranked = router.ranked("hot")
    assert len(ranked) == 8
    sent = [router.send("hot") for _ in range(17)]
    assert sorted(sent[:16]) == sorted(ranked * 2)
    assert sent[16] not in ranked


def test_a_spill_below_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="spill"):
        Affinity(2, spill=0.9)
