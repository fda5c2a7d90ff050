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

``store_rows`` puts new keys and values into their slots before: finite ones, and keys within a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from compiled.records import Counter, Int64s
from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.attention_tiles import (
    CHUNK,
    GROUP,
    QUERY_MULTIPLE,
    Branch,
    Row,
    Tile,
)
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats
from engine.kernels.tiles import (
    interleave,
    score4,
    score8,
    score_few,
    transpose,
    weigh16,
    weigh64,
)


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


# --- what is told ---


class Step(NamedTuple):
    """``slot_mapping``: each new row's slot; ``groups``: each group's first slot, or which sixteen of
    ``slots`` it is made of, as -1 - number; ``scratch``: ``scratch_size`` floats for each worker;
    ``parts``: for sums of chunks of divided tiles; ``counters``: how many of a divided tile's tasks are
    done, by first part and key head. ``num_tasks``: tiles times key heads; ``most_queries``: a tile's."""

    slot_mapping: Int64s
    tiles: Sequence[Tile]
    rows: Sequence[Row]
    branches: Sequence[Branch]
    groups: Int64s
    slots: Int64s
    scratch: Float32s
    parts: Float32s
    counters: Int64s
    num_rows: int
    num_tasks: int
    most_queries: int
    scratch_size: int


class Arguments(NamedTuple):
    """New rows and the output ``[num_rows, heads, dim]``, apart by ``_row`` and ``_head``; the store's
    keys and values, apart by ``key_head`` and ``value_head``; ``sinks``: of each query head, or NOWHERE;
    ``share``: queries to a key head; ``window``: how many keys up to its own a row sees at most;
    ``softcap``: 0: none."""

    query: Floats
    new_keys: Floats
    new_values: Floats
    output: Floats
    keys: Floats
    values: Floats
    sinks: Float32s
    step: Step
    query_row: int
    query_head: int
    new_key_row: int
    new_key_head: int
    new_value_row: int
    new_value_head: int
    output_row: int
    output_head: int
    key_head: int
    value_head: int
    num_kv_heads: int
    share: int
    key_dim: int
    value_dim: int
    window: int
    scale: float
    softcap: float
    largest_key: float
    next_row: Counter = 0
    next_task: Counter = 0
    num_workers: Counter = 0


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
            new, place = keys + head * a.new_key_head, _keys_at(a, head, slot)
            _store_row(new, place, a.key_dim, np.float32(a.largest_key))
            new, place = values + head * a.new_value_head, _values_at(a, head, slot)
            _store_row(new, place, a.value_dim, np.float32(np.inf))


store_rows = Kernel(_store_rows)
"""Stores every new row of one layer."""

# --- a worker's memory ---

_LOWEST = np.float32(-3.0e38)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
# Floats from a query's scores to the next one's: a chunk's, and one group more, for half a pair of groups
# to be scored into and for queries' scores to lie in different sets of a cache.
_SCORES = CHUNK + GROUP
# Groups from the one that is read to the one that is fetched meanwhile, line after line: blocks lie
# anywhere, so that no CPU guesses where the next one is, and many lines at once are in the way of what is
# read.
_AHEAD = 2
_PAIR = 2  # groups that are scored at once, where queries are many


class Sums(NamedTuple):
    """Sums over some keys, by query. ``weighted``: values, ``[most_queries, value_dim]``; ``largest``:
    score; ``total``: of weights relative to it."""

    weighted: Any
    largest: Any
    total: Any


class Memory(NamedTuple):
    """A worker's floats. ``groups``: keys or values, converted; ``queries``: by fours, as ``score8``
    takes them, ``rows``: one after another; ``scores``: of a chunk, then its weights, ``_SCORES`` for
    each query; ``old`` and ``new``: what merged sums are multiplied by."""

    groups: Any
    queries: Any
    rows: Any
    scores: Any
    old: Any
    new: Any
    chunk: Sums
    text: Sums


def sums_floats(most_queries: int, value_dim: int) -> int:
    """Returns what ``Sums`` need: of one chunk of a divided tile, for each key head."""
    return most_queries * (value_dim + 2)


def scratch_floats(most_queries: int, key_dim: int, value_dim: int) -> int:
    """Returns what one worker needs."""
    groups = GROUP * max((_PAIR + 1) * key_dim, value_dim)
    sums = 2 * sums_floats(most_queries, value_dim)
    return groups + most_queries * (2 * key_dim + _SCORES + 2) + sums


@njit(inline="always")
def _sums_at(a: Arguments, floats: Any) -> Sums:
    largest = floats + a.step.most_queries * a.value_dim
    return Sums(floats, largest, largest + a.step.most_queries)


