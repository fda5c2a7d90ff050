"""The block pool: who may write and read which KV block.

It owns the free list, the reference counts, the requests' block tables and the prefix cache, knows
no tensors, and is called by the engine thread only. A block is in one of four states:

    free       in no table, content meaningless
    draft      leased by one request for unverified tokens; private, never published
    committed  in at least one request's table
    cached     in no table, but published: kept for its content until evicted

Logical slot i of a request is physical slot
``table[i // block_size] * block_size + i % block_size``.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.errors import BlockPoolError
from kvpool.prefix_cache import PrefixCache, block_digest, root_digest
from kvpool.state_slots import StateSlots
from kvpool.tier import BlockTier

_STATES_AT_ONCE = 1
"""Copied to the tier while nothing is asked: each takes as long as many blocks."""


class CacheListener(Protocol):
    """Hears which blocks the prefix cache can serve: called by the pool, on its thread, after each
    change and in the order of changes."""

    def stored(
        self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], cache_salt: str
    ) -> None:
        """A full block, of ``token_ids``, can be found by its digest. ``parent`` names the block before
        it; None: it is the first of its text."""

    def removed(self, digest: bytes) -> None:
        """It was evicted."""

    def cleared(self) -> None:
        """All were forgotten."""


@dataclass(slots=True)
class BlockTable:
    """Slots of a request, in logical order::

        [0, num_committed_tokens)           final; full blocks here are published and may be shared
        [.., num_committed_blocks * size)   committed blocks still to be filled, private
        [.., len(block_ids) * size)         draft blocks, private, never published

    ``block_ids`` are ints of 32 bits, as kernels read them: a step that copies the table copies memory.
    ``digest`` names the last full committed block (at first the tenant's root); None: this request
    publishes nothing. ``takes_names``: it computes what it found in the cache but could not use, so that
    what it publishes is worth more than what has the name already.
    """

    digest: bytes | None
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_committed_blocks: int = 0
    num_committed_tokens: int = 0
    cache_salt: str = ""
    takes_names: bool = False

    @property
    def num_draft_blocks(self) -> int:
        return len(self.block_ids) - self.num_committed_blocks


@dataclass(slots=True)
class Restoration:
    """A text's blocks on their way back from the tier, among those of its first ``max_tokens``.
    ``digests``: the root, then of its full blocks as far as they were looked for."""

    token_ids: Sequence[int]
    cache_salt: str
    max_tokens: int
    digests: list[bytes] = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.digests = [root_digest(self.cache_salt)]

    def block(self, index: int, size: int) -> tuple[bytes, Sequence[int]]:
        """Returns digest and tokens of a block; those before it were asked for."""
        own = self.token_ids[index * size : (index + 1) * size]
        if index + 1 == len(self.digests):
            self.digests.append(block_digest(self.digests[index], own))
        return self.digests[index + 1], own


class BlockPool:
    """All methods that name a request raise BlockPoolError if it is not open (``open``: if it is).

    ``num_prefix_queries`` and ``num_prefix_hits`` count tokens and only ever grow. ``listener`` hears
    about changes of the prefix cache. ``tier`` keeps evicted blocks. ``states``: slots for a model with
    states, whose requests start where there is a state.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_cache: bool = True,
        listener: CacheListener | None = None,
        tier: BlockTier | None = None,
        states: StateSlots | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("num_blocks and block_size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        # A stack, lowest ids on top: blocks in use stay few and together, which keeps untouched
        # memory untouched and lets a lone request's blocks lie side by side.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._tables: dict[str, BlockTable] = {}
        self._cache = PrefixCache()
        self._nameless: set[int] = set()
        """Committed blocks whose name went to another block. Several requests may hold one still."""
        self._listener = listener
        self.tier = tier
        self.states = states
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()
        """With a tier that outlives the process, the published blocks that were not copied there since,
        oldest first."""
        self._num_draft = 0
        self._num_committed = 0

    # Life of a request

    def restore(self, wanted: Restoration) -> bool:
        """Bring back from the tier what ``open`` would find if it had not been evicted. True: nothing
        is left to restore; False: call again in the next step.

        A step restores a bounded number of blocks, into available ones. They are then cached without an
        owner, and may be evicted again.
        """
        if self.tier is None or not self.enable_prefix_cache:
            return True
        wanted.num_steps += 1
        num_blocks = min(wanted.max_tokens, len(wanted.token_ids)) // self.block_size
        # Twice what it takes: what has come back may go before all of it is there.
        is_late = wanted.num_steps > 2 * (num_blocks // self.tier.blocks_per_step + 1)
        return is_late or self._bring_back(self.tier, wanted, num_blocks)

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        cache_salt: str,
        max_cached_tokens: int,
        is_new: bool = True,
        num_usable: Callable[[Sequence[int]], int] | None = None,
    ) -> int:
        """Start a table with the longest cached run of full blocks; returns ``num_cached_tokens``.

        These tokens are committed for the request. At most ``max_cached_tokens`` are taken (the caller
        needs at least one row's logits, so it passes less than ``len(token_ids)``); 0 asks the cache
        nothing and counts no query. Nor does a request that is not new: one that comes back after a
        preemption finds its own blocks, which says nothing of the cache.

        ``num_usable`` is asked of the blocks that were found, if there are any: how many of their
        tokens, from the first on, are of use to the request, or more if all are. The hit is cut to the
        full blocks among these. The request computes the rest into its own blocks, which take over the
        names of the unusable ones once they are full.
        """
        if request_id in self._tables:
            raise BlockPoolError(f"request {request_id!r} is already open")
        if max_cached_tokens < 0:
            raise BlockPoolError(f"max_cached_tokens is negative: {max_cached_tokens}")
        if not self.enable_prefix_cache:
            self._tables[request_id] = BlockTable(digest=None)
            if self.states is not None:
                self.states.open(request_id, [], 0, len(token_ids))
            return 0
        most = min(max_cached_tokens, len(token_ids))
        digests, block_ids = self._match(token_ids, cache_salt, most)
        num_found = len(block_ids)
        if block_ids and num_usable is not None:
            del block_ids[self._num_full_blocks(num_usable(block_ids)) :]
        if self.states is not None:
            usable = digests[: len(block_ids) + 1]
            del block_ids[self.states.open(request_id, usable, num_found, len(token_ids)) :]
        num_cached_tokens = len(block_ids) * self.block_size
        if is_new and max_cached_tokens > 0:
            self.num_prefix_queries += len(token_ids)
            self.num_prefix_hits += num_cached_tokens
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._cache.hold(block_id)
                self._num_committed += 1
            self._ref_counts[block_id] += 1
        self._tables[request_id] = BlockTable(
            digests[len(block_ids)],
            block_ids,
            len(block_ids),
            num_cached_tokens,
            cache_salt,
            takes_names=len(block_ids) < num_found,
        )
        return num_cached_tokens

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Make slots [0, num_tokens) lie in committed blocks; False, nothing changed, on shortage.

        Draft blocks in reach are taken over; then free blocks, then evicted ones.
        """
        table = self._table(request_id)
        num_needed = self._num_blocks_for(num_tokens)
        num_new = num_needed - len(table.block_ids)
        if num_new > 0:
            if num_new > self.num_available:
                return False
            for _ in range(num_new):
                self._lease(table)
        self._commit_blocks(table, num_needed)
        return True

    def allocate_draft(self, request_id: str, num_tokens: int) -> int:
        """Lease draft blocks until slots [0, num_tokens) are covered, or as many as there are.

        Returns the number of slots that the table covers now, whole blocks: it may exceed
        ``num_tokens``, and falls short of it only on shortage. The caller drafts what fits.
        """
        table = self._table(request_id)
        num_new = self._num_blocks_for(num_tokens) - len(table.block_ids)
        for _ in range(min(num_new, self.num_available)):
            self._lease(table)
        return len(table.block_ids) * self.block_size

    def promote(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The first ``num_computed_tokens`` of ``token_ids`` are final, and their KV is in its slots.

        Draft blocks that they reach into become committed; newly full blocks are published, unless
        an equal block is in the cache already: then the request's own stays private, or takes over the
        name where the request could not use what it found (``open``). Costs time in
        proportion to the newly committed tokens. Raises BlockPoolError beyond the covered slots,
        beyond ``token_ids``, or if fewer tokens are named than last time.
        """
        table = self._table(request_id)
        least = table.num_committed_tokens
        most = min(len(table.block_ids) * self.block_size, len(token_ids))
        if not least <= num_computed_tokens <= most:
            raise BlockPoolError(
                f"request {request_id!r} cannot promote {num_computed_tokens} tokens: "
                f"{least} are committed, and {most} have slots and token ids"
            )
        self._commit_blocks(table, self._num_blocks_for(num_computed_tokens))
        table.num_committed_tokens = num_computed_tokens
        first_new = least // self.block_size
        for index in range(first_new, num_computed_tokens // self.block_size):
            self._publish(request_id, table, index, token_ids)
        if self.states is not None:
            self.states.publish(request_id)

    def free_draft(self, request_id: str) -> None:
        """Give back the draft blocks that ``promote`` did not turn into committed ones."""
        table = self._table(request_id)
        num_draft = table.num_draft_blocks
        self._num_draft -= num_draft
        for _ in range(num_draft):
            block_id = table.block_ids.pop()
            self._ref_counts[block_id] = 0
            self._free.append(block_id)

    def free(self, request_id: str) -> None:
        """End of a table: at finish, abort and preemption alike."""
        self.free_draft(request_id)
        if self.states is not None:
            self.states.close(request_id)
        # Last block first: it becomes the oldest, so that a prefix outlives what hangs on it.
        for block_id in reversed(self._tables.pop(request_id).block_ids):
            self._release(block_id)

    def forget_blocks(self) -> None:
        """Forget all published content but that of the tier, whose blocks were copied there before
        whatever is wrong now. Requests open now go on, but publish nothing any more: what they hold may
        be what the caller wants forgotten."""
        self._free.extend(self._cache.clear())
        self._unsaved.clear()
        if self.states is not None:
            self.states.clear()
        for table in self._tables.values():
            table.digest = None
        if self._listener is not None:
            self._listener.cleared()

    # The tier

    def save(self, most: int) -> bool:
        """Copy to the tier at most so many published blocks that were not copied yet, newest first, and
        then states. False: none are left. Nothing is copied while the tier takes none."""
        tier = self.tier
        if tier is None or not tier.slots.is_writable:
            self._unsaved.clear()
            return False
        # They would go again for those that follow.
        while len(self._unsaved) > tier.slots.num_slots:
            self._unsaved.popitem(last=False)
        while self._unsaved and most > 0 and tier.slots.is_ready:
            digest, _ = self._unsaved.popitem()
            block_id = self._cache.lookup(digest)
            assert block_id is not None, "a block was evicted without a word"
            tier.keep(digest, block_id)
            most -= 1
        if self._unsaved or self.states is None:
            return bool(self._unsaved)
        return self.states.save(_STATES_AT_ONCE)

    def save_anew(self) -> None:
        """Have ``save`` look at all idle blocks again: since they were copied, drafts may have added
        rows."""
        self._unsaved = OrderedDict.fromkeys(self._cache.idle_digests())

    # Reading

    @property
    def tiers(self) -> list[BlockTier]:
        """That of blocks and that of states, as far as there are any."""
        both = [self.tier, None if self.states is None else self.states.tier]
        return [tier for tier in both if tier is not None]

    def block_table(self, request_id: str) -> array[int]:
        """The live table, committed blocks then draft blocks: read it, never keep or change it."""
        return self._table(request_id).block_ids

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could get: free ones and evictable ones."""
        return len(self._free) + self._cache.num_idle

    def counts(self) -> dict[str, int]:
        """Blocks by state; the values add up to ``num_blocks``."""
        return {
            "free": len(self._free),
            "draft": self._num_draft,
            "committed": self._num_committed,
            "cached": self._cache.num_idle,
        }

    # Inside

    def _table(self, request_id: str) -> BlockTable:
        table = self._tables.get(request_id)
        if table is None:
            raise BlockPoolError(f"request {request_id!r} is not open")
        return table

    def _num_blocks_for(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise BlockPoolError(f"a number of tokens is negative: {num_tokens}")
        return -(-num_tokens // self.block_size)

    def _num_full_blocks(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise BlockPoolError(f"a number of tokens is negative: {num_tokens}")
        return num_tokens // self.block_size

    def _match(
        self, token_ids: Sequence[int], cache_salt: str, max_tokens: int
    ) -> tuple[list[bytes], array[int]]:
        """Returns the blocks that were found, and what names them: the root, then a digest for each."""
        digests = [root_digest(cache_salt)]
        block_ids = array("i")
        for start in range(0, max_tokens - self.block_size + 1, self.block_size):
            digest = block_digest(digests[-1], token_ids[start : start + self.block_size])
            block_id = self._cache.lookup(digest)
            if block_id is None:
                break
            digests.append(digest)
            block_ids.append(block_id)
        return digests, block_ids

    def _lease(self, table: BlockTable) -> None:
        """One more draft block; the caller has seen that there is one."""
        block_id = self._take()
        self._ref_counts[block_id] = 1
        table.block_ids.append(block_id)
        self._num_draft += 1

    def _take(self) -> int:
        """Returns a block that is in no state; the caller has seen that there is one."""
        if self._free:
            return self._free.pop()
        block_id, digest = self._cache.evict()
        if self.states is not None:
            self.states.evict(digest)
        if self.tier is not None:
            self._unsaved.pop(digest, None)
            self.tier.keep(digest, block_id)
        if self._listener is not None:
            self._listener.removed(digest)
        return block_id

    def _bring_back(self, tier: BlockTier, wanted: Restoration, num_blocks: int) -> bool:
        """One step of ``restore``."""
        held: dict[bytes, int] = {}  # lest those that are there go for those that follow
        num_left = tier.blocks_per_step
        try:
            for index in range(num_blocks):
                digest, own = wanted.block(index, self.block_size)
                block_id = self._cache.lookup(digest)
                if block_id is not None:
                    if not self._ref_counts[block_id]:
                        self._cache.hold(block_id)
                        held[digest] = block_id
                    continue
                if digest not in tier or not self.num_available:
                    return True
                if not num_left:
                    return False
                block_id = self._restored(tier, digest)
                if block_id is None:
                    return True
                held[digest] = block_id
                num_left -= 1
                if self._listener is not None:
                    before = wanted.digests[index] if index else None
                    self._listener.stored(digest, before, own, wanted.cache_salt)
            return True
        finally:
            # Last block first, as in ``free``.
            for digest, block_id in reversed(held.items()):
                self._cache.release(block_id)
                tier.touch(digest)

    def _restored(self, tier: BlockTier, digest: bytes) -> int | None:
        """Returns a block, published and in no other state, with the content of one that is in the tier;
        None: that is damaged."""
        block_id = self._take()
        if digest in tier and tier.restore(digest, block_id):
            self._cache.publish(digest, block_id)
            return block_id
        self._free.append(block_id)
        return None

    def _commit_blocks(self, table: BlockTable, num_blocks: int) -> None:
        """Make the first ``num_blocks`` of the table committed; never fewer than there are."""
        num_new = num_blocks - table.num_committed_blocks
        if num_new > 0:
            table.num_committed_blocks += num_new
            self._num_draft -= num_new
            self._num_committed += num_new

    def _publish(
        self, request_id: str, table: BlockTable, index: int, token_ids: Sequence[int]
    ) -> None:
        if table.digest is None:
            return
        start = index * self.block_size
        own = token_ids[start : start + self.block_size]
        parent = table.digest
        table.digest = block_digest(parent, own)
        if self.states is not None:
            self.states.named(request_id, start + self.block_size, table.digest)
        is_new = self._cache.publish(table.digest, table.block_ids[index])
        if is_new and self._listener is not None:
            before = parent if index else None
            self._listener.stored(table.digest, before, own, table.cache_salt)
        if not is_new and table.takes_names:
            self._take_name(table.digest, table.block_ids[index])
        if self.tier is not None and self.tier.slots.is_lasting and (is_new or table.takes_names):
            self._unsaved[table.digest] = None

    def _take_name(self, digest: bytes, block_id: int) -> None:
        """The block is found by the name from now on. What can be found is the same, so that listeners
        hear nothing."""
        old = self._cache.rename(digest, block_id)
        if self._ref_counts[old]:
            self._nameless.add(old)
        else:
            self._free.append(old)

    def _release(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        self._num_committed -= 1
        self._nameless.discard(block_id)
        if self._cache.is_published(block_id):
            self._cache.release(block_id)
        else:
            self._free.append(block_id)

    # Integrity

    def check_integrity(self) -> None:
        """Recompute from the tables all that can be derived from them, in time in proportion to the pool:
        after every operation in tests and, where wanted, at idle in production. Raises AssertionError
        naming the first thing that does not hold."""
        self._cache.check_integrity()
        for tier in self.tiers:
            tier.check_integrity()
        if self.states is not None:
            self.states.check_integrity([*self._tables])
        unknown = [digest for digest in self._unsaved if self._cache.lookup(digest) is None]
        _require(not unknown, "blocks wait to be copied to the tier that are not published")
        is_right = self.enable_prefix_cache or not len(self._cache)
        _require(is_right, "a block was published although the prefix cache is off")
        holders: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for request_id, table in self._tables.items():
            self._check_table(request_id, table)
            for index, block_id in enumerate(table.block_ids):
                holders[block_id].append((request_id, index))
        for block_id, places in holders.items():
            if len(places) > 1:
                self._check_shared(block_id, places)
        self._check_states({block_id: len(places) for block_id, places in holders.items()})

    def _check_table(self, request_id: str, table: BlockTable) -> None:
        ids, size, whose = table.block_ids, self.block_size, f"request {request_id!r}"
        num_blocks, num_tokens = table.num_committed_blocks, table.num_committed_tokens
        _require(len(set(ids)) == len(ids), f"{whose}: a block is in its table twice")
        known = all(0 <= block_id < self.num_blocks for block_id in ids)
        _require(known, f"{whose}: its table names a block that does not exist")
        committed = f"{num_tokens} tokens and {num_blocks} of {len(ids)} blocks are committed"
        fits = 0 <= num_blocks <= len(ids) and 0 <= num_tokens <= num_blocks * size
        _require(fits, f"{whose}: {committed}, which cannot be")
        early = [each for each in ids[num_tokens // size :] if self._cache.is_published(each)]
        _require(not early, f"{whose}: blocks {early} are published before they are full")

    def _check_shared(self, block_id: int, places: Sequence[tuple[str, int]]) -> None:
        """Shared blocks are full, committed, at one place of the sequence, and came from the cache.

        A reset of the cache takes the digests of blocks in use, and with them their holders' right to
        publish: only between such holders may a block without a digest be shared, or where its name
        went to another block.
        """
        whose = f"block {block_id}, shared by {[request_id for request_id, _ in places]}"
        _require(len({index for _, index in places}) == 1, f"{whose}: at different places")
        was_named = self._cache.is_published(block_id) or block_id in self._nameless
        for request_id, index in places:
            table = self._tables[request_id]
            is_full = index < table.num_committed_tokens // self.block_size
            _require(is_full, f"{whose}: {request_id!r} may write to it")
            _require(was_named or table.digest is None, f"{whose}: it is private")

    def _check_states(self, num_holders: dict[int, int]) -> None:
        """Every block is in exactly one of: tables, the free list, the idle blocks of the cache."""
        states = Counter([*num_holders, *self._free, *self._cache.idle_blocks()])
        for block_id, ref_count in enumerate(self._ref_counts):
            expected = num_holders.get(block_id, 0)
            counts = f"ref count {ref_count}, but in {expected} tables"
            _require(ref_count == expected, f"block {block_id}: {counts}")
            _require(states[block_id] == 1, f"block {block_id}: in {states[block_id]} states")
        named = [block_id for block_id in self._free if self._cache.is_published(block_id)]
        _require(not named, f"blocks {named}: free, but still published")
        nameless = [
            block_id
            for block_id in self._nameless
            if block_id not in num_holders or self._cache.is_published(block_id)
        ]
        _require(not nameless, f"blocks {nameless}: lost their names, but are published or unused")
        num_draft = sum(table.num_draft_blocks for table in self._tables.values())
        for name, expected in (("draft", num_draft), ("committed", len(num_holders) - num_draft)):
            counted = self.counts()[name]
            _require(counted == expected, f"{name} counter {counted}, counted {expected}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
