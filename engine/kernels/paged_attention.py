"""Attention that reads keys and values where they lie in the block store: nothing is gathered.

A row's keys come in the order of its text, sixteen at a time (a *group*: a piece of a block, or slots
one by one where a draft tree's branch has strangers between its ancestors). Over 256 keys (a *chunk*)
there is one softmax; chunks are merged in the order of the text, as in online softmax (Milakov and
Gimelshein 2018) and flash decoding. Every sum runs over keys or over dimensions in one order, which no
other row changes, so a row has the same bits in whatever company it is computed.

Rows that share keys are computed together, in a *tile* of up to so many queries (a query is one head of
a row): keys are converted and transposed once for them. What is beyond a row's own keys weighs exactly 0.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit

from engine.kernels import FLOAT32, LANES
from engine.kernels.compiled import Kernel
from engine.kernels.lanes import (
    add,
    argument,
    clean,
    div,
    exp,
    fetch_add,
    fetch_all,
    first_of,
    itemsize_of,
    keep,
    larger,
    largest_of,
    load,
    load32,
    mul,
    read_float,
    read_int,
    splat,
    store,
    store32,
    sub,
    sum_of,
    tanh,
    widen,
    write_float,
)
from engine.kernels.tiles import interleave, score4, score8, transpose, weigh16, weigh64

CHUNK = 256
GROUP = LANES
TILE_QUERIES = 64
QUERY_MULTIPLE = 4
_LOWEST = np.float32(-3.0e38)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_ROW = 4 * LANES  # bytes of sixteen floats
# Bytes from a query's scores to the next one's: a chunk's, and one group more, for half a pair of groups
# to be scored into and for queries' scores to lie in different sets of a cache.
_SCORES = 4 * (CHUNK + GROUP)
# Groups from the one that is read to the one that is fetched meanwhile, by lines: blocks lie anywhere,
# so that no CPU guesses where the next one is, and many lines at once are in the way of what is read.
_AHEAD = 2
_PAIR = 2  # groups that are scored at once
_WEIGHED = 4  # and whose values are weighed at once


class Arg(IntEnum):
    """What a kernel is told: numbers, strides in bytes, and addresses of arrays of int64 whose records
    are described below."""

    # 0 before a call.
    NEXT_TASK = 0
    NUM_WORKERS = 1
    # The layer's. KINDs as in engine.kernels; SHARE: queries to a key head; NUMBERS, float32: scale
    # of the scores, soft cap or 0, largest key, largest value; WINDOW: keys that a row sees, its own
    # included, 0: all; SINKS, float32, one for each query head, or 0.
    NUM_KV_HEADS = 2
    SHARE = 3
    KEY_DIM = 4
    VALUE_DIM = 5
    KIND = 6
    STORE_KIND = 7
    KEYS = 8
    KEY_HEAD = 9
    VALUES = 10
    VALUE_HEAD = 11
    NUMBERS = 12
    WINDOW = 13
    SINKS = 14
    # The step's. SLOT_MAPPING: where new rows go; SCRATCH_BYTES: of each worker.
    NUM_ROWS = 15
    SLOT_MAPPING = 16
    NUM_TASKS = 17  # tiles times key heads
    TILES = 18
    ROWS = 19
    GROUPS = 20
    BRANCHES = 21
    SLOTS = 22
    MOST_QUERIES = 23  # of a tile
    SCRATCH = 24
    SCRATCH_BYTES = 25
    PARTS = 26
    COUNTERS = 27
    # The call's: new rows and results.
    QUERY = 28
    QUERY_ROW = 29
    QUERY_HEAD = 30
    NEW_KEYS = 31
    NEW_KEY_ROW = 32
    NEW_KEY_HEAD = 33
    NEW_VALUES = 34
    NEW_VALUE_ROW = 35
    NEW_VALUE_HEAD = 36
    OUTPUT = 37
    OUTPUT_ROW = 38
    OUTPUT_HEAD = 39


NUM_ARGS = len(Arg)
COUNTS, LAYER = slice(0, Arg.NUM_KV_HEADS), slice(Arg.NUM_KV_HEADS, Arg.NUM_ROWS)
STEP, CALL = slice(Arg.NUM_ROWS, Arg.QUERY), slice(Arg.QUERY, NUM_ARGS)

# A row: its number in the batch, how many keys of its text it sees, its first query in the tile.
ROW_INTS = 3
# A tile: its first row and the end of its rows; first chunk and end; first branch and end; queries, a
# multiple of QUERY_MULTIPLE; where its groups begin, and how many of them all its rows share; first part
# (-1: it is not divided), chunks and tiles that it is divided into.
TILE_INTS = 12
# A branch: first query and end, both multiples of QUERY_MULTIPLE; where its own groups begin; the number
# of the group after its last.
BRANCH_INTS = 4
# A group: its first slot; or, below 0, where in SLOTS its sixteen are: -1 - number.


def scratch_floats(most_queries: int, key_dim: int, value_dim: int) -> int:
    """Of one worker."""
    groups = GROUP * ((_PAIR + 1) * key_dim + _WEIGHED * value_dim)
    return groups + most_queries * (2 * key_dim + _SCORES // 4 + 2 * value_dim + 6)


def part_floats(most_queries: int, value_dim: int) -> int:
    """Of one chunk of a divided tile, for each key head."""
    return most_queries * (value_dim + 2)


# --- groups of keys ---


@njit
def _gather(p: int, plane: int, dim: int, group: int, out: int) -> None:
    kind = argument(p, Arg.STORE_KIND)
    itemsize = itemsize_of(kind)
    slots = argument(p, Arg.SLOTS) + 8 * GROUP * (-1 - group)
    for key in range(GROUP):
        source = plane + read_int(slots + 8 * key) * dim * itemsize
        for d in range(0, dim, LANES):
            store32(out + 4 * (key * dim + d), load(kind, source + itemsize * d))


@njit(inline="always")
def _keys_at(p: int, head: int, group: int) -> int:
    """Where the keys of a group are that lie together; of another, some that are there."""
    plane = argument(p, Arg.KEYS) + head * argument(p, Arg.KEY_HEAD)
    size = argument(p, Arg.KEY_DIM) * itemsize_of(argument(p, Arg.STORE_KIND))
    return plane + max(0, group) * size


@njit(inline="always")
def _values_at(p: int, head: int, group: int) -> int:
    plane = argument(p, Arg.VALUES) + head * argument(p, Arg.VALUE_HEAD)
    size = argument(p, Arg.VALUE_DIM) * itemsize_of(argument(p, Arg.STORE_KIND))
    return plane + max(0, group) * size


@njit
def _read_keys(p: int, head: int, group: int, ahead: int, keys: int, rows: int) -> None:
    """Of sixteen keys, each dimension's sixteen floats, ``_PAIR`` groups apart. ``rows``: memory to
    use; what is at ``ahead`` is fetched meanwhile."""
    kind, dim, source = argument(p, Arg.STORE_KIND), argument(p, Arg.KEY_DIM), rows
    if group < 0:
        _gather(p, _keys_at(p, head, 0), dim, group, rows)
        kind = FLOAT32
    else:
        source = _keys_at(p, head, group)
    transpose(kind, source, dim * itemsize_of(kind), dim, ahead, keys, _PAIR * _ROW)


@njit
def _read_values(p: int, head: int, group: int, ahead: int, values: int) -> None:
    """``[16, value_dim]`` floats; what is at ``ahead`` is fetched meanwhile."""
    kind, dim = argument(p, Arg.STORE_KIND), argument(p, Arg.VALUE_DIM)
    if group < 0:
        _gather(p, _values_at(p, head, 0), dim, group, values)
    else:
        widen(kind, _values_at(p, head, group), GROUP * dim, ahead, values)


# --- scores ---


@njit
def _score(
    p: int, head: int, groups: int, count: int, scratch: int,
    queries: int, first: int, end: int, scores: int, is_first: bool,
) -> None:  # fmt: skip
    """Of queries ``first`` .. ``end - 1`` with ``count`` groups, whose numbers are at ``groups``;
    ``scores``: of query 0 and the first of them. Half a pair has another half, which nobody reads.
    ``is_first``: nobody has fetched their keys."""
    dim = argument(p, Arg.KEY_DIM)
    rows = scratch + 4 * GROUP * _PAIR * dim
    if is_first:
        group_bytes = GROUP * dim * itemsize_of(argument(p, Arg.STORE_KIND))
        for place in range(min(_AHEAD, count)):
            fetch_all(_keys_at(p, head, read_int(groups + 8 * place)), group_bytes)
    for place in range(0, count, _PAIR):
        for half in range(min(_PAIR, count - place)):
            group, later = read_int(groups + 8 * (place + half)), place + half + _AHEAD
            if later < count:
                ahead = _keys_at(p, head, read_int(groups + 8 * later))
            else:
                ahead = _values_at(p, head, read_int(groups + 8 * min(later - count, count - 1)))
            _read_keys(p, head, group, ahead, scratch + _ROW * half, rows)
        query, out = queries + 4 * dim * first, scores + _ROW * place + _SCORES * first
        left = end - first
        while left >= 8:
            score8(scratch, dim, query, out, _SCORES)
            query, out, left = query + 32 * dim, out + 8 * _SCORES, left - 8
        if left > 0:
            score4(scratch, dim, query, out, _SCORES)


@njit
def _bend(scores: int, end: int, cap: float) -> None:
    """Soft caps."""
    by = splat(cap)
    for at in range(scores, end, _ROW):
        store32(at, mul(tanh(div(load32(at), by)), by))


@njit
def _hide(scores: int, num_groups: int, first: int, end: int) -> None:
    """Scores of keys other than ``first`` .. ``end - 1`` become minus infinity."""
    for group in range(num_groups):
        if GROUP * group < first or GROUP * (group + 1) > end:
            at = scores + _ROW * group
            store32(at, keep(load32(at), first - GROUP * group, end - GROUP * group))


@njit
def _softmax(scores: int, num_groups: int, first: int, end: int, cap: float) -> tuple[float, float]:
    """In place, over a chunk, of which keys ``first`` .. ``end - 1`` are seen: weights relative to the
    largest score, which is returned, and their sum."""
    stop = scores + _ROW * num_groups
    if cap != _ZERO:
        _bend(scores, stop, cap)
    if first > 0 or end < GROUP * num_groups:
        _hide(scores, num_groups, first, end)
    most = splat(_LOWEST)
    for at in range(scores, stop, _ROW):
        most = larger(load32(at), most)
    high = largest_of(most)
    shift, total = splat(high), splat(_ZERO)
    for at in range(scores, stop, _ROW):
        weight = exp(sub(load32(at), shift))
        store32(at, weight)
        total = add(total, weight)
    return high, sum_of(total)


# --- weighted values ---


@njit
def _weigh_4(values: int, dim: int, weights: int, count: int, out: int) -> None:
    d = 0
    while d < dim:
        if dim - d >= 64:
            weigh64(values + 4 * d, 4 * dim, weights, _SCORES, count, out + 4 * d)
            d += 64
        else:
            weigh16(values + 4 * d, 4 * dim, weights, _SCORES, count, out + 4 * d)
            d += LANES


@njit
def _weigh(
    p: int, head: int, groups: int, count: int, scratch: int,
    weights: int, first: int, end: int, out: int, num_next: int,
) -> None:  # fmt: skip
    """As ``_score`` is told, for values: added to ``out``, of query 0. ``num_next``: groups of the next
    chunk, whose keys are wanted after that."""
    dim = argument(p, Arg.VALUE_DIM)
    for place in range(0, count, _WEIGHED):
        these = min(_WEIGHED, count - place)
        for which in range(these):
            group, later = read_int(groups + 8 * (place + which)), place + which + _AHEAD
            if later < count:
                ahead = _values_at(p, head, read_int(groups + 8 * later))
            elif later - count < num_next:
                next_ = groups + 8 * (CHUNK // GROUP + later - count)
                ahead = _keys_at(p, head, read_int(next_))
            else:
                ahead = _values_at(p, head, group)
            _read_values(p, head, group, ahead, scratch + 4 * GROUP * dim * which)
        for query in range(first, end, QUERY_MULTIPLE):
            mine = weights + _SCORES * query + _ROW * place
            _weigh_4(scratch, dim, mine, GROUP * these, out + 4 * dim * query)


# --- a query's chunks, one after another ---


@njit(inline="always")
def _exp(value: float) -> float:
    return first_of(exp(splat(value)))


@njit
def _merge_states(
    num_queries: int, stride: int, chunk_state: int, state: int, factors: int
) -> None:
    """A chunk's largest scores and sums of weights into those of the chunks before, sixteen queries at a
    time; ``factors``: what weighted values are to be multiplied by, those before and the chunk's."""
    for at in range(0, 4 * num_queries, _ROW):
        before, high = load32(state + at), load32(chunk_state + at)
        most = larger(before, high)
        old, new = exp(sub(before, most)), exp(sub(high, most))
        total, added = load32(state + stride + at), load32(chunk_state + stride + at)
        store32(state + at, most)
        store32(state + stride + at, add(mul(total, old), mul(added, new)))
        store32(factors + at, old)
        store32(factors + stride + at, new)


