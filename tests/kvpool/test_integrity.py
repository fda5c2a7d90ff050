"""The integrity check itself: each kind of damage is seen and named."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from operator import setitem

import pytest

from kvpool.block_pool import BlockPool

SIZE = 4
TOKENS = list(range(40))


def _pool() -> BlockPool:
    """All four states: ``a`` and ``b`` share blocks 0 and 1, 5 is cached."""
    pool = BlockPool(10, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 9)
    pool.promote("a", TOKENS, 9)
    pool.open("b", TOKENS, "", 9)
    pool.allocate("b", 10)
    pool.allocate_draft("b", 14)
    pool.open("c", TOKENS, "other", 0)
    pool.allocate("c", 4)
    pool.promote("c", TOKENS, 4)
    pool.free("c")
    assert list(pool.block_table("a")) == [0, 1, 2]
    assert list(pool.block_table("b")) == [0, 1, 3, 4]
    assert pool.counts() == {"free": 4, "draft": 1, "committed": 4, "cached": 1}
    pool.check_integrity()
    return pool


def _share_a_block_in_writing(pool: BlockPool) -> None:
    pool._tables["b"].block_ids[2] = 2
    pool._ref_counts[2], pool._ref_counts[3] = 2, 0
    pool._free.append(3)


def _put(name: str, value: int) -> Callable[[BlockPool], None]:
    return lambda pool: setattr(pool, name, value)


def _put_b(name: str, value: int) -> Callable[[BlockPool], None]:
    return lambda pool: setattr(pool._tables["b"], name, value)


def _put_ids(at: int | slice, ids: int | array[int]) -> Callable[[BlockPool], None]:
    return lambda pool: setitem(pool._tables["b"].block_ids, at, ids)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_share_a_block_in_writing, "block 2, shared by .* may write"),
        (_put_ids(slice(2), array("i", [1, 0])), "at different places"),
        (
            lambda pool: pool._cache._block_of.pop(pool._cache._digest_of.pop(1)),
            "block 1.* private",
        ),
        (lambda pool: pool._cache.publish(b"draft", 4), r"blocks \[4\] are published before"),
        (lambda pool: pool._cache.publish(b"free", 9), r"blocks \[9\]: free, but still published"),
        (_put_ids(3, 3), "'b': a block is in its table twice"),
        (_put_ids(3, 10), "does not exist"),
        (_put_b("num_committed_blocks", 5), "5 of 4 blocks are committed"),
        (_put_b("num_committed_tokens", 13), "13 tokens .* are committed"),
        (lambda pool: setitem(pool._ref_counts, 0, 1), "block 0: ref count 1, but in 2 tables"),
        (lambda pool: pool._free.remove(9), "block 9: in 0 states"),
        (lambda pool: pool._free.append(9), "block 9: in 2 states"),
        (lambda pool: pool._free.append(2), "block 2: in 2 states"),
        (lambda pool: pool._cache.release(0), "block 0: in 2 states"),
        (_put("_num_draft", 2), "draft counter 2, counted 1"),
        (_put("_num_committed", 3), "committed counter 3, counted 4"),
        (_put("enable_prefix_cache", 0), "prefix cache is off"),
        (lambda pool: pool._cache._digest_of.pop(1), "prefix cache: the two maps disagree"),
        (lambda pool: setitem(pool._cache._digest_of, 1, b"9"), "prefix cache: the two maps"),
        (lambda pool: pool._nameless.add(0), r"blocks \[0\]: lost their names, but are published"),
        (lambda pool: pool._nameless.add(9), r"blocks \[9\]: lost their names"),
        (lambda pool: setitem(pool._cache._idle, 9, None), "prefix cache: an idle block"),
        (lambda pool: setitem(pool._cache._block_of, b"9", 1), "prefix cache: the two maps"),
    ],
)
def test_damage_is_seen_and_named(damage: Callable[[BlockPool], None], message: str) -> None:
    pool = _pool()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
