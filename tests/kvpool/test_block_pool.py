"""Blocks that lie together, shortage and misuse; what is published when, found, counted, evicted first
and forgotten. ``test_block_pool_machine.py`` proves the rest: that only what is right is shared, too."""

from collections.abc import Callable, Sequence

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
        lambda pool: pool.open("new", TOKENS, "", 9, num_usable=lambda _: -1),
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


# --- the prefix cache ---


def test_a_capped_request_recomputes_its_last_block_privately() -> None:
    """A prompt that is cached in full needs its last row's logits: at most len - 1 is reused."""
    pool = CheckedPool(8, SIZE)
    run(pool, "a", TOKENS[:8])
    assert run(pool, "b", TOKENS[:8], cap=7) == 4
    assert pool.block_table("b")[0] == pool.block_table("a")[0]
    assert pool.block_table("b")[1] != pool.block_table("a")[1]
    # b's copy of the second block has no name: it goes back to the free list, not to the cache.
    pool.free("b")
    assert pool.counts() == counts(6, 0, 2, 0)
    pool.free("a")
    assert pool.counts() == counts(6, 0, 0, 2)


def test_a_block_is_published_when_its_last_token_is_committed() -> None:
    pool = CheckedPool(8, SIZE)
    pool.open("a", TOKENS, "", 0)
    pool.allocate("a", 12)
    for num_computed_tokens in range(13):
        pool.promote("a", TOKENS, num_computed_tokens)
        assert pool.open("probe", TOKENS, "", 100) == num_computed_tokens // SIZE * SIZE
        pool.free("probe")


class CountingTokens(list[int]):
    """Counts the tokens that are read from it."""

    num_read = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        result = super().__getitem__(index)
        self.num_read += len(result) if isinstance(index, slice) else 1
        return result


def test_promote_reads_only_newly_full_blocks() -> None:
    pool = CheckedPool(100, SIZE)
    token_ids = CountingTokens(range(400))
    pool.open("a", [], "", 0)
    pool.allocate("a", 400)
    pool.promote("a", token_ids, 397)
    assert token_ids.num_read == 396
    pool.promote("a", token_ids, 399)
    assert token_ids.num_read == 396
    pool.promote("a", token_ids, 400)
    assert token_ids.num_read == 400


def test_eviction_takes_the_least_recently_used_request_and_its_tail_first() -> None:
    pool = CheckedPool(6, SIZE)
    old, new = TOKENS[:12], TOKENS[20:32]
    run(pool, "old", old)
    run(pool, "new", new)
    pool.free("old")
    pool.free("new")
    assert pool.counts() == counts(0, 0, 0, 6)
    expected = [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]
    for num_evicted, (left_of_old, left_of_new) in enumerate(expected, start=1):
        pool.open("probe", [], "", 0)
        assert pool.allocate("probe", num_evicted * SIZE)
        for token_ids, left in ((new, left_of_new), (old, left_of_old)):
            assert len(pool._match(token_ids, "", 12)[1]) * SIZE == left
        # Freed unpublished, so that the next round takes these and evicts one more.
        pool.free("probe")


def test_a_hit_makes_a_prefix_young_again() -> None:
    pool = CheckedPool(2, SIZE)
    run(pool, "a", TOKENS[:4])
    run(pool, "b", TOKENS[10:14])
    pool.free("a")
    pool.free("b")
    assert pool.open("a", TOKENS[:4], "", 100) == 4
    pool.free("a")
    pool.open("c", [], "", 0)
    assert pool.allocate("c", 1)
    assert pool.open("a", TOKENS[:4], "", 100) == 4
    assert pool.open("b", TOKENS[10:14], "", 100) == 0


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = CheckedPool(4, SIZE)
    run(pool, "a", TOKENS[:8])
    pool.free("a")
    pool.open("b", [], "", 0)
    pool.allocate_draft("b", 8)
    assert pool.counts() == counts(0, 2, 0, 2)
    pool.allocate_draft("b", 9)
    assert pool.counts() == counts(0, 3, 0, 1)


def test_queries_and_hits_count_tokens() -> None:
    pool = CheckedPool(8, SIZE)
    run(pool, "a", TOKENS[:10], cap=9)
    assert (pool.num_prefix_queries, pool.num_prefix_hits) == (10, 0)
    run(pool, "b", TOKENS[:10], cap=9)
    assert (pool.num_prefix_queries, pool.num_prefix_hits) == (20, 8)
    pool.open("c", TOKENS[:10], "", 0)
    assert (pool.num_prefix_queries, pool.num_prefix_hits) == (20, 8)
    pool.free("b")
    assert pool.open("b", TOKENS[:10], "", 9, is_new=False) == 8
    assert (pool.num_prefix_queries, pool.num_prefix_hits) == (20, 8)
    run(pool, "d", TOKENS[:10], cap=9, usable=7)
    assert (pool.num_prefix_queries, pool.num_prefix_hits) == (30, 12)