@njit
def _merge(
    p: int, num_queries: int, chunk_state: int, chunk: int, state: int, out: int, factors: int
) -> None:
    """A chunk's state and weighted values into those of the chunks before."""
    row, stride = 4 * argument(p, Arg.VALUE_DIM), 4 * argument(p, Arg.MOST_QUERIES)
    _merge_states(num_queries, stride, chunk_state, state, factors)
    for at in range(0, 4 * num_queries, 4):
        if read_float(chunk_state + at) != _LOWEST:
            old, new = splat(read_float(factors + at)), splat(read_float(factors + stride + at))
            for d in range(0, row, _ROW):
                store32(out + d, add(mul(load32(out + d), old), mul(load32(chunk + d), new)))
        chunk, out = chunk + row, out + row


@njit
def _finish(p: int, row: int, head: int, state: int, weighted: int) -> None:
    dim, kind = argument(p, Arg.VALUE_DIM), argument(p, Arg.KIND)
    high, total = read_float(state), read_float(state + 4 * argument(p, Arg.MOST_QUERIES))
    factor = _ONE
    sinks = argument(p, Arg.SINKS)
    if sinks != 0:
        sink = read_float(sinks + 4 * head)
        most = max(high, sink)
        factor = _exp(high - most)
        total = total * factor + _exp(sink - most)
    out = (
        argument(p, Arg.OUTPUT)
        + row * argument(p, Arg.OUTPUT_ROW)
        + head * argument(p, Arg.OUTPUT_HEAD)
    )
    itemsize = itemsize_of(kind)
    share = splat(factor / total)
    for d in range(0, dim, LANES):
        store(kind, out + itemsize * d, mul(load32(weighted + 4 * d), share))


