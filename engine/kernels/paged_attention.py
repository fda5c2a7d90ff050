"""Attention that reads keys and values where they lie in the block store: nothing is gathered.

``attended`` is what is computed for each query (one head of a row). Compiled code does so for many
queries at once, over these units:

- A *group* is sixteen keys of a text: a piece of a block, or slots one by one where a draft tree's branch
  has strangers between its ancestors. A *chunk* is 256 keys, counted from the text's first.
- A *tile* is up to so many queries whose rows share keys: these are converted and transposed once for
  all of them. A tile is a task for a thread, or several where tasks are few and texts are long: then
  each takes some of its chunks, and the last one merges them.
- A *branch* is a run of a tile's queries that see further groups after those which all rows share.

Every sum runs over keys or over dimensions in one order, which no other row changes, so a row has the
same bits in whatever company it is computed. What is beyond a row's own keys weighs exactly 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from engine.kernels import FLOAT32, LANES
from engine.kernels import lanes as v
from engine.kernels.attention_records import (
    CALL_AT,
    CHUNK,
    LAYER_AT,
    NEXT_TASK,
    NUM_ARGS,
    NUM_WORKERS,
    QUERY_MULTIPLE,
    STEP_AT,
    Branch,
    Call,
    Layer,
    Row,
    Step,
    Tile,
)
from engine.kernels.compiled import Kernel
from engine.kernels.records import Record
from engine.kernels.tiles import interleave, score4, score8, transpose, weigh16, weigh64

GROUP = LANES


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


# --- arguments and records by the names of their fields ---


@intrinsic
def record_at(_typing: Any, declaration: Any, address: Any) -> Any:
    """The record of 64-bit numbers at ``address``, with fields named as in ``declaration``."""
    del address
    record = Record(declaration.instance_class, ())
    return record(declaration, types.int64), lambda _c, _builder, _s, values: values[1]


_ROW_BYTES, _BRANCH_BYTES = 8 * len(Row._fields), 8 * len(Branch._fields)
_TILE_BYTES = 8 * len(Tile._fields)


@njit(inline="always")
def _row(step: Step, number: int) -> Row:
    return record_at(Row, step.rows + _ROW_BYTES * number)


@njit(inline="always")
def _branch(step: Step, number: int) -> Branch:
    return record_at(Branch, step.branches + _BRANCH_BYTES * number)


# --- a worker's memory ---

_LOWEST = np.float32(-3.0e38)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_VECTOR = 4 * LANES  # bytes of sixteen floats
# Bytes from a query's scores to the next one's: a chunk's, and one group more, for half a pair of groups
# to be scored into and for queries' scores to lie in different sets of a cache.
_SCORES = 4 * (CHUNK + GROUP)
# Groups from the one that is read to the one that is fetched meanwhile, by lines: blocks lie anywhere,
# so that no CPU guesses where the next one is, and many lines at once are in the way of what is read.
_AHEAD = 2
_PAIR = 2  # groups that are scored at once
_WEIGHED = 4  # and whose values are weighed at once


class Sums(NamedTuple):
    """Sums over some keys, by query: addresses of float32. ``largest``: score; ``total``: of weights
    relative to it; ``weighted``: values, ``[most_queries, value_dim]``."""

    weighted: int
    largest: int
    total: int


class Memory(NamedTuple):
    """Addresses of float32. ``groups``: keys or values, converted; ``queries``: by fours, as ``score8``
    takes them, ``rows``: one after another; ``scores``: of a chunk, then its weights, ``_SCORES`` bytes
    for each query; ``factors``: what merged sums are multiplied by."""

    groups: int
    queries: int
    rows: int
    scores: int
    factors: int
    chunk: Sums
    text: Sums


def scratch_floats(most_queries: int, key_dim: int, value_dim: int) -> int:
    """Returns what one worker needs."""
    groups = GROUP * ((_PAIR + 1) * key_dim + _WEIGHED * value_dim)
    return groups + most_queries * (2 * key_dim + _SCORES // 4 + 2 * value_dim + 6)


def sums_floats(most_queries: int, value_dim: int) -> int:
    """Returns what ``Sums`` need: of one chunk of a divided tile, for each key head."""
    return most_queries * (value_dim + 2)


@njit(inline="always")
def _sums_at(layer: Layer, step: Step, address: int) -> Sums:
    largest = address + 4 * step.most_queries * layer.value_dim
    return Sums(address, largest, largest + 4 * step.most_queries)


@njit(inline="always")
def _memory(layer: Layer, step: Step, worker: int) -> Memory:
    groups = step.scratch + worker * step.scratch_bytes
    queries = groups + 4 * GROUP * ((_PAIR + 1) * layer.key_dim + _WEIGHED * layer.value_dim)
    rows = queries + 4 * step.most_queries * layer.key_dim
    scores = rows + 4 * step.most_queries * layer.key_dim
    factors = scores + _SCORES * step.most_queries
    chunk = _sums_at(layer, step, factors + 8 * step.most_queries)
    text = _sums_at(layer, step, chunk.total + 4 * step.most_queries)
    return Memory(groups, queries, rows, scores, factors, chunk, text)


@njit
def _clear(at: int, end: int) -> None:
    """Writes zeros, a multiple of sixteen floats."""
    while at < end:
        v.store32(at, v.splat(_ZERO))
        at += _VECTOR


@njit
def _begin(sums: Sums, most_queries: int) -> None:
    """Writes the largest score and the total of no keys."""
    for at in range(sums.largest, sums.largest + 4 * most_queries, _VECTOR):
        v.store32(at, v.splat(_LOWEST))
    _clear(sums.total, sums.total + 4 * most_queries)


# --- groups of keys ---


@njit
def _gather(layer: Layer, step: Step, plane: int, dim: int, group: int, out: int) -> None:
    """Copies a group that does not lie together, as floats; ``plane``: the address of slot 0."""
    itemsize = v.itemsize_of(layer.store_kind)
    slots = step.slots + 8 * GROUP * (-1 - group)
    for key in range(GROUP):
        source = plane + v.read_int(slots + 8 * key) * dim * itemsize
        for d in range(0, dim, LANES):
            v.store32(out + 4 * (key * dim + d), v.load(layer.store_kind, source + itemsize * d))


@njit(inline="always")
def keys_at(layer: Layer, head: int, group: int) -> int:
    """Returns the address of a group of keys that lies together; of another, one that may be fetched."""
    size = layer.key_dim * v.itemsize_of(layer.store_kind)
    return layer.keys + head * layer.key_head + max(0, group) * size


@njit(inline="always")
def values_at(layer: Layer, head: int, group: int) -> int:
    size = layer.value_dim * v.itemsize_of(layer.store_kind)
    return layer.values + head * layer.value_head + max(0, group) * size


@njit
def _read_keys(
    layer: Layer, step: Step, head: int, group: int, ahead: int, keys: int, rows: int
) -> None:
    """Reads sixteen keys as floats, each dimension's together, ``_PAIR`` groups apart. ``rows``: memory
    to use; what is at ``ahead`` is fetched meanwhile."""
    kind, dim, source = layer.store_kind, layer.key_dim, rows
    if group < 0:
        _gather(layer, step, keys_at(layer, head, 0), dim, group, rows)
        kind = FLOAT32
    else:
        source = keys_at(layer, head, group)
    transpose(kind, source, dim * v.itemsize_of(kind), dim, ahead, keys, _PAIR * _VECTOR)


@njit
def _read_values(layer: Layer, step: Step, head: int, group: int, ahead: int, values: int) -> None:
    """Reads sixteen values as floats, ``[16, value_dim]``; what is at ``ahead`` is fetched meanwhile."""
    dim = layer.value_dim
    if group < 0:
        _gather(layer, step, values_at(layer, head, 0), dim, group, values)
    else:
        v.widen(layer.store_kind, values_at(layer, head, group), GROUP * dim, ahead, values)


# --- a chunk of keys ---


class Run(NamedTuple):
    """Groups of a chunk that some queries of a tile see, the first at ``place`` in the chunk;
    ``groups``: address of their numbers."""

    groups: int
    num_groups: int
    place: int
    first_query: int
    end_query: int


@njit(inline="always")
def _group(run: Run, place: int) -> int:
    return v.read_int(run.groups + 8 * place)


@njit
def _score(layer: Layer, step: Step, head: int, run: Run, memory: Memory, is_first: bool) -> None:
    """Writes the scores of a run. Half a pair of groups has another half, which nobody reads.
    ``is_first``: its keys were not fetched by what came before."""
    dim = layer.key_dim
    rows = memory.groups + 4 * GROUP * _PAIR * dim
    if is_first:
        group_bytes = GROUP * dim * v.itemsize_of(layer.store_kind)
        for place in range(min(_AHEAD, run.num_groups)):
            v.fetch_all(keys_at(layer, head, _group(run, place)), group_bytes)
    for place in range(0, run.num_groups, _PAIR):
        for half in range(min(_PAIR, run.num_groups - place)):
            later = place + half + _AHEAD
            if later < run.num_groups:
                ahead = keys_at(layer, head, _group(run, later))
            else:
                wanted = min(later - run.num_groups, run.num_groups - 1)
                ahead = values_at(layer, head, _group(run, wanted))
            keys = memory.groups + _VECTOR * half
            _read_keys(layer, step, head, _group(run, place + half), ahead, keys, rows)
        out = memory.scores + _VECTOR * (run.place + place)
        _score_pair(dim, run.first_query, run.end_query, memory, out)


@njit(inline="always")
def _score_pair(dim: int, first: int, end: int, memory: Memory, out: int) -> None:
    """Scores queries ``first`` .. ``end - 1`` with the groups that were read; ``out``: of query 0."""
    query, out, left = memory.queries + 4 * dim * first, out + _SCORES * first, end - first
    while left >= 8:
        score8(memory.groups, dim, query, out, _SCORES)
        query, out, left = query + 32 * dim, out + 8 * _SCORES, left - 8
    if left > 0:
        score4(memory.groups, dim, query, out, _SCORES)


@njit
def _bend(scores: int, end: int, cap: float) -> None:
    """Applies a soft cap."""
    by = v.splat(cap)
    for at in range(scores, end, _VECTOR):
        v.store32(at, v.mul(v.tanh(v.div(v.load32(at), by)), by))


@njit
def _hide(scores: int, num_groups: int, first: int, end: int) -> None:
    """Makes scores of keys other than ``first`` .. ``end - 1`` minus infinity."""
    for group in range(num_groups):
        if GROUP * group < first or GROUP * (group + 1) > end:
            at = scores + _VECTOR * group
            v.store32(at, v.keep(v.load32(at), first - GROUP * group, end - GROUP * group))


@njit
def _softmax(scores: int, num_groups: int, first: int, end: int, cap: float) -> tuple[float, float]:
    """Turns a chunk's scores, of which keys ``first`` .. ``end - 1`` are seen, into weights relative to
    the largest. Returns the largest, and the sum of weights."""
    stop = scores + _VECTOR * num_groups
    if cap != _ZERO:
        _bend(scores, stop, cap)
    if first > 0 or end < GROUP * num_groups:
        _hide(scores, num_groups, first, end)
    most = v.splat(_LOWEST)
    for at in range(scores, stop, _VECTOR):
        most = v.larger(v.load32(at), most)
    high = v.largest_of(most)
    shift, total = v.splat(high), v.splat(_ZERO)
    for at in range(scores, stop, _VECTOR):
        weight = v.exp(v.sub(v.load32(at), shift))
        v.store32(at, weight)
        total = v.add(total, weight)
    return high, v.sum_of(total)


@njit
def _take_weights(
    layer: Layer,
    step: Step,
    tile: Tile,
    begin: int,
    first: int,
    end: int,
    memory: Memory,
    sums: Sums,
) -> None:
    """Turns scores of groups ``first`` .. ``end - 1`` of the chunk that begins with key ``begin`` into
    weights, 0 where no row is."""
    cap, scores, done = np.float32(layer.softcap), memory.scores, 0
    for number in range(tile.first_row, tile.end_row):
        row = _row(step, number)
        seen = row.num_seen - begin
        low = max(0, seen - layer.window) if layer.window > 0 else 0
        _clear(scores + _SCORES * done, scores + _SCORES * row.query)
        for query in range(row.query, row.query + layer.share):
            high, total = _softmax(
                scores + _SCORES * query + _VECTOR * first, end - first,
                low - GROUP * first, seen - GROUP * first, cap,
            )  # fmt: skip
            v.write_float(sums.largest + 4 * query, high)
            v.write_float(sums.total + 4 * query, total)
        done = row.query + layer.share
    _clear(scores + _SCORES * done, scores + _SCORES * tile.num_queries)


@njit
def _weigh_4(values: int, dim: int, weights: int, count: int, out: int) -> None:
    """Adds four queries' weighted values to ``out``."""
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
    layer: Layer, step: Step, head: int, run: Run, memory: Memory, out: int, num_next: int
) -> None:
    """Adds weighted values of a run to ``out``, of query 0. ``num_next``: groups of the next chunk, whose
    numbers follow and whose keys are wanted after that."""
    dim = layer.value_dim
    for place in range(0, run.num_groups, _WEIGHED):
        these = min(_WEIGHED, run.num_groups - place)
        for which in range(these):
            group, later = _group(run, place + which), place + which + _AHEAD
            if later < run.num_groups:
                ahead = values_at(layer, head, _group(run, later))
            elif later - run.num_groups < num_next:
                ahead = keys_at(layer, head, _group(run, CHUNK // GROUP + later - run.num_groups))
            else:
                ahead = values_at(layer, head, group)
            _read_values(layer, step, head, group, ahead, memory.groups + 4 * GROUP * dim * which)
        weights = memory.scores + _VECTOR * (run.place + place)
        for query in range(run.first_query, run.end_query, QUERY_MULTIPLE):
            mine = weights + _SCORES * query
            _weigh_4(memory.groups, dim, mine, GROUP * these, out + 4 * dim * query)


class Seen(NamedTuple):
    """Keys ``least`` .. ``end - 1``, which the rows of a tile see between them."""

    least: int
    end: int


@njit(inline="always")
def _own_run(step: Step, tile: Tile, number: int, base: int, own: int, end: int) -> Run:
    """Returns a branch's run: groups ``own`` .. ``end - 1`` of the chunk that begins with ``base``."""
    branch = _branch(step, number)
    groups = step.groups + 8 * (branch.groups + base + own - tile.num_common)
    count = min(end, branch.end_group - base) - own
    return Run(groups, count, own, branch.first_query, branch.end_query)


@njit
def _attend_chunk(
    layer: Layer,
    step: Step,
    tile: Tile,
    head: int,
    chunk: int,
    seen: Seen,
    memory: Memory,
    sums: Sums,
) -> None:
    """Writes one chunk's sums of all queries of a tile."""
    begin, base = chunk * CHUNK, chunk * CHUNK // GROUP
    first = max(0, seen.least - begin) // GROUP
    end = (min(CHUNK, seen.end - begin) + GROUP - 1) // GROUP
    own = max(first, min(end, tile.num_common - base))
    groups = step.groups + 8 * (tile.groups + base + first)
    common = Run(groups, own - first, first, 0, tile.num_queries)
    _begin(sums, step.most_queries)
    _score(layer, step, head, common, memory, chunk == tile.first_chunk or begin <= seen.least)
    for number in range(tile.first_branch, tile.end_branch):
        run = _own_run(step, tile, number, base, own, end)
        _score(layer, step, head, run, memory, True)
    _take_weights(layer, step, tile, begin, first, end, memory, sums)
    _clear(sums.weighted, sums.weighted + 4 * layer.value_dim * tile.num_queries)
    is_last = chunk + 1 == tile.end_chunk
    num_next = 0 if is_last or first > 0 else tile.num_common - base - CHUNK // GROUP
    _weigh(layer, step, head, common, memory, sums.weighted, num_next)
    for number in range(tile.first_branch, tile.end_branch):
        run = _own_run(step, tile, number, base, own, end)
        _weigh(layer, step, head, run, memory, sums.weighted, 0)


# --- chunk after chunk ---


@njit
def _merge_totals(num_queries: int, chunk: Sums, text: Sums, old: int, new: int) -> None:
    """Merges all but weighted values, whose factors are left at ``old`` and ``new``."""
    for at in range(0, 4 * num_queries, _VECTOR):
        before, high = v.load32(text.largest + at), v.load32(chunk.largest + at)
        most = v.larger(before, high)
        mine, theirs = v.exp(v.sub(before, most)), v.exp(v.sub(high, most))
        total, added = v.load32(text.total + at), v.load32(chunk.total + at)
        v.store32(text.largest + at, most)
        v.store32(text.total + at, v.add(v.mul(total, mine), v.mul(added, theirs)))
        v.store32(old + at, mine)
        v.store32(new + at, theirs)


@njit
def _merge(layer: Layer, step: Step, tile: Tile, chunk: Sums, memory: Memory) -> None:
    """Adds a chunk's sums to those of the chunks before it."""
    text, size = memory.text, 4 * layer.value_dim
    old, new = memory.factors, memory.factors + 4 * step.most_queries
    _merge_totals(tile.num_queries, chunk, text, old, new)
    for query in range(tile.num_queries):
        if v.read_float(chunk.largest + 4 * query) == _LOWEST:
            continue
        mine = v.splat(v.read_float(old + 4 * query))
        theirs = v.splat(v.read_float(new + 4 * query))
        out, added = text.weighted + size * query, chunk.weighted + size * query
        for d in range(0, size, _VECTOR):
            v.store32(
                out + d, v.add(v.mul(v.load32(out + d), mine), v.mul(v.load32(added + d), theirs))
            )


@njit
def _finish(layer: Layer, call: Call, row: Row, head: int, query: int, text: Sums) -> None:
    """Writes the weighted mean to the output; a sink has a score and no value."""
    high, total = v.read_float(text.largest + 4 * query), v.read_float(text.total + 4 * query)
    factor = _ONE
    if layer.sinks != 0:
        sink = v.read_float(layer.sinks + 4 * head)
        most = max(high, sink)
        factor = v.first_of(v.exp(v.splat(high - most)))
        total = total * factor + v.first_of(v.exp(v.splat(sink - most)))
    out = call.output + row.number * call.output_row + head * call.output_head
    weighted, itemsize = text.weighted + 4 * layer.value_dim * query, v.itemsize_of(layer.kind)
    share = v.splat(factor / total)
    for d in range(0, layer.value_dim, LANES):
        v.store(layer.kind, out + itemsize * d, v.mul(v.load32(weighted + 4 * d), share))


# --- tiles ---


@njit
def _read_queries(
    layer: Layer, step: Step, call: Call, tile: Tile, head: int, memory: Memory
) -> None:
    """Reads queries as floats, scaled, and by fours as ``score8`` takes them, with zeros between rows."""
    dim, kind, rows = layer.key_dim, layer.kind, memory.rows
    itemsize, factor = v.itemsize_of(kind), v.splat(np.float32(layer.scale))
    _clear(rows, rows + 4 * dim * tile.num_queries)
    for number in range(tile.first_row, tile.end_row):
        row = _row(step, number)
        source = call.query + row.number * call.query_row + head * layer.share * call.query_head
        for offset in range(layer.share):
            to = rows + 4 * dim * (row.query + offset)
            for d in range(0, dim, LANES):
                mine = v.load(kind, source + offset * call.query_head + itemsize * d)
                v.store32(to + 4 * d, v.mul(mine, factor))
    for at in range(0, 4 * dim * tile.num_queries, 16 * dim):
        interleave(rows + at, dim, memory.queries + at)


@njit
def _seen_by(layer: Layer, step: Step, tile: Tile) -> Seen:
    least = end = _row(step, tile.first_row).num_seen
    for number in range(tile.first_row, tile.end_row):
        num_seen = _row(step, number).num_seen
        least, end = min(least, num_seen), max(end, num_seen)
    return Seen(max(0, least - layer.window) if layer.window > 0 else 0, end)


@njit(inline="always")
def _is_seen(chunk: int, seen: Seen) -> bool:
    return chunk * CHUNK + CHUNK > seen.least and chunk * CHUNK < seen.end


@njit(inline="always")
def _part(layer: Layer, step: Step, tile: Tile, head: int, chunk: int) -> Sums:
    """Returns where a divided tile leaves a chunk's sums."""
    number = (tile.first_part + chunk) * layer.num_kv_heads + head
    size = 4 * step.most_queries * (layer.value_dim + 2)
    return _sums_at(layer, step, step.parts + size * number)


@njit
def _attend_whole(
    layer: Layer, step: Step, tile: Tile, head: int, seen: Seen, memory: Memory
) -> None:
    for chunk in range(tile.first_chunk, tile.end_chunk):
        if _is_seen(chunk, seen):
            _attend_chunk(layer, step, tile, head, chunk, seen, memory, memory.chunk)
            _merge(layer, step, tile, memory.chunk, memory)


@njit
def _attend_part(
    layer: Layer, step: Step, tile: Tile, head: int, seen: Seen, memory: Memory
) -> bool:
    """Leaves sums of its chunks. The last task of the tile merges those of all, and returns True."""
    for chunk in range(tile.first_chunk, tile.end_chunk):
        if _is_seen(chunk, seen):
            part = _part(layer, step, tile, head, chunk)
            _attend_chunk(layer, step, tile, head, chunk, seen, memory, part)
    counter = step.counters + 8 * (tile.first_part * layer.num_kv_heads + head)
    if v.fetch_add(counter, 1) % tile.num_tiles != tile.num_tiles - 1:
        return False
    for chunk in range(tile.num_chunks):
        if _is_seen(chunk, seen):
            _merge(layer, step, tile, _part(layer, step, tile, head, chunk), memory)
    return True


@njit
def _attend_tile(
    layer: Layer, step: Step, call: Call, tile: Tile, head: int, memory: Memory
) -> None:
    """Lets the queries of a tile that share a key head attend."""
    seen = _seen_by(layer, step, tile)
    _read_queries(layer, step, call, tile, head, memory)
    text = memory.text
    _clear(text.weighted, text.weighted + 4 * layer.value_dim * tile.num_queries)
    _begin(text, step.most_queries)
    if tile.first_part < 0:
        _attend_whole(layer, step, tile, head, seen, memory)
    elif not _attend_part(layer, step, tile, head, seen, memory):
        return
    for number in range(tile.first_row, tile.end_row):
        row = _row(step, number)
        for offset in range(layer.share):
            _finish(layer, call, row, head * layer.share + offset, row.query + offset, text)


def _attend(p: int) -> None:
    layer, step = record_at(Layer, p + 8 * LAYER_AT), record_at(Step, p + 8 * STEP_AT)
    call = record_at(Call, p + 8 * CALL_AT)
    memory = _memory(layer, step, v.fetch_add(p + 8 * NUM_WORKERS, 1))
    while True:
        task = v.fetch_add(p + 8 * NEXT_TASK, 1)
        if task >= step.num_tasks:
            break
        tile = record_at(Tile, step.tiles + _TILE_BYTES * (task // layer.num_kv_heads))
        _attend_tile(layer, step, call, tile, task % layer.num_kv_heads, memory)


attend = Kernel(_attend, NUM_ARGS)
"""Lets every tile's rows attend."""