def test_a_pool_without_prefix_cache_reuses_and_publishes_nothing() -> None:
    pool = CheckedPool(4, SIZE, enable_prefix_cache=False)
    assert run(pool, "a", TOKENS[:8]) == 0
    assert run(pool, "b", TOKENS[:8]) == 0
    assert (pool.num_prefix_queries, pool.num_prefix_hits) == (0, 0)
    pool.free("a")
    assert pool.counts() == counts(2, 0, 2, 0)


def test_requests_open_at_a_reset_publish_nothing_any_more() -> None:
    pool = CheckedPool(8, SIZE)
    run(pool, "a", TOKENS[:8])
    run(pool, "b", TOKENS[:10])
    pool.forget_blocks()
    pool.allocate("b", 12)
    pool.promote("b", TOKENS, 12)
    assert run(pool, "c", TOKENS[:8]) == 0
    assert run(pool, "d", TOKENS[:8]) == 8
    for request_id in ("a", "b", "d", "c"):
        pool.free(request_id)
    assert pool.counts() == counts(6, 0, 0, 2)


# --- hits of which a request can use a part ---


def test_nobody_is_asked_of_nothing() -> None:
    pool = CheckedPool(8, SIZE)
    asked: list[list[int]] = []

    def note(found: Sequence[int]) -> int:
        asked.append([*found])
        return 0

    pool.open("a", TOKENS[:12], "", 12, num_usable=note)
    assert asked == []
    pool.free("a")
    run(pool, "b", TOKENS[:9])
    pool.open("c", TOKENS[:12], "", 12, num_usable=note)
    assert asked == [[*pool.block_table("b")[:2]]]


def test_what_was_computed_anew_takes_over_the_names() -> None:
    """Block by block; a block that somebody holds stays with him and is freed by him, an unused one is
    free at once."""
    pool = CheckedPool(12, SIZE)
    run(pool, "held", TOKENS[:12])
    run(pool, "gone", TOKENS[20:28])
    pool.free("gone")
    first_table = [*pool.block_table("held")]
    assert run(pool, "a", TOKENS[:10], usable=4) == 4
    assert run(pool, "b", TOKENS[20:28], usable=0) == 0
    assert pool.counts() == counts(5, 0, 7, 0)
    # The third block's name was not taken: it was not filled.
    table = [*first_table[:1], pool.block_table("a")[1], first_table[2]]
    assert pool.open("probe", TOKENS[:12], "", 12) == 12
    assert [*pool.block_table("probe")] == table
    pool.free("held")
    assert pool.counts() == counts(6, 0, 6, 0), "its second block lost its name"
    for request_id in ("probe", "a", "b"):
        pool.free(request_id)
    assert pool.counts() == counts(7, 0, 0, 5)
    assert pool.open("again", TOKENS[20:28], "", 8) == 8


def test_a_block_without_a_name_may_be_shared_until_the_last_leaves_it() -> None:
    pool = CheckedPool(12, SIZE)
    run(pool, "a", TOKENS[:8])
    run(pool, "b", TOKENS[:8])
    run(pool, "c", TOKENS[:8], usable=0)
    assert pool.block_table("a") == pool.block_table("b")
    pool.free("a")
    pool.free("b")
    assert pool.counts() == counts(10, 0, 2, 0)
    pool.free("c")
    assert pool.counts() == counts(10, 0, 0, 2)


def test_a_request_that_could_use_all_takes_no_names() -> None:
    pool = CheckedPool(12, SIZE)
    run(pool, "a", TOKENS[:8])
    assert run(pool, "b", TOKENS[:8], cap=7, usable=4) == 4
    assert pool.open("c", TOKENS[:8], "", 8) == 8
    assert pool.block_table("c") == pool.block_table("a")


def test_a_reset_ends_takeovers() -> None:
    pool = CheckedPool(12, SIZE)
    run(pool, "a", TOKENS[:8])
    pool.open("b", TOKENS[:8], "", 8, num_usable=lambda _: 0)
    pool.allocate("b", 8)
    pool.promote("b", TOKENS, 4)
    pool.forget_blocks()
    pool.promote("b", TOKENS, 8)
    pool.free("a")
    pool.free("b")
    assert pool.counts() == counts(12, 0, 0, 0)