@njit
def _clear(at: int, end: int) -> None:
    """Floats from ``at`` on; a multiple of sixteen of them."""
    while at < end:
        store32(at, splat(_ZERO))
        at += _ROW


@njit
def _begin(state: int, most_queries: int) -> None:
    for at in range(state, state + 4 * most_queries, _ROW):
        store32(at, splat(_LOWEST))
    _clear(state + 4 * most_queries, state + 8 * most_queries)


# --- tiles ---


@njit
def _read_queries(
    p: int, head: int, first_row: int, end_row: int, num_queries: int, rows: int, out: int
) -> None:
    """As floats, scaled, and by fours as ``score8`` takes them; what lies between rows is 0. ``rows``:
    memory to use."""
    dim, kind, share = argument(p, Arg.KEY_DIM), argument(p, Arg.KIND), argument(p, Arg.SHARE)
    itemsize, factor = itemsize_of(kind), splat(read_float(argument(p, Arg.NUMBERS)))
    _clear(rows, rows + 4 * dim * num_queries)
    for row in range(first_row, end_row, 8 * ROW_INTS):
        source = argument(p, Arg.QUERY) + read_int(row) * argument(p, Arg.QUERY_ROW)
        for offset in range(share):
            mine = source + (head * share + offset) * argument(p, Arg.QUERY_HEAD)
            to = rows + 4 * dim * (read_int(row + 16) + offset)
            for d in range(0, dim, LANES):
                store32(to + 4 * d, mul(load(kind, mine + itemsize * d), factor))
    for at in range(0, 4 * dim * num_queries, 16 * dim):
        interleave(rows + at, dim, out + at)


