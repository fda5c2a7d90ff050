"""Tables and blocks: growing, drafting, promoting, freeing, shortage and misuse."""

from collections.abc import Callable

import pytest

from kvpool.block_pool import BlockPool, BlockPoolError
from worlds.checked_pool import SIZE, TOKENS, CheckedPool, counts, run


def test_a_new_pool_is_all_free() -> None:
    pool = CheckedPool(6, SIZE)
    assert pool.counts() == counts(6, 0, 0, 0)
    assert pool.num_available == 6
    assert pool.usage == 0.0


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_allocate_covers_the_tokens_with_as_few_blocks_as_do(
    num_tokens: int, num_blocks: int
) -> None:
    pool = CheckedPool(6, SIZE)
    pool.open("a", TOKENS, "", 0)
    assert pool.allocate("a", num_tokens)
    assert len(pool.block_table("a")) == num_blocks
    assert pool.counts() == counts(6 - num_blocks, 0, num_blocks, 0)
    assert pool.usage == num_blocks / 6


def test_a_lone_request_gets_consecutive_blocks_again_and_again() -> None:
    pool = CheckedPool(6, SIZE, enable_prefix_cache=False)
    for request_id in ("a", "b"):
        pool.open(request_id, TOKENS, "", 0)
        assert pool.allocate(request_id, 5)
        assert pool.allocate_draft(request_id, 16) == 16
        assert list(pool.block_table(request_id)) == [0, 1, 2, 3]
        pool.free(request_id)


def test_allocate_keeps_what_there_is_and_only_grows() -> None:
    pool = CheckedPool(6, SIZE)
    pool.open("a", TOKENS, "", 0)
    table = pool.block_table("a")
    assert pool.allocate("a", 5)
    before = list(table)
    assert pool.allocate("a", 2)
    assert list(table) == before
    assert pool.allocate("a", 9)
    assert list(table[:2]) == before
    assert pool.block_table("a") is table


def test_a_shortage_changes_nothing() -> None:
    pool = CheckedPool(3, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.open("b", TOKENS, "", 0)
    assert pool.allocate("a", 8)
    counts = pool.counts()
    assert not pool.allocate("b", 5)
    assert list(pool.block_table("b")) == []
    assert pool.counts() == counts
    assert pool.allocate("b", 4)


def test_a_shortage_evicts_nothing() -> None:
    pool = CheckedPool(3, SIZE)
    run(pool, "a", TOKENS[:8])
    pool.free("a")
    pool.open("b", TOKENS[20:], "", 100)
    assert not pool.allocate("b", 16)
    assert pool.counts() == counts(1, 0, 0, 2)


def test_draft_blocks_are_leased_past_the_committed_tail() -> None:
    pool = CheckedPool(6, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 5)
    assert pool.allocate_draft("a", 6) == 8
    assert pool.counts()["draft"] == 0
    assert pool.allocate_draft("a", 11) == 12
    assert pool.counts() == counts(3, 1, 2, 0)
    assert pool.allocate_draft("a", 3) == 12


def test_a_draft_gets_as_many_blocks_as_there_are() -> None:
    pool = CheckedPool(3, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 3)
    assert pool.allocate_draft("a", 100) == 12
    assert pool.num_available == 0
    pool.open("b", TOKENS, "", 0)
    assert pool.allocate_draft("b", 4) == 0
    assert not pool.allocate("b", 1)


def test_free_draft_gives_back_only_the_drafts() -> None:
    pool = CheckedPool(6, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 5)
    committed = list(pool.block_table("a"))
    pool.allocate_draft("a", 20)
    pool.free_draft("a")
    assert list(pool.block_table("a")) == committed
    assert pool.counts() == counts(4, 0, 2, 0)
    pool.free_draft("a")
    assert pool.counts() == counts(4, 0, 2, 0)


def test_promote_takes_over_the_draft_blocks_that_it_reaches_into() -> None:
    pool = CheckedPool(6, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 4)
    pool.allocate_draft("a", 16)
    table = list(pool.block_table("a"))
    pool.promote("a", TOKENS, 9)
    assert pool.counts() == counts(2, 1, 3, 0)
    assert list(pool.block_table("a")) == table
    pool.free_draft("a")
    assert list(pool.block_table("a")) == table[:3]


def test_allocate_takes_over_draft_blocks_in_reach() -> None:
    pool = CheckedPool(4, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate_draft("a", 16)
    table = list(pool.block_table("a"))
    assert pool.allocate("a", 6)
    assert list(pool.block_table("a")) == table
    assert pool.counts() == counts(0, 2, 2, 0)


def test_membership_says_which_requests_are_open() -> None:
    pool = CheckedPool(4, SIZE)
    pool.open("a", TOKENS, "", 0)
    assert "a" in pool
    pool.free("a")
    assert "a" not in pool


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
    assert "new" not in pool


def test_a_second_free_is_an_error() -> None:
    pool = CheckedPool(4, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.free("a")
    with pytest.raises(BlockPoolError, match="'a' is not open"):
        pool.free("a")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(num_blocks, block_size)
