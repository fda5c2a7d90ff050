"""Blocks that lie together, shortage and misuse; ``test_block_pool_machine.py`` proves the rest."""

from collections.abc import Callable

import pytest

from kvpool.block_pool import BlockPool, BlockPoolError
from worlds.checked_pool import SIZE, TOKENS, CheckedPool, counts, run


def test_a_lone_request_gets_consecutive_blocks_again_and_again() -> None:
    pool = CheckedPool(6, SIZE, enable_prefix_cache=False)
    for request_id in ("a", "b"):
        pool.open(request_id, TOKENS, "", 0)
        assert pool.allocate(request_id, 5)
        assert pool.allocate_draft(request_id, 16) == 16
        assert list(pool.block_table(request_id)) == [0, 1, 2, 3]
        pool.free(request_id)


def test_a_shortage_evicts_nothing() -> None:
    pool = CheckedPool(3, SIZE)
    run(pool, "a", TOKENS[:8])
    pool.free("a")
    pool.open("b", TOKENS[20:], "", 100)
    assert not pool.allocate("b", 16)
    assert pool.counts() == counts(1, 0, 0, 2)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.open("a", TOKENS, "", 0),
        lambda pool: pool.open("new", TOKENS, "", -1),
        lambda pool: pool.allocate("ghost", 1),
        lambda pool: pool.allocate("a", -1),
        lambda pool: pool.allocate_draft("ghost", 1),
        lambda pool: pool.allocate_draft("a", -1),
        lambda pool: pool.promote("ghost", TOKENS, 0),
        lambda pool: pool.promote("a", TOKENS, 9),
        lambda pool: pool.promote("a", TOKENS[:6], 7),
        lambda pool: pool.promote("a", TOKENS, 4),
        lambda pool: pool.free_draft("ghost"),
        lambda pool: pool.free("ghost"),
        lambda pool: pool.block_table("ghost"),
    ],
)
def test_misuse_is_an_error_and_changes_nothing(misuse: Callable[[BlockPool], object]) -> None:
    pool = CheckedPool(4, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 8)
    pool.promote("a", TOKENS, 5)
    counts, table = pool.counts(), list(pool.block_table("a"))
    with pytest.raises(BlockPoolError):
        misuse(pool)
    assert pool.counts() == counts
    assert list(pool.block_table("a")) == table


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks, block_size)