@njit
def _weights(
    p: int, tile: int, begin: int, first: int, end: int, scores: int, chunk_state: int
) -> None:
    """Scores of a chunk's groups ``first`` .. ``end - 1`` become weights: 0 where no row is."""
    share, window = argument(p, Arg.SHARE), argument(p, Arg.WINDOW)
    stride = 4 * argument(p, Arg.MOST_QUERIES)
    cap = read_float(argument(p, Arg.NUMBERS) + 4)
    done = 0
    for row in range(read_int(tile), read_int(tile + 8), 8 * ROW_INTS):
        seen = read_int(row + 8) - begin
        low = max(0, seen - window) if window > 0 else 0
        query = read_int(row + 16)
        _clear(scores + _SCORES * done, scores + _SCORES * query)
        for mine in range(query, query + share):
            high, total = _softmax(
                scores + _SCORES * mine + _ROW * first, end - first,
                low - GROUP * first, seen - GROUP * first, cap,
            )  # fmt: skip
            write_float(chunk_state + 4 * mine, high)
            write_float(chunk_state + stride + 4 * mine, total)
        done = query + share
    _clear(scores + _SCORES * done, scores + _SCORES * read_int(tile + 48))


@njit
def _attend_chunk(
    p: int, tile: int, head: int, chunk: int, least: int, most: int,
    scratch: int, queries: int, scores: int, chunk_state: int, weighted: int,
) -> None:  # fmt: skip
    """One chunk's softmax and weighted values of all queries of a tile, whose rows see keys ``least`` ..
    ``most - 1`` between them."""
    num_queries, begin = read_int(tile + 48), chunk * CHUNK
    groups, num_common = argument(p, Arg.GROUPS) + 8 * read_int(tile + 56), read_int(tile + 64)
    base = begin // GROUP
    first, end = max(0, least - begin) // GROUP, (min(CHUNK, most - begin) + GROUP - 1) // GROUP
    own = max(first, min(end, num_common - base))
    common, mine = groups + 8 * (base + first), own + base - num_common
    _begin(chunk_state, argument(p, Arg.MOST_QUERIES))
    is_first = chunk == read_int(tile + 16) or begin <= least
    _score(
        p, head, common, own - first, scratch,
        queries, 0, num_queries, scores + _ROW * first, is_first,
    )  # fmt: skip
    for branch in range(read_int(tile + 32), read_int(tile + 40), 8 * BRANCH_INTS):
        _score(
            p, head, argument(p, Arg.GROUPS) + 8 * (read_int(branch + 16) + mine),
            min(end, read_int(branch + 24) - base) - own, scratch,
            queries, read_int(branch), read_int(branch + 8), scores + _ROW * own, True,
        )  # fmt: skip
    _weights(p, tile, begin, first, end, scores, chunk_state)
    _clear(weighted, weighted + 4 * argument(p, Arg.VALUE_DIM) * num_queries)
    is_last = chunk + 1 == read_int(tile + 24)
    num_next = 0 if is_last or first > 0 else num_common - base - CHUNK // GROUP
    _weigh(
        p, head, common, own - first, scratch,
        scores + _ROW * first, 0, num_queries, weighted, num_next,
    )  # fmt: skip
    for branch in range(read_int(tile + 32), read_int(tile + 40), 8 * BRANCH_INTS):
        _weigh(
            p, head, argument(p, Arg.GROUPS) + 8 * (read_int(branch + 16) + mine),
            min(end, read_int(branch + 24) - base) - own, scratch,
            scores + _ROW * own, read_int(branch), read_int(branch + 8), weighted, 0,
        )  # fmt: skip


