"""Attention that reads keys and values where they lie in the block store: nothing is gathered.

``attended`` is what is computed for each query (one head of a row). Compiled code does so for many
queries at once, over these units:

- A *group* is sixteen keys of a text: a piece of a block, or slots one by one where a draft tree's branch
  has strangers between its ancestors. A *chunk* is 256 keys, counted from the text's first.
- A *tile* is up to so many queries whose rows share keys. Of more than four these are turned into
  columns of floats once for all of them; for fewer, in registers, as they are read. A tile is a task for
  a thread, or several where tasks are few and texts are long: then each takes some of its chunks, and
  the last one merges them.
- A *branch* is a run of a tile's queries that see further groups after those which all rows share.

Every sum runs over keys or over dimensions in one order, which no other row changes, so a row has the
same bits in whatever company it is computed. What is beyond a row's own keys weighs exactly 0.

``store_rows`` puts new keys and values into their slots before: finite ones, and keys within a limit.
What a tile gets of one chunk is in ``attention_chunks``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.attention_arguments import Arguments, keys_at, values_at
from engine.kernels.attention_chunks import (
    LOWEST,
    Memory,
    Sums,
    attend_chunk,
    begin_sums,
    clear,
    memory_of,
    sums_at,
)
from engine.kernels.attention_tiles import CHUNK, Row, Tile
from engine.kernels.compiled import Kernel
from engine.kernels.tiles import interleave


def attended(
    query: Any,  # [key_dim]
    keys: Any,  # [num_keys, key_dim], those that the query sees, in the order of its text
    values: Any,  # [num_keys, value_dim]
    scale: float,
    softcap: float | None = None,
    sink: float | None = None,
) -> Any:
    """Returns what a query gets, ``[value_dim]``: chunk after chunk, as in online softmax (Milakov and
    Gimelshein 2018) and flash decoding. numpy's arrays of any type of floats."""
    largest, total, weighted = -np.inf, 0.0, np.zeros(values.shape[1])
    for start in range(0, len(keys), CHUNK):
        scores = keys[start : start + CHUNK] @ query * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        before, largest = largest, max(largest, scores.max())
        weights = np.exp(scores - largest)
        total = total * np.exp(before - largest) + weights.sum()
        weighted = weighted * np.exp(before - largest) + weights @ values[start : start + CHUNK]
    if sink is not None:
        total += np.exp(sink - largest)
    return weighted / total


# --- new keys and values ---


@njit
def _store_row(source: Any, target: Any, dim: int, largest: float) -> None:
    for d in range(0, dim, LANES):
        v.store(target, d, v.clean(v.load(source, d), largest))


def _store_rows(a: Arguments) -> None:
    for row in v.shared(a.next_row, a.step.num_rows):
        slot = a.step.slot_mapping[row]
        if slot < 0:  # padding's
            continue
        keys, values = a.new_keys + row * a.new_key_row, a.new_values + row * a.new_value_row
        for head in range(a.num_kv_heads):
            new, place = keys + head * a.new_key_head, keys_at(a, head, slot)
            _store_row(new, place, a.key_dim, np.float32(a.largest_key))
            new, place = values + head * a.new_value_head, values_at(a, head, slot)
            _store_row(new, place, a.value_dim, np.float32(np.inf))


store_rows = Kernel(_store_rows)
"""Stores every new row of one layer."""

# --- chunk after chunk ---


@njit
def _merge_totals(num_queries: int, chunk: Sums, memory: Memory) -> None:
    """Merges all but weighted values, whose factors are left in ``memory``."""
    text = memory.text
    for at in range(0, num_queries, LANES):
        before, high = v.load(text.largest, at), v.load(chunk.largest, at)
        most = v.larger(before, high)
        mine, theirs = v.exp(before - most), v.exp(high - most)
        total, added = v.load(text.total, at), v.load(chunk.total, at)
        v.store(text.largest, at, most)
        v.store(text.total, at, total * mine + added * theirs)
        v.store(memory.old, at, mine)
        v.store(memory.new, at, theirs)


@njit
def _merge(a: Arguments, tile: Tile, chunk: Sums, memory: Memory) -> None:
    """Adds a chunk's sums to those of the chunks before it."""
    _merge_totals(tile.num_queries, chunk, memory)
    for query in range(tile.num_queries):
        if chunk.largest[query] == LOWEST:
            continue
        mine, theirs = v.splat(memory.old[query]), v.splat(memory.new[query])
        out, added = memory.text.weighted, chunk.weighted
        for d in range(a.value_dim * query, a.value_dim * (query + 1), LANES):
            v.store(out, d, v.load(out, d) * mine + v.load(added, d) * theirs)


