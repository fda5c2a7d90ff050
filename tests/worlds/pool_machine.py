"""Random lives of requests in a tiny pool, against a model that knows what each slot holds.

The model writes, for every slot, the cache_salt and all tokens up to it: what a key in that slot depends
on. A prefix hit is right if and only if the slots hold exactly that; sharing is safe if and only if
nobody ever writes to a slot that another request sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from engine.kv_events.announcer import Announcer
from engine.kv_events.wire import block_hash
from kvpool.block_pool import BlockPool
from kvpool.prefix_cache import block_digest, root_digest
from kvpool.state_slots import StateSlots
from kvpool.tier import BlockTier
from worlds.kv_index import Tee, Wire, cached_hashes

DRAFT = ("unverified",)


@dataclass
class ModelRequest:
    cache_salt: str
    token_ids: list[int]
    num_computed_tokens: int
    num_draft_blocks: int = 0
    takes_names: bool = False


class PoolMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(3, 9),
        block_size=st.integers(1, 3),
        cache=st.sampled_from([True] * 4 + [False]),
    )
    def start(self, num_blocks: int, block_size: int, cache: bool) -> None:
        self.told, self.told_plain = Wire(), Wire()
        self.announcers = [
            Announcer(block_size, salted, wire.send)
            for wire, salted in ((self.told, True), (self.told_plain, False))
        ]
        self.plain: set[int] = set()
        self.model: dict[str, ModelRequest] = {}
        self.slots: dict[int, Any] = {}
        self.num_opened = 0
        listener, tier = Tee(*self.announcers), self._tier(block_size)
        self.pool = BlockPool(
            num_blocks, block_size, cache, listener, tier, self._states(block_size)
        )

    def _tier(self, block_size: int) -> BlockTier | None:
        del block_size
        return None

    def _states(self, block_size: int) -> StateSlots | None:
        del block_size
        return None

    def _has_seat(self) -> bool:
        return True

    def _begin(self, request: ModelRequest, num_tokens: int) -> int:
        """Returns behind how many of so many cached tokens a request can begin."""
        del request
        return num_tokens

    def _restore(self, request: ModelRequest, cap: int) -> None:
        """Before a request opens."""

    # What the engine would do with the tensors

    def _slot(self, request_id: str, position: int) -> int:
        size = self.pool.block_size
        return self.pool.block_table(request_id)[position // size] * size + position % size

    def _write(self, request_id: str, position: int, content: Any) -> None:
        slot = self._slot(request_id, position)
        block_id = slot // self.pool.block_size
        holders = [name for name in self.model if block_id in self.pool.block_table(name)]
        assert holders == [request_id], f"{request_id} writes to a block of {holders}"
        self.slots[slot] = content

    def _content(self, request: ModelRequest, position: int) -> Any:
        return request.cache_salt, tuple(request.token_ids[: position + 1])

    def _model_available(self) -> int:
        held = {block_id for name in self.model for block_id in self.pool.block_table(name)}
        return self.pool.num_blocks - len(held)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    # The rules

    @rule(
        target=requests,
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        cache_salt=st.sampled_from(["", "b"]),
        slack=st.integers(0, 2),
        usable=st.sampled_from([None, None, 0, 1, 3, 5]),
    )
    def open(self, token_ids: list[int], cache_salt: str, slack: int, usable: int | None) -> Any:
        if not self._has_seat():
            return multiple()
        request_id = f"r{self.num_opened}"
        self.num_opened += 1
        cap = max(0, len(token_ids) - slack)
        self._open(request_id, ModelRequest(cache_salt, token_ids, 0), cap, usable)
        return multiple(request_id)

    def _open(self, request_id: str, request: ModelRequest, cap: int, usable: int | None) -> None:
        """``usable``: of so many tokens of a hit the request can make use; None: of all."""
        self._restore(request, cap)
        size = self.pool.block_size
        published = self._expected_hit(request.token_ids, request.cache_salt, cap)
        most = published if usable is None else min(usable, published)
        most = self._begin(request, most // size * size)
        num_cached = self.pool.open(
            request_id,
            request.token_ids,
            request.cache_salt,
            cap,
            num_usable=None if usable is None else lambda _: usable,
        )
        assert num_cached == most
        assert num_cached <= cap
        assert len(self.pool.block_table(request_id)) * size == num_cached
        request.num_computed_tokens = num_cached
        request.takes_names = num_cached < published
        self.model[request_id] = request

    def _expected_hit(self, token_ids: list[int], cache_salt: str, cap: int) -> int:
        size, digest, num_cached = self.pool.block_size, root_digest(cache_salt), 0
        while num_cached + size <= cap:
            digest = block_digest(digest, token_ids[num_cached : num_cached + size])
            if self.pool._cache.lookup(digest) is None:
                break
            num_cached += size
        return num_cached

    @rule(request_id=requests, num_more=st.integers(0, 8))
    def allocate(self, request_id: str, num_more: int) -> None:
        request = self.model[request_id]
        num_tokens = request.num_computed_tokens + num_more
        before = list(self.pool.block_table(request_id))
        num_new = self._num_blocks_for(num_tokens) - len(before)
        fits = num_new <= self._model_available()
        assert self.pool.allocate(request_id, num_tokens) == fits
        after = self.pool.block_table(request_id)
        assert list(after[: len(before)]) == before
        assert len(after) - len(before) == (max(0, num_new) if fits else 0)
        if fits:
            num_kept = len(after) - self._num_blocks_for(num_tokens)
            request.num_draft_blocks = min(request.num_draft_blocks, max(0, num_kept))

    @rule(request_id=requests, num_more=st.integers(0, 8))
    def allocate_draft(self, request_id: str, num_more: int) -> None:
        request = self.model[request_id]
        num_tokens = request.num_computed_tokens + num_more
        before, available = len(self.pool.block_table(request_id)), self._model_available()
        num_new = max(0, min(self._num_blocks_for(num_tokens) - before, available))
        covered = self.pool.allocate_draft(request_id, num_tokens)
        assert covered == (before + num_new) * self.pool.block_size
        request.num_draft_blocks += num_new
        for position in range(request.num_computed_tokens, covered):
            self._write(request_id, position, DRAFT)

    @rule(request_id=requests, num_more=st.integers(0, 8), token=st.integers(0, 1))
    def promote(self, request_id: str, num_more: int, token: int) -> None:
        """Verification: tokens are emitted, their KV lies in their slots, the pool is told."""
        request = self.model[request_id]
        covered = len(self.pool.block_table(request_id)) * self.pool.block_size
        num_computed_tokens = min(request.num_computed_tokens + num_more, covered)
        while len(request.token_ids) <= num_computed_tokens:
            request.token_ids.append(token)
        for position in range(request.num_computed_tokens, num_computed_tokens):
            self._write(request_id, position, self._content(request, position))
        self._promote(request_id, num_computed_tokens)

    def _promote(self, request_id: str, num_computed_tokens: int) -> None:
        request = self.model[request_id]
        covered = len(self.pool.block_table(request_id)) * self.pool.block_size
        self.pool.promote(request_id, request.token_ids, num_computed_tokens)
        if request.takes_names:
            self._names_are_its_own(request_id, request.num_computed_tokens, num_computed_tokens)
        request.num_computed_tokens = num_computed_tokens
        num_past = covered // self.pool.block_size - self._num_blocks_for(num_computed_tokens)
        request.num_draft_blocks = min(request.num_draft_blocks, num_past)

    def _names_are_its_own(self, request_id: str, first: int, end: int) -> None:
        """Checks that blocks which the request has filled are those that the next one finds."""
        request, size = self.model[request_id], self.pool.block_size
        digest, table = root_digest(request.cache_salt), self.pool.block_table(request_id)
        for index in range(end // size):
            digest = block_digest(digest, request.token_ids[index * size : (index + 1) * size])
            if index >= first // size:
                assert self.pool._cache.lookup(digest) == table[index]

    @rule(request_id=requests)
    def free_draft(self, request_id: str) -> None:
        request = self.model[request_id]
        before = list(self.pool.block_table(request_id))
        self.pool.free_draft(request_id)
        kept = len(before) - request.num_draft_blocks
        assert list(self.pool.block_table(request_id)) == before[:kept]
        request.num_draft_blocks = 0

    @rule(request_id=consumes(requests))
    def free(self, request_id: str) -> None:
        self.pool.free(request_id)
        del self.model[request_id]

    @rule(request_id=requests, slack=st.integers(1, 2), usable=st.sampled_from([None, None, 0, 4]))
    def preempt_and_resume(self, request_id: str, slack: int, usable: int | None) -> None:
        request = self.model.pop(request_id)
        self.pool.free(request_id)
        cap = max(0, len(request.token_ids) - slack)
        request.num_draft_blocks = 0
        self._open(request_id, request, cap, usable)

    @rule(dice=st.integers(0, 19))
    def forget_blocks(self, dice: int) -> None:
        if dice == 0:
            self.pool.forget_blocks()
            assert self.pool.counts()["cached"] == 0
            for request in self.model.values():
                request.takes_names = False

    # What always holds

    @invariant()
    def integrity(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def listeners_know_what_is_cached(self) -> None:
        for each in self.announcers:
            each.flush()
        cached = cached_hashes(self.pool)
        assert self.told.index.tokens.keys() == cached
        self.plain |= {
            each for request in self.model.values() if not request.cache_salt
            for each in self._hashes(request)
        }  # fmt: skip
        assert self.told_plain.index.tokens.keys() == cached & self.plain
        assert set(self.told.index.salts.values()) <= {"b"}
        assert not self.told_plain.index.salts

    def _hashes(self, request: ModelRequest) -> Iterator[int]:
        """Yields the hashes of the blocks that the request's computed tokens fill."""
        size, digest = self.pool.block_size, root_digest(request.cache_salt)
        for start in range(0, request.num_computed_tokens - size + 1, size):
            digest = block_digest(digest, request.token_ids[start : start + size])
            yield block_hash(digest)

    @invariant()
    def counts_match_the_model(self) -> None:
        counts = self.pool.counts()
        num_draft = sum(request.num_draft_blocks for request in self.model.values())
        assert counts["draft"] == num_draft
        assert self.pool.num_available == self._model_available()
        held = self.pool.num_blocks - self._model_available()
        assert counts["committed"] == held - num_draft

    @invariant()
    def committed_slots_hold_the_request_own_past(self) -> None:
        for request_id, request in self.model.items():
            for position in range(request.num_computed_tokens):
                slot = self._slot(request_id, position)
                assert self.slots[slot] == self._content(request, position)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self._free_all()
        counts = self.pool.counts()
        assert counts["free"] + counts["cached"] == self.pool.num_blocks
        self.pool.forget_blocks()
        assert self.pool.counts()["free"] == self.pool.num_blocks

    def _free_all(self) -> None:
        for request_id in list(self.model):
            self.pool.free(request_id)
            del self.model[request_id]
            self.pool.check_integrity()