@njit
def _attend_tile(p: int, tile: int, head: int, scratch: int) -> None:
    key_dim, value_dim = argument(p, Arg.KEY_DIM), argument(p, Arg.VALUE_DIM)
    share, window = argument(p, Arg.SHARE), argument(p, Arg.WINDOW)
    most_queries, num_queries = argument(p, Arg.MOST_QUERIES), read_int(tile + 48)
    first_row, end_row = read_int(tile), read_int(tile + 8)
    queries = scratch + 4 * GROUP * ((_PAIR + 1) * key_dim + _WEIGHED * value_dim)
    scores = queries + 4 * most_queries * key_dim
    weighted = scores + _SCORES * most_queries
    out = weighted + 4 * most_queries * value_dim
    chunk_state = out + 4 * most_queries * value_dim
    state = chunk_state + 8 * most_queries
    factors = state + 8 * most_queries
    least, most = read_int(first_row + 8), 0
    for row in range(first_row, end_row, 8 * ROW_INTS):
        least, most = min(least, read_int(row + 8)), max(most, read_int(row + 8))
    least = max(0, least - window) if window > 0 else 0
    _read_queries(p, head, first_row, end_row, num_queries, factors + 8 * most_queries, queries)
    _clear(out, out + 4 * value_dim * num_queries)
    _begin(state, most_queries)
    first_part = read_int(tile + 72)
    part_bytes = 4 * most_queries * (value_dim + 2)
    parts = argument(p, Arg.PARTS) + part_bytes * (
        first_part * argument(p, Arg.NUM_KV_HEADS) + head
    )
    stride = part_bytes * argument(p, Arg.NUM_KV_HEADS)
    for chunk in range(read_int(tile + 16), read_int(tile + 24)):
        if first_part >= 0:
            weighted = parts + stride * chunk
            chunk_state = weighted + 4 * most_queries * value_dim
        if chunk * CHUNK + CHUNK <= least or chunk * CHUNK >= most:
            continue
        _attend_chunk(
            p, tile, head, chunk, least, most, scratch, queries, scores, chunk_state, weighted
        )
        if first_part < 0:
            _merge(p, num_queries, chunk_state, weighted, state, out, factors)
    if first_part >= 0:
        # Whoever comes last merges what all have left.
        counter = argument(p, Arg.COUNTERS) + 8 * (
            first_part * argument(p, Arg.NUM_KV_HEADS) + head
        )
        num_tiles = read_int(tile + 88)
        if fetch_add(counter, 1) % num_tiles != num_tiles - 1:
            return
        for chunk in range(read_int(tile + 80)):
            if chunk * CHUNK + CHUNK <= least or chunk * CHUNK >= most:
                continue
            weighted = parts + stride * chunk
            chunk_state = weighted + 4 * most_queries * value_dim
            _merge(p, num_queries, chunk_state, weighted, state, out, factors)
    for row in range(first_row, end_row, 8 * ROW_INTS):
        for offset in range(share):
            query = read_int(row + 16) + offset
            _finish(p, read_int(row), head * share + offset, state + 4 * query,
                    out + 4 * value_dim * query)  # fmt: skip


