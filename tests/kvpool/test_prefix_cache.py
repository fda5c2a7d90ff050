"""Digests name content, and the cache forgets the oldest idle block first."""

import pytest

from kvpool.prefix_cache import PrefixCache, block_digest, root_digest


def _chain(cache_salt: str, *blocks: list[int]) -> bytes:
    digest = root_digest(cache_salt)
    for token_ids in blocks:
        digest = block_digest(digest, token_ids)
    return digest


def test_equal_content_has_an_equal_digest_whatever_sequence_holds_it() -> None:
    assert _chain("t", [1, 2], [3, 4]) == block_digest(_chain("t", [1, 2]), (3, 4))


@pytest.mark.parametrize(
    "other",
    [
        _chain("u", [1, 2], [3, 4]),
        _chain("t", [3, 4]),
        _chain("t", [9, 2], [3, 4]),
        _chain("t", [1, 2], [4, 3]),
        _chain("t", [1, 2, 3, 4]),
        _chain("t", [1, 2], [3, 4], []),
        root_digest("t"),
    ],
)
def test_any_difference_up_to_the_block_changes_the_digest(other: bytes) -> None:
    assert _chain("t", [1, 2], [3, 4]) != other


def test_tokens_above_two_to_the_32_do_not_wrap() -> None:
    assert _chain("t", [1]) != _chain("t", [1 + 2**32])


def test_a_salt_with_a_lone_surrogate_is_a_salt() -> None:
    assert root_digest("\ud800") != root_digest("?")


def test_a_salt_cannot_be_made_to_look_like_a_block() -> None:
    forged = "a" * 32 + "\x01" + "\0" * 7
    assert root_digest(forged) != block_digest(b"a" * 32, [1])


def _cache_of(num_blocks: int) -> PrefixCache:
    cache = PrefixCache()
    for block_id in range(num_blocks):
        assert cache.publish(bytes([block_id]), block_id)
    return cache


def test_eviction_takes_the_block_released_longest_ago() -> None:
    cache = _cache_of(3)
    for block_id in (2, 0, 1):
        cache.release(block_id)
    cache.hold(2)
    cache.release(2)
    cache.check_integrity()
    assert [cache.evict() for _ in range(3)] == [(each, bytes([each])) for each in range(3)]
    with pytest.raises(KeyError):
        cache.evict()
    assert len(cache) == 0
    assert cache.lookup(bytes([0])) is None
    cache.check_integrity()


def test_a_name_goes_to_another_block_and_the_old_one_is_none_of_the_caches() -> None:
    cache = _cache_of(3)
    cache.release(0)
    cache.release(1)
    assert cache.rename(bytes([0]), 7) == 0
    assert cache.rename(bytes([2]), 8) == 2
    cache.check_integrity()
    assert [cache.lookup(bytes([each])) for each in range(3)] == [7, 1, 8]
    assert not any(map(cache.is_published, (0, 2)))
    assert list(cache.idle_blocks()) == [1]
