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
from typing import Any

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels.compiled import Kernel
from engine.kernels.lanes import (
    add,
    argument,
    clean,
    div,
    exp,
    fetch_add,
    first_of,
    fma,
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
    transpose,
    write_float,
)

CHUNK = 256
GROUP = LANES
TILE_QUERIES = 64
QUERY_MULTIPLE = 4
_LOWEST = np.float32(-3.0e38)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_ROW = 4 * LANES  # bytes of sixteen floats
_SCORES = 4 * CHUNK  # bytes of a query's scores


class Arg(IntEnum):
    """What a kernel is told: numbers, strides in bytes, and addresses of arrays of int64 whose records
    are described below."""

    # 0 before a call.
    NEXT_TASK = 0
    NUM_WORKERS = 1
    # The layer's. KINDs as in engine.kernels.KINDS; SHARE: queries to a key head; NUMBERS, float32: scale
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
    group = GROUP * (2 * key_dim + value_dim)
    return group + most_queries * (key_dim + CHUNK + 2 * value_dim + 4)


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


@njit
def _read_keys(p: int, head: int, group: int, keys: int, rows: int) -> None:
    """Of sixteen keys, each dimension's sixteen floats one after another. ``rows``: memory to use."""
    kind, dim = argument(p, Arg.STORE_KIND), argument(p, Arg.KEY_DIM)
    plane = argument(p, Arg.KEYS) + head * argument(p, Arg.KEY_HEAD)
    itemsize = itemsize_of(kind)
    source = plane + group * dim * itemsize
    if group < 0:
        _gather(p, plane, dim, group, rows)
        kind, itemsize, source = 0, 4, rows
    for d in range(0, dim, LANES):
        transpose(kind, source + d * itemsize, dim * itemsize, keys + _ROW * d)


@njit
def _read_values(p: int, head: int, group: int, values: int) -> None:
    """``[16, value_dim]`` floats."""
    kind, dim = argument(p, Arg.STORE_KIND), argument(p, Arg.VALUE_DIM)
    plane = argument(p, Arg.VALUES) + head * argument(p, Arg.VALUE_HEAD)
    if group < 0:
        _gather(p, plane, dim, group, values)
        return
    itemsize = itemsize_of(kind)
    source = plane + group * dim * itemsize
    for at in range(0, GROUP * dim, LANES):
        store32(values + 4 * at, load(kind, source + itemsize * at))


# --- scores ---


@njit
def _score_8(keys: int, dim: int, query: int, out: int) -> None:
    """Eight queries' products with sixteen keys; a sum over dimensions, in their order."""
    a = b = c = d = e = f = g = h = splat(_ZERO)
    row = 4 * dim
    for at in range(query, query + row, 4):
        key = load32(keys)
        keys += _ROW
        a = fma(splat(read_float(at)), key, a)
        b = fma(splat(read_float(at + row)), key, b)
        c = fma(splat(read_float(at + 2 * row)), key, c)
        d = fma(splat(read_float(at + 3 * row)), key, d)
        e = fma(splat(read_float(at + 4 * row)), key, e)
        f = fma(splat(read_float(at + 5 * row)), key, f)
        g = fma(splat(read_float(at + 6 * row)), key, g)
        h = fma(splat(read_float(at + 7 * row)), key, h)
    store32(out, a)
    store32(out + _SCORES, b)
    store32(out + 2 * _SCORES, c)
    store32(out + 3 * _SCORES, d)
    store32(out + 4 * _SCORES, e)
    store32(out + 5 * _SCORES, f)
    store32(out + 6 * _SCORES, g)
    store32(out + 7 * _SCORES, h)


@njit
def _score_4(keys: int, dim: int, query: int, out: int) -> None:
    a = b = c = d = splat(_ZERO)
    row = 4 * dim
    for at in range(query, query + row, 4):
        key = load32(keys)
        keys += _ROW
        a = fma(splat(read_float(at)), key, a)
        b = fma(splat(read_float(at + row)), key, b)
        c = fma(splat(read_float(at + 2 * row)), key, c)
        d = fma(splat(read_float(at + 3 * row)), key, d)
    store32(out, a)
    store32(out + _SCORES, b)
    store32(out + 2 * _SCORES, c)
    store32(out + 3 * _SCORES, d)