def _attend(p: int) -> None:
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    scratch = argument(p, Arg.SCRATCH) + worker * argument(p, Arg.SCRATCH_BYTES)
    heads, num_tasks = argument(p, Arg.NUM_KV_HEADS), argument(p, Arg.NUM_TASKS)
    while True:
        task = fetch_add(p + 8 * Arg.NEXT_TASK, 1)
        if task >= num_tasks:
            break
        tile = argument(p, Arg.TILES) + 8 * TILE_INTS * (task // heads)
        _attend_tile(p, tile, task % heads, scratch)


# --- new keys and values ---


@njit
def _store_row(
    kind: int, source: int, store_kind: int, target: int, dim: int, largest: float
) -> None:
    itemsize, store_itemsize = itemsize_of(kind), itemsize_of(store_kind)
    for d in range(0, dim, LANES):
        row = clean(load(kind, source + itemsize * d), largest)
        store(store_kind, target + store_itemsize * d, row)


def _store_rows(p: int) -> None:
    kind, store_kind = argument(p, Arg.KIND), argument(p, Arg.STORE_KIND)
    key_dim, value_dim = argument(p, Arg.KEY_DIM), argument(p, Arg.VALUE_DIM)
    itemsize, numbers = itemsize_of(store_kind), argument(p, Arg.NUMBERS)
    largest_key, largest_value = read_float(numbers + 8), read_float(numbers + 12)
    num_rows = argument(p, Arg.NUM_ROWS)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_TASK, 1)
        if row >= num_rows:
            break
        slot = read_int(argument(p, Arg.SLOT_MAPPING) + 8 * row)
        if slot < 0:  # padding's
            continue
        keys = argument(p, Arg.NEW_KEYS) + row * argument(p, Arg.NEW_KEY_ROW)
        values = argument(p, Arg.NEW_VALUES) + row * argument(p, Arg.NEW_VALUE_ROW)
        key_slot = argument(p, Arg.KEYS) + slot * key_dim * itemsize
        value_slot = argument(p, Arg.VALUES) + slot * value_dim * itemsize
        for head in range(argument(p, Arg.NUM_KV_HEADS)):
            _store_row(
                kind, keys + head * argument(p, Arg.NEW_KEY_HEAD), store_kind,
                key_slot + head * argument(p, Arg.KEY_HEAD), key_dim, largest_key,
            )  # fmt: skip
            _store_row(
                kind, values + head * argument(p, Arg.NEW_VALUE_HEAD), store_kind,
                value_slot + head * argument(p, Arg.VALUE_HEAD), value_dim, largest_value,
            )  # fmt: skip


attend = Kernel(_attend, len(Arg))
"""Every tile's rows, into OUTPUT."""
store_rows = Kernel(_store_rows, len(Arg))
"""New keys and values into their slots, finite ones."""
