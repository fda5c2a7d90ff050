"""Random lives of requests in a tiny pool whose evicted blocks go to a tier, come back from there, are
damaged, find no place, and outlive the pool: what a request finds is always its own past."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvpool.block_pool import BlockPool, Restoration
from kvpool.prefix_cache import block_digest, root_digest
from kvpool.tier import BlockTier
from worlds.kv_index import Tee
from worlds.lanes import examples
from worlds.pool_machine import ModelRequest, PoolMachine
from worlds.tier_world import ModelBytes, ModelSlots

NUM_SLOTS = 5


class TierMachine(PoolMachine):
    def _tier(self, block_size: int) -> BlockTier | None:
        self.bytes = ModelBytes(self.slots, block_size)
        self.kept = ModelSlots(NUM_SLOTS)
        return self._tier_over_slots()

    def _tier_over_slots(self) -> BlockTier:
        self.tier = BlockTier(self.bytes, self.kept)
        self.tier.blocks_per_step = 2
        self.tier.check_integrity()
        return self.tier

    def _restore(self, request: ModelRequest, cap: int) -> None:
        """Brings back a bounded number per step, and stops for a reason."""
        if not self.pool.enable_prefix_cache:
            return
        wanted = Restoration(request.token_ids, request.cache_salt, cap)
        while True:
            before = self.tier.num_restored
            is_done = self.pool.restore(wanted)
            self.pool.check_integrity()
            assert self.tier.num_restored - before <= self.tier.blocks_per_step
            if is_done:
                break
            assert self.tier.num_restored > before
        assert self._next_is_elsewhere(request, cap) or self.was_stopped(request, cap)

    def was_stopped(self, request: ModelRequest, cap: int) -> bool:
        """Whether all blocks that are not held by requests hold the text's beginning already, or what was
        to come went for a block that was copied there instead."""
        num_found = self._found(request, cap) // self.pool.block_size
        return self.pool.num_available <= num_found or len(self.tier) == NUM_SLOTS

    def _found(self, request: ModelRequest, cap: int) -> int:
        return self._expected_hit(request.token_ids, request.cache_salt, cap)

    def _next_is_elsewhere(self, request: ModelRequest, cap: int) -> bool:
        """Whether what follows the part in memory is not in the tier, so that no more can be found."""
        size, digest = self.pool.block_size, root_digest(request.cache_salt)
        end = self._found(request, cap) + size
        if end > cap:
            return True
        for start in range(0, end, size):
            digest = block_digest(digest, request.token_ids[start : start + size])
        return digest not in self.tier

    @rule(most=st.integers(1, 3))
    def save(self, most: int) -> None:
        num_before = len(self.pool._unsaved)
        is_left = self.pool.save(most)
        assert is_left == bool(self.pool._unsaved)
        if self.kept.is_ready:
            assert len(self.pool._unsaved) <= max(0, num_before - most)

    @rule()
    def save_everything(self) -> None:
        """All that is idle in memory is in the tier then, or as much of it as there is room for."""
        if not self.kept.is_ready:
            return
        self.pool.save_anew()
        while self.pool.save(2):
            self.pool.check_integrity()
        idle = list(self.pool._cache.idle_digests())[-NUM_SLOTS:]
        assert all(digest in self.tier for digest in idle)

    @rule(block=st.integers(0, 8), marks=st.integers(1, 3))
    def drafts_add_rows(self, block: int, marks: int) -> None:
        """A block that is kept is kept again with more rows when it is evicted or saved anew."""
        digest = self.pool._cache._digest_of.get(block)
        if digest is not None:
            self.bytes.extra[block] = digest, marks

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def damage(self, slot: int) -> None:
        if slot in self.kept.found:
            self.kept.damaged.add(slot)

    @rule()
    def the_writer_is_busy(self) -> None:
        self.kept.is_ready = not self.kept.is_ready

    @precondition(lambda self: self.pool.enable_prefix_cache)
    @rule()
    def a_step_fails(self) -> None:
        num_kept = len(self.tier)
        self.pool.forget_blocks()
        for request in self.model.values():
            request.takes_names = False
        assert len(self.tier) == num_kept

    @rule(in_order=st.booleans())
    def restart(self, in_order: bool) -> None:
        """The process ends, in order or not. Another one finds what it has left, and is asked for the
        same texts."""
        asked = dict(self.model)
        self._free_all()
        if in_order:
            self.tier.close()
        held = set(self.tier._held)
        self.slots.clear()
        self.bytes.extra.clear()
        for each in self.announcers:
            each.flush()
            each.cleared()
        pool = self.pool
        self.pool = BlockPool(
            pool.num_blocks,
            pool.block_size,
            pool.enable_prefix_cache,
            Tee(*self.announcers),
            self._tier_over_slots(),
        )
        assert set(self.tier._held) == held
        for request_id, request in asked.items():
            request.num_draft_blocks = 0
            self._open(request_id, request, max(0, len(request.token_ids) - 1), None)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)
