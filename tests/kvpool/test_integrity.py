"""The integrity check itself: each kind of damage is seen and named."""

from array import array

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


def _share_at_two_places(pool: BlockPool) -> None:
    pool._tables["b"].block_ids[:2] = array("i", [1, 0])


def _lose_a_shared_digest(pool: BlockPool) -> None:
    del pool._cache._block_of[pool._cache._digest_of.pop(1)]


def _publish_too_early(pool: BlockPool) -> None:
    pool._cache.publish(b"draft", 4)


def _publish_a_free_block(pool: BlockPool) -> None:
    pool._cache.publish(b"free", 9)


def _name_a_block_twice(pool: BlockPool) -> None:
    pool._tables["b"].block_ids[3] = 3


def _name_an_unknown_block(pool: BlockPool) -> None:
    pool._tables["b"].block_ids[3] = 10


def _overstate_committed_blocks(pool: BlockPool) -> None:
    pool._tables["b"].num_committed_blocks = 5


def _overstate_committed_tokens(pool: BlockPool) -> None:
    pool._tables["b"].num_committed_tokens = 13


def _miscount_references(pool: BlockPool) -> None:
    pool._ref_counts[0] = 1


def _leak_a_free_block(pool: BlockPool) -> None:
    pool._free.remove(9)


def _free_a_block_twice(pool: BlockPool) -> None:
    pool._free.append(9)


def _free_a_held_block(pool: BlockPool) -> None:
    pool._free.append(2)


def _idle_a_held_block(pool: BlockPool) -> None:
    pool._cache.release(0)


def _miscount_drafts(pool: BlockPool) -> None:
    pool._num_draft += 1


def _miscount_committed(pool: BlockPool) -> None:
    pool._num_committed -= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_share_a_block_in_writing, "block 2: shared by .* may write"),
        (_share_at_two_places, "at different places"),
        (_lose_a_shared_digest, "block 1: in the private tables"),
        (_publish_too_early, "block 4 is published before"),
        (_publish_a_free_block, "block 9: free, but still published"),
        (_name_a_block_twice, "'b': a block is in its table twice"),
        (_name_an_unknown_block, "does not exist"),
        (_overstate_committed_blocks, "5 committed of 4 blocks"),
        (_overstate_committed_tokens, "13 committed tokens do not fit"),
        (_miscount_references, "block 0: ref count 1, but in 2 tables"),
        (_leak_a_free_block, "block 9: in no state"),
        (_free_a_block_twice, "free list twice"),
        (_free_a_held_block, "block 2: in a table and free list"),
        (_idle_a_held_block, "block 0: in a table and LRU"),
        (_miscount_drafts, "draft counter 2, counted 1"),
        (_miscount_committed, "committed counter 3, counted 4"),
    ],
)
def test_damage_is_seen_and_named(damage, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = _pool()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_a_published_block_in_a_pool_without_cache_is_seen() -> None:
    pool = BlockPool(4, SIZE, enable_prefix_cache=False)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 4)
    pool.promote("a", TOKENS, 4)
    pool._cache.publish(b"x", pool.block_table("a")[0])
    with pytest.raises(AssertionError, match="prefix cache is off"):
        pool.check_integrity()