@njit
def _finish(a: Arguments, row: Row, head: int, query: int, text: Sums) -> None:
    """Writes the weighted mean to the output; a sink has a score and no value."""
    high, total, factor = text.largest[query], text.total[query], np.float32(1.0)
    if not v.is_none(a.sinks):
        sink = a.sinks[head]
        most = max(high, sink)
        factor = v.first_of(v.exp(v.splat(high - most)))
        total = total * factor + v.first_of(v.exp(v.splat(sink - most)))
    out = a.output + (row.number * a.output_row + head * a.output_head)
    weighted, share = text.weighted + a.value_dim * query, v.splat(factor / total)
    for d in range(0, a.value_dim, LANES):
        v.store(out, d, v.load(weighted, d) * share)


# --- tiles ---


@njit
def _read_queries(a: Arguments, tile: Tile, head: int, memory: Memory) -> None:
    """Reads queries as floats, scaled, and by fours as ``score8`` takes them, with zeros between rows."""
    dim, rows, factor = a.key_dim, memory.rows, v.splat(np.float32(a.scale))
    clear(rows, dim * tile.num_queries)
    for number in range(tile.first_row, tile.end_row):
        row = a.step.rows[number]
        source = a.query + (row.number * a.query_row + head * a.share * a.query_head)
        for offset in range(a.share):
            mine, to = source + offset * a.query_head, rows + dim * (row.query + offset)
            for d in range(0, dim, LANES):
                v.store(to, d, v.load(mine, d) * factor)
    for at in range(0, dim * tile.num_queries, 4 * dim):
        interleave(rows + at, dim, memory.queries + at)


@njit(inline="always")
def _is_seen(tile: Tile, chunk: int, least: int) -> bool:
    return chunk * CHUNK + CHUNK > least and chunk * CHUNK < tile.most_seen


@njit(inline="always")
def _part(a: Arguments, tile: Tile, head: int, chunk: int) -> Sums:
    """Returns where a divided tile leaves a chunk's sums."""
    number = (tile.first_part + chunk) * a.num_kv_heads + head
    return sums_at(a, a.step.parts + number * a.step.most_queries * (a.value_dim + 2))


@njit(inline="always")
def _attend_chunks(a: Arguments, tile: Tile, head: int, memory: Memory) -> bool:
    """Merges the sums of a tile's chunks, or, where it is divided, leaves them: the last task of those
    that divide it merges all. Returns whether all are merged."""
    is_whole = tile.first_part < 0
    least = max(tile.first_key, tile.least_seen - a.window)
    for chunk in range(tile.first_chunk, tile.end_chunk):
        if _is_seen(tile, chunk, least):
            sums = memory.chunk if is_whole else _part(a, tile, head, chunk)
            attend_chunk(a, tile, head, chunk, least, memory, sums)
            if is_whole:
                _merge(a, tile, sums, memory)
    if is_whole:
        return True
    counter = a.step.counters + (tile.first_part * a.num_kv_heads + head)
    if v.fetch_add(counter, 1) % tile.num_tiles != tile.num_tiles - 1:
        return False
    for chunk in range(tile.num_chunks):
        if _is_seen(tile, chunk, least):
            _merge(a, tile, _part(a, tile, head, chunk), memory)
    return True


@njit(inline="always")
def _attend_tile(a: Arguments, tile: Tile, head: int, memory: Memory) -> None:
    """Lets the queries of a tile that share a key head attend."""
    text = memory.text
    _read_queries(a, tile, head, memory)
    begin_sums(a, tile, text)
    if not _attend_chunks(a, tile, head, memory):
        return
    for number in range(tile.first_row, tile.end_row):
        row = a.step.rows[number]
        for offset in range(a.share):
            _finish(a, row, head * a.share + offset, row.query + offset, text)


def _attend(a: Arguments) -> None:
    memory = memory_of(a, v.fetch_add(a.num_workers, 1))
    for task in v.shared(a.next_task, a.step.num_tasks):
        _attend_tile(a, a.step.tiles[task // a.num_kv_heads], task % a.num_kv_heads, memory)


attend = Kernel(_attend)
"""Lets every tile's rows attend."""
