"""The pool's invariants, recomputed from scratch.

The block tables are the truth; everything else the pool keeps can be derived from them and is
compared here. Called after every operation in tests and, where wanted, at idle in production: it
costs time in proportion to the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvpool.block_table import BlockTable
from kvpool.prefix_cache import PrefixCache


def check_pool(
    *,
    block_size: int,
    tables: Mapping[str, BlockTable],
    ref_counts: Sequence[int],
    free: Sequence[int],
    cache: PrefixCache,
    counts: Mapping[str, int],
) -> None:
    """Raises AssertionError naming the first thing that does not hold."""
    cache.check_integrity()
    for request_id, table in tables.items():
        _check_table(request_id, table, block_size, len(ref_counts), cache)
    _check_ref_counts(tables, ref_counts)
    _check_sharing(tables, block_size, cache)
    _check_states(tables, ref_counts, free, cache)
    _check_counts(tables, ref_counts, counts)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _check_table(
    request_id: str, table: BlockTable, block_size: int, num_blocks: int, cache: PrefixCache
) -> None:
    ids = table.block_ids
    _require(len(set(ids)) == len(ids), f"request {request_id!r}: a block is in its table twice")
    _require(
        all(0 <= block_id < num_blocks for block_id in ids),
        f"request {request_id!r}: its table names a block that does not exist",
    )
    _require(
        0 <= table.num_committed_blocks <= len(ids),
        f"request {request_id!r}: {table.num_committed_blocks} committed of {len(ids)} blocks",
    )
    _require(
        0 <= table.num_committed_tokens <= table.num_committed_blocks * block_size,
        f"request {request_id!r}: {table.num_committed_tokens} committed tokens do not fit into "
        f"{table.num_committed_blocks} committed blocks",
    )
    num_full = table.num_committed_tokens // block_size
    for block_id in ids[num_full:]:
        _require(
            not cache.is_published(block_id),
            f"request {request_id!r}: block {block_id} is published before it is committed in full",
        )


def _check_ref_counts(tables: Mapping[str, BlockTable], ref_counts: Sequence[int]) -> None:
    expected = Counter(block_id for table in tables.values() for block_id in table.block_ids)
    for block_id, ref_count in enumerate(ref_counts):
        _require(
            ref_count == expected[block_id],
            f"block {block_id}: ref count {ref_count}, but in {expected[block_id]} tables",
        )


def _check_sharing(tables: Mapping[str, BlockTable], block_size: int, cache: PrefixCache) -> None:
    """Shared blocks are full, committed, at one place of the sequence, and came from the cache.

    A reset of the cache takes the digests of blocks in use, and with them their holders' right to
    publish: only between such holders may a block without a digest be shared.
    """
    holders: dict[int, list[tuple[str, int]]] = {}
    for request_id, table in tables.items():
        for index, block_id in enumerate(table.block_ids):
            holders.setdefault(block_id, []).append((request_id, index))
    for block_id, places in holders.items():
        if len(places) == 1:
            continue
        names = [request_id for request_id, _ in places]
        _require(
            len({index for _, index in places}) == 1,
            f"block {block_id}: at different places in the tables of {names}",
        )
        for request_id, index in places:
            table = tables[request_id]
            _require(
                index < table.num_committed_tokens // block_size,
                f"block {block_id}: shared by {names}, but {request_id!r} may write to it",
            )
            _require(
                cache.is_published(block_id) or table.digest is None,
                f"block {block_id}: in the private tables of {names}",
            )


def _check_states(
    tables: Mapping[str, BlockTable],
    ref_counts: Sequence[int],
    free: Sequence[int],
    cache: PrefixCache,
) -> None:
    """Every block is in exactly one of: a table, the free list, the idle blocks of the cache."""
    _require(len(set(free)) == len(free), "a block is in the free list twice")
    held = {block_id for table in tables.values() for block_id in table.block_ids}
    unused, idle = set(free), set(cache.idle_blocks())
    for block_id in range(len(ref_counts)):
        places = [
            name
            for name, group in (("a table", held), ("free list", unused), ("LRU", idle))
            if block_id in group
        ]
        _require(len(places) == 1, f"block {block_id}: in {' and '.join(places) or 'no state'}")
        _require(
            places != ["free list"] or not cache.is_published(block_id),
            f"block {block_id}: free, but still published",
        )


def _check_counts(
    tables: Mapping[str, BlockTable], ref_counts: Sequence[int], counts: Mapping[str, int]
) -> None:
    draft = {b for t in tables.values() for b in t.block_ids[t.num_committed_blocks :]}
    held = {b for t in tables.values() for b in t.block_ids}
    for name, expected in (("draft", len(draft)), ("committed", len(held - draft))):
        _require(counts[name] == expected, f"{name} counter {counts[name]}, counted {expected}")
    total = sum(counts.values())
    _require(total == len(ref_counts), f"states add up to {total} of {len(ref_counts)} blocks")