@njit(inline="always")
def _memory(a: Arguments, worker: int) -> Memory:
    groups, most = a.step.scratch + worker * a.step.scratch_size, a.step.most_queries
    queries = groups + GROUP * max((_PAIR + 1) * a.key_dim, a.value_dim)
    rows = queries + most * a.key_dim
    scores = rows + most * a.key_dim
    old = scores + _SCORES * most
    chunk = _sums_at(a, old + 2 * most)
    text = _sums_at(a, chunk.total + most)
    return Memory(groups, queries, rows, scores, old, old + most, chunk, text)


@njit
def _clear(floats: Any, count: int) -> None:
    """Writes zeros, a multiple of sixteen."""
    for at in range(0, count, LANES):
        v.store(floats, at, v.splat(_ZERO))


@njit
def _begin(a: Arguments, tile: Tile, sums: Sums) -> None:
    """Writes the sums of no keys."""
    for at in range(0, a.step.most_queries, LANES):
        v.store(sums.largest, at, v.splat(_LOWEST))
    _clear(sums.total, a.step.most_queries)
    _clear(sums.weighted, a.value_dim * tile.num_queries)


# --- groups of keys ---


@njit
def _gather(a: Arguments, plane: Any, dim: int, group: int, out: Any) -> None:
    """Copies a group that does not lie together, as floats; ``plane``: where slot 0 is."""
    slots = a.step.slots + GROUP * (-1 - group)
    for key in range(GROUP):
        source = plane + slots[key] * dim
        for d in range(0, dim, LANES):
            v.store(out, key * dim + d, v.load(source, d))


@njit(inline="always")
def _keys_at(a: Arguments, head: int, group: int) -> Any:
    """Returns where a group of keys is that lies together; of another, one that may be fetched."""
    return a.keys + (head * a.key_head + max(0, group) * a.key_dim)


@njit(inline="always")
def _values_at(a: Arguments, head: int, group: int) -> Any:
    return a.values + (head * a.value_head + max(0, group) * a.value_dim)


@njit
def _read_keys(a: Arguments, head: int, group: int, keys: Any, rows: Any) -> None:
    """Reads sixteen keys as floats, each dimension's together, ``_PAIR`` groups apart. ``rows``: memory
    to use."""
    if group < 0:
        _gather(a, _keys_at(a, head, 0), a.key_dim, group, rows)
        transpose(rows, a.key_dim, keys, _PAIR * GROUP)
    else:
        transpose(_keys_at(a, head, group), a.key_dim, keys, _PAIR * GROUP)


@njit
def _read_values(a: Arguments, head: int, group: int, values: Any) -> None:
    """Reads sixteen values as floats, ``[16, value_dim]``."""
    if group < 0:
        _gather(a, _values_at(a, head, 0), a.value_dim, group, values)
    else:
        v.widen(_values_at(a, head, group), GROUP * a.value_dim, values)


# --- a chunk of keys ---


class Run(NamedTuple):
    """Groups of a chunk that queries of a tile see, by their ``num_groups`` numbers at ``groups``, the
    first at ``place`` in the chunk. ``num_queries``: without those that fill up the last four."""

    groups: Any
    num_groups: int
    place: int
    first_query: int
    num_queries: int


@njit
def _after_key(a: Arguments, head: int, run: Run, place: int) -> Any:
    """Returns what is fetched while a run's group is scored: keys, and then the first values."""
    later = place + _AHEAD
    if later < run.num_groups:
        return _keys_at(a, head, run.groups[later])
    return _values_at(a, head, run.groups[min(later - run.num_groups, run.num_groups - 1)])


@njit
def _score(a: Arguments, head: int, run: Run, memory: Memory, is_first: bool) -> None:
    """Writes the scores of a run. ``is_first``: its keys were not fetched by what came before."""
    if is_first:
        for place in range(min(_AHEAD, run.num_groups)):
            v.fetch(_keys_at(a, head, run.groups[place]), GROUP * a.key_dim)
    out = memory.scores + (_SCORES * run.first_query + GROUP * run.place)
    if run.num_queries <= QUERY_MULTIPLE:
        for place in range(run.num_groups):
            _score_group(a, head, run, place, memory, out + GROUP * place)
    else:
        for place in range(0, run.num_groups, _PAIR):
            _score_pair(a, head, run, place, memory, out + GROUP * place)


@njit
def _score_group(a: Arguments, head: int, run: Run, place: int, memory: Memory, out: Any) -> None:
    """Scores few queries with a run's group."""
    dim, group, ahead = a.key_dim, run.groups[place], _after_key(a, head, run, place)
    queries = memory.queries + dim * run.first_query
    if group < 0:
        _gather(a, _keys_at(a, head, 0), dim, group, memory.groups)
        score_few(memory.groups, dim, ahead, queries, out, _SCORES, run.num_queries)
    else:
        keys = _keys_at(a, head, group)
        score_few(keys, dim, ahead, queries, out, _SCORES, run.num_queries)


