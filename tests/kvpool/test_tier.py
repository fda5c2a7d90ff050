"""The second tier of the prefix cache: what goes, what stays, and what is written twice."""

from __future__ import annotations

import pytest

from kvpool.block_pool import BlockPool, Restoration
from kvpool.prefix_cache import block_digest, root_digest
from kvpool.tier import BlockTier, MemorySlots
from worlds.tier_world import ModelBytes, ModelSlots

SIZE = 2


def tier_of(num_slots: int) -> tuple[BlockTier, ModelBytes, ModelSlots]:
    content = ModelBytes({slot: slot for slot in range(100)}, SIZE)
    slots = ModelSlots(num_slots)
    return BlockTier(content, slots), content, slots


def test_the_least_recently_used_goes_first() -> None:
    tier, *_ = tier_of(2)
    for digest in (b"a", b"b"):
        tier.keep(digest, 0)
    tier.touch(b"a")
    tier.keep(b"c", 1)
    assert [b"a" in tier, b"b" in tier, b"c" in tier] == [True, False, True]
    assert len(tier) == 2


def test_how_recently_blocks_were_used_outlives_the_tier() -> None:
    tier, content, slots = tier_of(3)
    for digest in (b"a", b"b", b"c"):
        tier.keep(digest, 0)
    tier.touch(b"a")
    tier.close()
    again = BlockTier(content, slots)
    again.keep(b"d", 0)
    assert [digest in again for digest in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_a_block_is_copied_once_and_again_only_with_more_rows() -> None:
    tier, content, slots = tier_of(3)
    tier.keep(b"a", 0)
    first = slots.found[tier._held[b"a"][0]]
    tier.keep(b"a", 0)
    assert slots.found[tier._held[b"a"][0]] is first
    content.extra[5] = b"a", 2
    tier.keep(b"a", 5)
    assert slots.found[tier._held[b"a"][0]][0].marks == 2
    tier.keep(b"a", 0)  # which has no such rows
    assert slots.found[tier._held[b"a"][0]][0].marks == 2
    assert len(slots.found) == 1


def test_what_finds_no_place_is_counted() -> None:
    tier, _, slots = tier_of(3)
    slots.is_ready = False
    tier.keep(b"a", 0)
    assert (len(tier), tier.num_dropped) == (0, 1)


def test_a_damaged_block_is_gone_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tier, _, slots = tier_of(3)
    tier.keep(b"a", 0)
    slots.damaged.add(tier._held[b"a"][0])
    assert not tier.restore(b"a", 1)
    assert b"a" not in tier
    assert (tier.num_restored, tier.num_damaged, tier.num_dropped) == (0, 1, 0)
    assert "damaged" in caplog.text
    tier.check_integrity()


def test_slots_in_memory_keep_bytes() -> None:
    content = ModelBytes({slot: slot for slot in range(100)}, SIZE)
    tier = BlockTier(content, MemorySlots(2, content.num_bytes))
    tier.keep(b"a", 3)
    tier.keep(b"b", 4)
    content.contents.update({0: "x", 1: "x"})
    assert tier.restore(b"a", 0)
    assert [content.contents[slot] for slot in (0, 1)] == [6, 7]


def test_a_prefix_outlives_what_hangs_on_it() -> None:
    """A full tier drops the end of a text that was brought back before its beginning."""
    tier, *_ = tier_of(3)
    pool = BlockPool(4, SIZE, tier=tier)
    text, digests = list(range(6)), [root_digest("")]
    for start in range(0, 6, SIZE):
        digests.append(block_digest(digests[-1], text[start : start + SIZE]))
        tier.keep(digests[-1], 0)
    assert pool.restore(Restoration(text, "", 6))
    tier.keep(b"other", 0)
    assert [digest in tier for digest in digests[1:]] == [True, True, False]