@njit
def _score(keys: int, dim: int, queries: int, first: int, end: int, scores: int) -> None:
    """Of queries ``first`` .. ``end - 1``; ``scores``: of query 0 and the group's first key."""
    while first < end:
        query, out = queries + 4 * dim * first, scores + _SCORES * first
        if end - first >= 8:
            _score_8(keys, dim, query, out)
            first += 8
        else:
            _score_4(keys, dim, query, out)
            first += 4


@njit
def _softmax(scores: int, num_groups: int, first: int, end: int, cap: float) -> tuple[float, float]:
    """In place, over a chunk, of which keys ``first`` .. ``end - 1`` are seen: weights relative to the
    largest score, which is returned, and their sum."""
    most = splat(_LOWEST)
    for group in range(num_groups):
        at = scores + _ROW * group
        score = load32(at)
        if cap != _ZERO:
            score = mul(tanh(div(score, splat(cap))), splat(cap))
        if GROUP * group < first or GROUP * (group + 1) > end:
            score = keep(score, first - GROUP * group, end - GROUP * group)
        store32(at, score)
        most = larger(score, most)
    high = largest_of(most)
    shift, total = splat(high), splat(_ZERO)
    for group in range(num_groups):
        weight = exp(sub(load32(scores + _ROW * group), shift))
        store32(scores + _ROW * group, weight)
        total = add(total, weight)
    return high, sum_of(total)


# --- weighted values ---


@njit
def _weigh_64(values: int, dim: int, weights: int, out: int) -> None:
    """Four queries' sixteen weighted values, 64 dimensions of them, added to ``out``."""
    row, at = 4 * dim, out
    a, b, c, d = load32(at), load32(at + 64), load32(at + 128), load32(at + 192)
    at += row
    e, f, g, h = load32(at), load32(at + 64), load32(at + 128), load32(at + 192)
    at += row
    i, j, k, m = load32(at), load32(at + 64), load32(at + 128), load32(at + 192)
    at += row
    q, r, s, t = load32(at), load32(at + 64), load32(at + 128), load32(at + 192)
    for at in range(weights, weights + _ROW, 4):
        v, w = load32(values), load32(values + 64)
        x, y = load32(values + 128), load32(values + 192)
        values += row
        p = splat(read_float(at))
        a, b, c, d = fma(p, v, a), fma(p, w, b), fma(p, x, c), fma(p, y, d)
        p = splat(read_float(at + _SCORES))
        e, f, g, h = fma(p, v, e), fma(p, w, f), fma(p, x, g), fma(p, y, h)
        p = splat(read_float(at + 2 * _SCORES))
        i, j, k, m = fma(p, v, i), fma(p, w, j), fma(p, x, k), fma(p, y, m)
        p = splat(read_float(at + 3 * _SCORES))
        q, r, s, t = fma(p, v, q), fma(p, w, r), fma(p, x, s), fma(p, y, t)
    _store_64(out, a, b, c, d)
    _store_64(out + row, e, f, g, h)
    _store_64(out + 2 * row, i, j, k, m)
    _store_64(out + 3 * row, q, r, s, t)


@njit(inline="always")
def _store_64(at: int, a: Any, b: Any, c: Any, d: Any) -> None:
    store32(at, a)
    store32(at + 64, b)
    store32(at + 128, c)
    store32(at + 192, d)


@njit
def _weigh_16(values: int, dim: int, weights: int, out: int) -> None:
    row = 4 * dim
    a, b, c, d = load32(out), load32(out + row), load32(out + 2 * row), load32(out + 3 * row)
    for at in range(weights, weights + _ROW, 4):
        v = load32(values)
        values += row
        a = fma(splat(read_float(at)), v, a)
        b = fma(splat(read_float(at + _SCORES)), v, b)
        c = fma(splat(read_float(at + 2 * _SCORES)), v, c)
        d = fma(splat(read_float(at + 3 * _SCORES)), v, d)
    store32(out, a)
    store32(out + row, b)
    store32(out + 2 * row, c)
    store32(out + 3 * row, d)