@njit
def _score_pair(a: Arguments, head: int, run: Run, place: int, memory: Memory, out: Any) -> None:
    """Scores queries with two of a run's groups; the last one may have none beside it, and what is
    written in its place nobody reads."""
    dim, keys = a.key_dim, memory.groups
    for half in range(min(_PAIR, run.num_groups - place)):
        group, rows = run.groups[place + half], keys + GROUP * _PAIR * dim
        _read_keys(a, head, group, keys + GROUP * half, rows)
    ahead, also = _after_key(a, head, run, place), _after_key(a, head, run, place + 1)
    query, left = memory.queries + dim * run.first_query, run.num_queries
    while left > QUERY_MULTIPLE:
        score8(ahead, also, keys, dim, query, out, _SCORES)
        query, out, left = query + 8 * dim, out + 8 * _SCORES, left - 8
    if left > 0:
        score4(ahead, also, keys, dim, query, out, _SCORES)


@njit
def _softmax(scores: Any, count: int, first: int, end: int, cap: float) -> tuple[float, float]:
    """Turns a chunk's scores, of which keys ``first`` .. ``end - 1`` are seen, into weights relative to
    the largest. Returns the largest, and the sum of weights. ``cap``: a soft one; 0: none."""
    most, by = v.splat(_LOWEST), v.splat(cap)
    for at in range(0, count, LANES):
        if cap != _ZERO:
            v.store(scores, at, v.tanh(v.load(scores, at) / by) * by)
        if at < first or at + LANES > end:
            v.store(scores, at, v.keep(v.load(scores, at), first - at, end - at))
        most = v.larger(v.load(scores, at), most)
    high = v.largest_of(most)
    shift, total = v.splat(high), v.splat(_ZERO)
    for at in range(0, count, LANES):
        weight = v.exp(v.load(scores, at) - shift)
        v.store(scores, at, weight)
        total = total + weight
    return high, v.sum_of(total)


@njit
def _take_weights(
    a: Arguments, tile: Tile, begin: int, first: int, end: int, memory: Memory, sums: Sums
) -> None:
    """Turns scores of keys ``first`` .. ``end - 1`` of the chunk that begins with key ``begin`` into
    weights, 0 where no row is."""
    cap, scores, done = np.float32(a.softcap), memory.scores, 0
    for number in range(tile.first_row, tile.end_row):
        row = a.step.rows[number]
        seen = max(row.num_seen, tile.block_end) - begin
        low = max(tile.first_key, row.num_seen - a.window) - begin
        _clear(scores + _SCORES * done, _SCORES * (row.query - done))
        for query in range(row.query, row.query + a.share):
            mine = scores + (_SCORES * query + first)
            high, total = _softmax(mine, end - first, low - first, seen - first, cap)
            sums.largest[query] = high
            sums.total[query] = total
        done = row.query + a.share
    _clear(scores + _SCORES * done, _SCORES * (tile.num_queries - done))


