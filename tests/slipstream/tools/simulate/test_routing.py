"""Each policy of routing gives a request to the replica that its rule names."""

from __future__ import annotations

import pytest

from slipstream.tools.simulate.affinity import preferred
from slipstream.tools.simulate.routing import Affinity, LeastLoaded, RoundRobin


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


def test_a_key_stays_where_it_is_while_there_is_room() -> None:
    router = Affinity(50)
    for key in map(str, range(20)):
        replica = router.send(key)
        assert replica == router.first(key)[0]
        router.done(replica)
        assert router.send(key) == replica
        router.done(replica)


def test_a_key_spills_over_in_its_own_order_and_then_to_the_least_loaded() -> None:
    router = Affinity(20, load_factor=1.0, free_requests=2)
    first = router.first("hot")
    assert len(first) == 8
    # Two may always be open at one; beyond that nobody takes more than the mean.
    sent = [router.send("hot") for _ in range(17)]
    assert sent[:16] == [each for each in first for _ in range(2)]
    assert sent[16] not in first


def test_the_simulation_and_the_ingress_go_by_one_rule() -> None:
    router = Affinity(5, load_factor=1.0, free_requests=1)
    loads = dict.fromkeys("01234", 0)
    for number in range(200):
        key = f"key {number % 7}"
        expected = preferred(key, loads, load_factor=1.0, free_requests=1)[0]
        assert router.send(key) == int(expected)
        loads[expected] += 1
        if number % 3 == 0:
            busiest = max(loads, key=loads.__getitem__)
            loads[busiest] -= 1
            router.done(int(busiest))


def test_a_load_factor_below_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="load_factor"):
        Affinity(2, load_factor=0.9)


def test_a_replica_more_moves_few_keys_and_only_to_it() -> None:
    keys = [f"key {number}" for number in range(300)]
    three = {each: preferred(each, dict.fromkeys("abc", 0))[0] for each in keys}
    four = {each: preferred(each, dict.fromkeys("abcd", 0))[0] for each in keys}
    moved = [each for each in keys if three[each] != four[each]]
    assert {four[each] for each in moved} == {"d"}
    assert 45 < len(moved) < 105
    assert all(60 < list(three.values()).count(name) < 140 for name in "abc")
    # Who goes leaves the others where they were.
    for each in keys:
        assert preferred(each, dict.fromkeys("abc", 0), {three[each]})[-1] == three[each]
        rest = dict.fromkeys(set("abc") - {three[each]}, 0)
        assert preferred(each, rest)[0] == preferred(each, dict.fromkeys("abc", 0))[1]


def test_a_busy_replica_is_spared() -> None:
    home, other = preferred("key", {"a": 0, "b": 0})
    assert preferred("key", {home: 7, other: 0})[0] == home  # it takes eight at once
    assert preferred("key", {home: 8, other: 0})[0] == other
    assert preferred("key", {home: 30, other: 20})[0] == home  # not much more than its share
    assert preferred("key", {home: 60, other: 10})[0] == other
    assert preferred("key", {home: 60, other: 10}, {other})[0] == home
    assert preferred("key", {home: 3, other: 0}, free_requests=1, load_factor=1.0)[0] == other


def test_without_a_key_the_idle_come_first() -> None:
    assert preferred(None, {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]
    assert preferred(None, {"a": 3, "b": 1, "c": 2}, {"b"}) == ["c", "a", "b"]


def test_of_no_replicas_none_is_preferred() -> None:
    assert preferred("key", {}) == preferred(None, {}) == []