@njit
def _weigh(values: int, dim: int, weights: int, first: int, end: int, out: int) -> None:
    """Of queries ``first`` .. ``end - 1``; ``weights``: of query 0 and the group's first key."""
    for query in range(first, end, QUERY_MULTIPLE):
        mine, to = weights + _SCORES * query, out + 4 * dim * query
        d = 0
        while d < dim:
            if dim - d >= 64:
                _weigh_64(values + 4 * d, dim, mine, to + 4 * d)
                d += 64
            else:
                _weigh_16(values + 4 * d, dim, mine, to + 4 * d)
                d += LANES


# --- a query's chunks, one after another ---


@njit(inline="always")
def _exp(value: float) -> float:
    return first_of(exp(splat(value)))


@njit
def _merge_query(dim: int, chunk_state: int, chunk: int, state: int, out: int) -> None:
    """A chunk's largest score, sum of weights and weighted values into those of the chunks before."""
    before, high = read_float(state), read_float(chunk_state)
    if high == _LOWEST:
        return
    most = max(before, high)
    old, new = _exp(before - most), _exp(high - most)
    write_float(state, most)
    write_float(state + 4, read_float(state + 4) * old + read_float(chunk_state + 4) * new)
    x, y = splat(old), splat(new)
    for d in range(0, 4 * dim, _ROW):
        store32(out + d, add(mul(load32(out + d), x), mul(load32(chunk + d), y)))


@njit
def _merge(num_queries: int, dim: int, chunk_state: int, chunk: int, state: int, out: int) -> None:
    for query in range(num_queries):
        at, row = 8 * query, 4 * dim * query
        _merge_query(dim, chunk_state + at, chunk + row, state + at, out + row)


@njit
def _finish(p: int, row: int, head: int, state: int, weighted: int) -> None:
    dim, kind = argument(p, Arg.VALUE_DIM), argument(p, Arg.KIND)
    high, total = read_float(state), read_float(state + 4)
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
    x, y = splat(factor), splat(total)
    for d in range(0, dim, LANES):
        store(kind, out + itemsize * d, div(mul(load32(weighted + 4 * d), x), y))


@njit
def _clear(at: int, end: int) -> None:
    """Floats from ``at`` on; a multiple of sixteen of them."""
    while at < end:
        store32(at, splat(_ZERO))
        at += _ROW


@njit
def _begin(state: int, num_queries: int) -> None:
    for query in range(num_queries):
        write_float(state + 8 * query, _LOWEST)
        write_float(state + 8 * query + 4, _ZERO)


# --- tiles ---


@njit
def _read_queries(p: int, head: int, first_row: int, end_row: int, out: int, end: int) -> None:
    """As floats, scaled; what lies between rows is 0."""
    dim, kind, share = argument(p, Arg.KEY_DIM), argument(p, Arg.KIND), argument(p, Arg.SHARE)
    itemsize, factor = itemsize_of(kind), splat(read_float(argument(p, Arg.NUMBERS)))
    _clear(out, end)
    for row in range(first_row, end_row, 8 * ROW_INTS):
        source = argument(p, Arg.QUERY) + read_int(row) * argument(p, Arg.QUERY_ROW)
        for offset in range(share):
            mine = source + (head * share + offset) * argument(p, Arg.QUERY_HEAD)
            to = out + 4 * dim * (read_int(row + 16) + offset)
            for d in range(0, dim, LANES):
                store32(to + 4 * d, mul(load(kind, mine + itemsize * d), factor))