@njit
def _after_value(a: Arguments, head: int, run: Run, place: int, num_next: int) -> Any:
    """Returns what is fetched while a run's values are weighed: values, and then the first keys of the
    next chunk's ``num_next`` groups, whose numbers follow this chunk's."""
    later = place + _AHEAD
    if later < run.num_groups:
        return _values_at(a, head, run.groups[later])
    if later - run.num_groups < num_next:
        return _keys_at(a, head, run.groups[CHUNK // GROUP + later - run.num_groups])
    return _values_at(a, head, run.groups[place])


@njit
def _weigh_4(dim: int, ahead: Any, values: Any, weights: Any, out: Any, num_queries: int) -> None:
    """Adds the weighted values of a group, stored or floats, of up to four queries to ``out``."""
    d = 0
    while dim - d >= 64:
        weigh64(ahead + d, values + d, dim, weights, _SCORES, out + d, num_queries)
        d += 64
    for at in range(d, dim, LANES):
        weigh16(ahead + at, values + at, dim, weights, _SCORES, out + at, num_queries)


@njit
def _weigh(a: Arguments, head: int, run: Run, memory: Memory, out: Any, num_next: int) -> None:
    """Adds weighted values of a run to ``out``, of query 0; ``num_next``: see ``_after_value``."""
    dim, floats = a.value_dim, memory.groups
    for place in range(run.num_groups):
        group, ahead = run.groups[place], _after_value(a, head, run, place, num_next)
        weights = memory.scores + (_SCORES * run.first_query + GROUP * (run.place + place))
        to = out + dim * run.first_query
        if group >= 0 and run.num_queries <= QUERY_MULTIPLE:
            _weigh_4(dim, ahead, _values_at(a, head, group), weights, to, run.num_queries)
            continue
        _read_values(a, head, group, floats)
        for done in range(0, run.num_queries, QUERY_MULTIPLE):
            these = min(QUERY_MULTIPLE, run.num_queries - done)
            _weigh_4(dim, ahead, floats, weights + _SCORES * done, to + dim * done, these)


@njit(inline="always")
def _own_run(a: Arguments, tile: Tile, number: int, base: int, own: int, end: int) -> Run:
    """Returns a branch's run: groups ``own`` .. ``end - 1`` of the chunk that begins with ``base``."""
    branch = a.step.branches[number]
    groups = a.step.groups + (branch.groups + base + own - tile.num_common)
    count = min(end, branch.end_group - base) - own
    return Run(groups, count, own, branch.first_query, branch.end_query - branch.first_query)


@njit
def _attend_chunk(
    a: Arguments, tile: Tile, head: int, chunk: int, least: int, memory: Memory, sums: Sums
) -> None:
    """Writes one chunk's sums of all queries of a tile; ``least``: the first key that they see."""
    begin, base = chunk * CHUNK, chunk * CHUNK // GROUP
    first = max(0, least - begin) // GROUP
    end = (min(CHUNK, tile.most_seen - begin) + GROUP - 1) // GROUP
    own = max(first, min(end, tile.num_common - base))
    groups = a.step.groups + (tile.groups + base + first)
    num_queries = a.step.rows[tile.end_row - 1].query + a.share
    common = Run(groups, own - first, first, 0, num_queries)
    _begin(a, tile, sums)
    _score(a, head, common, memory, chunk == tile.first_chunk or begin <= least)
    for number in range(tile.first_branch, tile.end_branch):
        _score(a, head, _own_run(a, tile, number, base, own, end), memory, True)
    _take_weights(a, tile, begin, GROUP * first, GROUP * end, memory, sums)
    is_last = chunk + 1 == tile.end_chunk
    num_next = 0 if is_last or first > 0 else tile.num_common - base - CHUNK // GROUP
    _weigh(a, head, common, memory, sums.weighted, num_next)
    for number in range(tile.first_branch, tile.end_branch):
        _weigh(a, head, _own_run(a, tile, number, base, own, end), memory, sums.weighted, 0)


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
        if chunk.largest[query] == _LOWEST:
            continue
        mine, theirs = v.splat(memory.old[query]), v.splat(memory.new[query])
        out, added = memory.text.weighted, chunk.weighted
        for d in range(a.value_dim * query, a.value_dim * (query + 1), LANES):
            v.store(out, d, v.load(out, d) * mine + v.load(added, d) * theirs)


@njit
def _finish(a: Arguments, row: Row, head: int, query: int, text: Sums) -> None:
    """Writes the weighted mean to the output; a sink has a score and no value."""
    high, total, factor = text.largest[query], text.total[query], _ONE
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
    _clear(rows, dim * tile.num_queries)
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
    return _sums_at(a, a.step.parts + number * a.step.most_queries * (a.value_dim + 2))


@njit
def _attend_chunks(a: Arguments, tile: Tile, head: int, memory: Memory) -> bool:
    """Merges the sums of a tile's chunks, or, where it is divided, leaves them: the last task of those
    that divide it merges all. Returns whether all are merged."""
    is_whole = tile.first_part < 0
    least = max(tile.first_key, tile.least_seen - a.window)
    for chunk in range(tile.first_chunk, tile.end_chunk):
        if _is_seen(tile, chunk, least):
            sums = memory.chunk if is_whole else _part(a, tile, head, chunk)
            _attend_chunk(a, tile, head, chunk, least, memory, sums)
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


@njit
def _attend_tile(a: Arguments, tile: Tile, head: int, memory: Memory) -> None:
    """Lets the queries of a tile that share a key head attend."""
    text = memory.text
    _read_queries(a, tile, head, memory)
    _begin(a, tile, text)
    if not _attend_chunks(a, tile, head, memory):
        return
    for number in range(tile.first_row, tile.end_row):
        row = a.step.rows[number]
        for offset in range(a.share):
            _finish(a, row, head * a.share + offset, row.query + offset, text)


def _attend(a: Arguments) -> None:
    memory = _memory(a, v.fetch_add(a.num_workers, 1))
    for task in v.shared(a.next_task, a.step.num_tasks):
        _attend_tile(a, a.step.tiles[task // a.num_kv_heads], task % a.num_kv_heads, memory)


attend = Kernel(_attend)
"""Lets every tile's rows attend."""
