"""Bookkeeping of states: who begins where, which ends of blocks leave a snapshot, which go first, and
that each kind of damage is seen and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.block_pool import BlockPool
from kvpool.state_slots import NOWHERE, StateSlots
from kvpool.tier import BlockTier
from worlds.tier_world import ModelBytes, ModelSlots

SIZE, INTERVAL = 4, 16
TEXT = list(range(100))
WHOLE = 1000


def make(seats: int = 3, snapshots: int = 8, places: int = 12) -> tuple[BlockPool, StateSlots]:
    states = StateSlots(seats, snapshots, places, SIZE, INTERVAL)
    return BlockPool(100, SIZE, states=states), states


def begin(pool: BlockPool, name: str, text: list[int]) -> int:
    return pool.open(name, text, "", len(text) - 1)


def step(
    pool: BlockPool,
    name: str,
    text: list[int],
    num_known: int = WHOLE,
    accepted: tuple[int, ...] = (),
    num_nodes: int = 0,
) -> list[int]:
    """Does a request's step, ``text`` being what it knows before. Returns after how many tokens it wrote
    snapshots, best first."""
    assert pool.states is not None
    base = pool._tables[name].num_committed_tokens
    num_known = min(num_known, len(text) - base)
    rows = pool.states.rows(name, num_known, num_nodes, len(text))
    start = base - len(rows.replayed)
    end = base + num_known + len(accepted)
    assert pool.allocate(name, end)
    pool.states.commit(name, num_known, accepted)
    pool.promote(name, TEXT[:end] if len(text) < end else text, end)
    pool.check_integrity()
    return [start + count for count in rows.snapshots]


def serve(pool: BlockPool, name: str, text: list[int]) -> int:
    """One request in one step. Returns behind how many tokens it began."""
    num_cached = begin(pool, name, text)
    step(pool, name, text)
    pool.free(name)
    return num_cached


def test_a_prompt_leaves_snapshots_where_others_may_begin() -> None:
    """At its end, where the same prompt would begin, and every interval: in chunks as in one go."""
    pool, _ = make()
    begin(pool, "whole", TEXT[:40])
    assert step(pool, "whole", TEXT[:40]) == [40, 36, 16, 32]
    pool, _ = make()
    begin(pool, "chunks", TEXT[:41])
    passed = [step(pool, "chunks", TEXT[:41], 15) for _ in range(3)]
    assert passed == [[], [16], [40, 32]]
    assert begin(pool, "same", TEXT[:41]) == 40
    assert begin(pool, "longer", [*TEXT[:35], *TEXT[:9]]) == 32


def test_a_long_prompt_leaves_no_more_than_its_share() -> None:
    """Three requests share eight snapshots, so a prompt gets two: further apart, the longer it is."""
    for length, expected in ((47, [16, 32]), (48, [32]), (95, [32, 64]), (96, [48])):
        pool, _ = make()
        begin(pool, "long", TEXT[:length])
        last = (length - 1) // SIZE * SIZE
        assert [at for at in step(pool, "long", TEXT[:length]) if at < last] == expected


def test_where_others_branch_off_there_is_a_snapshot_from_the_second_on() -> None:
    pool, states = make()
    assert serve(pool, "first", TEXT[:15]) == 0
    other = [*TEXT[:9], *TEXT[50:55]]
    assert begin(pool, "second", other) == 0  # keys and values of 8 tokens were found
    assert step(pool, "second", other) == [12, 8]
    assert begin(pool, "third", [*TEXT[:9], *TEXT[70:75]]) == 8
    assert states.take_hits() == 1
    assert states.take_hits() == 0


def test_an_answer_keeps_its_newest_snapshot_and_its_prompt_s() -> None:
    pool, states = make(snapshots=3)
    begin(pool, "r", TEXT[:8])
    assert step(pool, "r", TEXT[:8]) == [8, 4]
    # Two nodes of three are accepted; the next step takes them in, and passes the end of a block.
    assert step(pool, "r", TEXT[:9], accepted=(0, 2), num_nodes=3) == []
    assert step(pool, "r", TEXT[:12]) == [12]
    for end in range(13, 21):
        step(pool, "r", TEXT[:end])
    names = pool._match(TEXT, "", 20)[0]
    kept = {names.index(digest) * SIZE for digest in states._snapshots}
    # 8 is where the conversation's first turn ended; the answer's older ones went before it.
    assert kept == {8, 16, 20}
    pool.free("r")
    assert begin(pool, "next", TEXT[:30]) == 20


def test_of_two_ends_in_one_step_the_later_is_the_answer_s_newest() -> None:
    pool, states = make()
    begin(pool, "r", TEXT[:6])
    step(pool, "r", TEXT[:6])
    step(pool, "r", TEXT[:7], accepted=(0, 1, 2, 3), num_nodes=4)
    assert step(pool, "r", TEXT[:12]) == [12, 8]
    names = pool._match(TEXT, "", 12)[0]
    order = [names.index(digest) * SIZE for digest in states._snapshots]
    assert order == [8, 4, 12]


def test_the_best_of_a_prompt_is_evicted_last() -> None:
    pool, states = make(seats=2, snapshots=4)
    serve(pool, "r", TEXT[:40])
    names = pool._match(TEXT, "", 40)[0]
    assert [names.index(each) * SIZE for each in states._snapshots] == [32, 16, 36, 40]
    assert serve(pool, "s", TEXT[60:66]) == 0
    assert begin(pool, "again", TEXT[:35]) == 16


def test_places_are_lent_until_a_step_ends_and_kept_for_what_it_accepts() -> None:
    pool, states = make(places=6)
    for name in "ab":
        begin(pool, name, TEXT[:2])
    first = states.rows("a", 2, 4, 2)
    assert len(first.places) == 4
    assert states.lend("a", 2) == first.places[:2]
    assert len(states.lend("b", 4)) == 2  # no more are there, and b drafts no more
    assert states.lend("b", 0) == []
    states.check_integrity("ab")
    states.commit("a", 2, [1, 3])
    states.commit("b", 2, [])
    again = states.peek("a", base=4, num_known=0, num_nodes=2)
    assert again.replayed == [first.places[1], first.places[3]]
    assert (again.target, again.source) == (NOWHERE, first.target)
    assert not set(again.places) & set(again.replayed)
    states.check_integrity("ab")
    states.commit("a", 1, [])
    assert states.rows("a", 1, 0, 4).replayed == []
    for name in "ab":
        states.close(name)
    assert len(states._places) == 6


def test_a_request_begins_from_a_forgotten_snapshot_that_nobody_overwrites() -> None:
    for forget in (BlockPool.forget_blocks, _evict_all, _overwrite):
        for is_closed in (False, True):
            pool, states = make(snapshots=1)
            serve(pool, "r", TEXT[:8])
            assert begin(pool, "waits", TEXT[:12]) == 8
            forget(pool)
            pool.check_integrity()
            begin(pool, "other", TEXT[50:60])
            rows = states.rows("waits", 4, 0, 12)
            assert rows.source == 3
            assert states.rows("other", 10, 0, 10).snapshots == {}
            assert states.counts()["snapshot"] == 1
            states.close("waits") if is_closed else states.commit("waits", 4, [])
            assert states.counts()["snapshot"] == (forget is _overwrite)


def _evict_all(pool: BlockPool) -> None:
    """The blocks that it holds itself keep their names: this is what ``_take`` does."""
    assert pool.states is not None
    for digest in [*pool.states._snapshots]:
        pool.states.evict(digest)


def _overwrite(pool: BlockPool) -> None:
    """Another prompt finds no room for its snapshots."""
    begin(pool, "writes", TEXT[20:50])
    assert step(pool, "writes", TEXT[20:50]) == []
    pool.free("writes")


def test_what_nobody_could_find_is_not_kept() -> None:
    """After a reset blocks of open requests get no names, without a prefix cache none do. States of
    evicted blocks go with them."""
    pool, states = make(snapshots=1)
    serve(pool, "r", TEXT[:8])
    begin(pool, "open", TEXT[30:70])
    pool.forget_blocks()
    assert states.counts() == {"free": 3, "seat": 1, "planned": 0, "snapshot": 0}
    assert step(pool, "open", TEXT[30:70]) == []
    pool = BlockPool(20, SIZE, enable_prefix_cache=False, states=StateSlots(2, 2, 2, SIZE, 16))
    begin(pool, "r", TEXT[:40])
    assert step(pool, "r", TEXT[:40]) == []
    states = StateSlots(2, 4, 2, SIZE, 16)
    pool = BlockPool(4, SIZE, states=states)
    serve(pool, "r", TEXT[:16])
    assert states.counts()["snapshot"] == 2
    begin(pool, "s", TEXT[50:66])
    assert pool.allocate("s", 16)
    assert states.counts()["snapshot"] == 0


def test_of_two_that_compute_the_same_prompt_one_leaves_a_snapshot() -> None:
    pool, states = make()
    for name in "ab":
        begin(pool, name, TEXT[:8])
    for name in "ab":
        assert step(pool, name, TEXT[:8]) == [8, 4]
    assert states.counts() == {"free": 7, "seat": 2, "planned": 0, "snapshot": 2}


def test_a_request_that_ends_within_a_step_gives_everything_back() -> None:
    pool, states = make()
    begin(pool, "r", TEXT[:16])
    states.rows("r", 16, 4, 16)
    assert states.counts() == {"free": 8, "seat": 1, "planned": 2, "snapshot": 0}
    pool.check_integrity()
    pool.free("r")
    assert states.counts()["free"] == states.num_slots
    assert len(states._places) == states.num_places
    pool.check_integrity()


def _damaged(damage: Callable[[StateSlots, Any], object]) -> Callable[[StateSlots], object]:
    return lambda states: damage(states, states._tables["r"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_damaged(lambda states, _: states._tables.pop("r")), "open requests and seats differ"),
        (_damaged(lambda states, _: states._free.pop()), "slot has not one owner"),
        (_damaged(lambda states, _: states._free.append(0)), "slot has not one owner"),
        (_damaged(lambda _, table: table.planned.clear()), "slot has not one owner"),
        (_damaged(lambda states, _: states._snapshots.clear()), "slot has not one owner"),
        (_damaged(lambda states, _: states._places.pop()), "place for rows has not one owner"),
        (_damaged(lambda _, table: table.lent.append(0)), "place for rows has not one owner"),
        (_damaged(lambda states, table: setattr(table, "source", states._free[0])), "holds nothing"),
        (_damaged(lambda _, table: setattr(table, "num_tokens", -1)), "a seat is none"),
        (_damaged(lambda states, _: states._nameless.add(states._free.pop())), "kept for nobody"),
    ],
)  # fmt: skip
def test_damage_is_found(damage: Callable[[StateSlots], object], message: str) -> None:
    pool, states = make()
    serve(pool, "before", TEXT[:8])
    begin(pool, "r", TEXT[:16])
    states.rows("r", 8, 2, 16)
    pool.check_integrity()
    damage(states)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_snapshots_that_make_room_come_back_from_the_tier() -> None:
    """A damaged one is a miss: the request begins where the one before it lies."""
    pool, states = make(snapshots=2)
    slots = ModelSlots(8)
    states.tier = BlockTier(ModelBytes(dict.fromkeys(range(5), "state"), 1), slots)
    serve(pool, "a", TEXT[:12])
    serve(pool, "b", TEXT[50:62])
    assert len(states.tier) == 2
    assert begin(pool, "c", TEXT[:13]) == 12
    pool.free("c")
    serve(pool, "d", TEXT[70:82])
    slots.damaged |= {slot for slot, entry in slots.entries() if entry.marks == 0}
    assert begin(pool, "e", TEXT[:13]) == 0
    assert states.tier.num_damaged >= 1
    pool.check_integrity()


def test_a_full_tier_loses_what_was_used_least() -> None:
    pool, states = make(snapshots=1)
    slots = ModelSlots(1)
    states.tier = BlockTier(ModelBytes(dict.fromkeys(range(4), "state"), 1), slots)
    serve(pool, "a", TEXT[:5])
    serve(pool, "b", TEXT[50:55])
    # What makes room for it takes its place there.
    assert begin(pool, "c", TEXT[:6]) == 0
    pool.check_integrity()
    assert not states.save(1)
    assert len(states.tier) == 1