@njit
def _attend_chunk(
    p: int, tile: int, head: int, chunk: int, least: int, most: int,
    scratch: int, queries: int, scores: int, chunk_state: int, weighted: int,
) -> None:  # fmt: skip
    """One chunk's softmax and weighted values of all queries of a tile, whose rows see keys ``least`` ..
    ``most - 1`` between them."""
    key_dim, value_dim = argument(p, Arg.KEY_DIM), argument(p, Arg.VALUE_DIM)
    share, window = argument(p, Arg.SHARE), argument(p, Arg.WINDOW)
    cap = read_float(argument(p, Arg.NUMBERS) + 4)
    num_queries = read_int(tile + 48)
    groups, num_common = argument(p, Arg.GROUPS) + 8 * read_int(tile + 56), read_int(tile + 64)
    keys = scratch
    values = keys + 4 * GROUP * key_dim
    begin = chunk * CHUNK
    first, end = max(0, least - begin) // GROUP, (min(CHUNK, most - begin) + GROUP - 1) // GROUP
    for place in range(first, end):
        group = begin // GROUP + place
        if group < num_common:
            _read_keys(p, head, read_int(groups + 8 * group), keys, values)
            _score(keys, key_dim, queries, 0, num_queries, scores + _ROW * place)
            continue
        for branch in range(read_int(tile + 32), read_int(tile + 40), 8 * BRANCH_INTS):
            if group < read_int(branch + 24):
                mine = argument(p, Arg.GROUPS) + 8 * (read_int(branch + 16) + group - num_common)
                _read_keys(p, head, read_int(mine), keys, values)
                low, high = read_int(branch), read_int(branch + 8)
                _score(keys, key_dim, queries, low, high, scores + _ROW * place)
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
            write_float(chunk_state + 8 * mine, high)
            write_float(chunk_state + 8 * mine + 4, total)
        done = query + share
    _clear(scores + _SCORES * done, scores + _SCORES * num_queries)
    _clear(weighted, weighted + 4 * value_dim * num_queries)
    for place in range(first, end):
        group = begin // GROUP + place
        if group < num_common:
            _read_values(p, head, read_int(groups + 8 * group), values)
            _weigh(values, value_dim, scores + _ROW * place, 0, num_queries, weighted)
            continue
        for branch in range(read_int(tile + 32), read_int(tile + 40), 8 * BRANCH_INTS):
            if group < read_int(branch + 24):
                mine = argument(p, Arg.GROUPS) + 8 * (read_int(branch + 16) + group - num_common)
                _read_values(p, head, read_int(mine), values)
                low, high = read_int(branch), read_int(branch + 8)
                _weigh(values, value_dim, scores + _ROW * place, low, high, weighted)


@njit
def _attend_tile(p: int, tile: int, head: int, scratch: int) -> None:
    key_dim, value_dim = argument(p, Arg.KEY_DIM), argument(p, Arg.VALUE_DIM)
    share, window = argument(p, Arg.SHARE), argument(p, Arg.WINDOW)
    most_queries, num_queries = argument(p, Arg.MOST_QUERIES), read_int(tile + 48)
    first_row, end_row = read_int(tile), read_int(tile + 8)
    queries = scratch + 4 * GROUP * (2 * key_dim + value_dim)
    scores = queries + 4 * most_queries * key_dim
    weighted = scores + _SCORES * most_queries
    out = weighted + 4 * most_queries * value_dim
    chunk_state = out + 4 * most_queries * value_dim
    state = chunk_state + 8 * most_queries
    least, most = read_int(first_row + 8), 0
    for row in range(first_row, end_row, 8 * ROW_INTS):
        least, most = min(least, read_int(row + 8)), max(most, read_int(row + 8))
    least = max(0, least - window) if window > 0 else 0
    _read_queries(p, head, first_row, end_row, queries, queries + 4 * key_dim * num_queries)
    _clear(out, out + 4 * value_dim * num_queries)
    _begin(state, num_queries)
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
            _begin(chunk_state, num_queries)
        if chunk * CHUNK + CHUNK <= least or chunk * CHUNK >= most:
            continue
        _attend_chunk(
            p, tile, head, chunk, least, most, scratch, queries, scores, chunk_state, weighted
        )
        if first_part < 0:
            _merge(num_queries, value_dim, chunk_state, weighted, state, out)
    if first_part >= 0:
        # Whoever comes last merges what all have left.
        counter = argument(p, Arg.COUNTERS) + 8 * (
            first_part * argument(p, Arg.NUM_KV_HEADS) + head
        )
        num_tiles = read_int(tile + 88)
        if fetch_add(counter, 1) % num_tiles != num_tiles - 1:
            return
        for chunk in range(read_int(tile + 80)):
            weighted = parts + stride * chunk
            chunk_state = weighted + 4 * most_queries * value_dim
            _merge(num_queries, value_dim, chunk_state, weighted, state, out)
    for row in range(first_row, end_row, 8 * ROW_INTS):
        for offset in range(share):
            query = read_int(row + 16) + offset
            _finish(p, read_int(row), head * share + offset, state + 8 * query,
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
