"""Compiled attention: what a tile's queries get of one chunk of keys, group after group, in a worker's
own memory. The words are those of ``paged_attention``.

Of up to four queries keys and values are multiplied as they are read; for more, they are made floats
once, and keys turned into columns. What is read next is fetched beside the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from compiled.loops import callee
from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.attention_arguments import Arguments, keys_at, values_at
from engine.kernels.attention_tiles import CHUNK, GROUP, QUERY_MULTIPLE, Tile
from engine.kernels.tiles import score4, score8, score_few, transpose, weigh16, weigh64

# --- a worker's memory ---

LOWEST = np.float32(-3.0e38)
_ZERO = np.float32(0.0)
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


def _group_floats(key_dim: int, value_dim: int) -> int:
    """Returns what ``Memory.groups`` needs: a pair of groups' keys and one's as it is read, or values."""
    return GROUP * max((_PAIR + 1) * key_dim, value_dim)


_count_floats = njit(_group_floats)


def scratch_floats(most_queries: int, key_dim: int, value_dim: int) -> int:
    """Returns what one worker needs."""
    groups = _group_floats(key_dim, value_dim)
    sums = 2 * sums_floats(most_queries, value_dim)
    return groups + most_queries * (2 * key_dim + _SCORES + 2) + sums


@njit(inline="always")
def sums_at(a: Arguments, floats: Any) -> Sums:
    largest = floats + a.step.most_queries * a.value_dim
    return Sums(floats, largest, largest + a.step.most_queries)


@njit(inline="always")
def memory_of(a: Arguments, worker: int) -> Memory:
    groups, most = a.step.scratch + worker * a.step.scratch_size, a.step.most_queries
    queries = groups + _count_floats(a.key_dim, a.value_dim)
    rows = queries + most * a.key_dim
    scores = rows + most * a.key_dim
    old = scores + _SCORES * most
    chunk = sums_at(a, old + 2 * most)
    text = sums_at(a, chunk.total + most)
    return Memory(groups, queries, rows, scores, old, old + most, chunk, text)


@njit
def clear(floats: Any, count: int) -> None:
    """Writes zeros, a multiple of sixteen."""
    for at in range(0, count, LANES):
        v.store(floats, at, v.splat(_ZERO))


@njit
def begin_sums(a: Arguments, tile: Tile, sums: Sums) -> None:
    """Writes the sums of no keys."""
    for at in range(0, a.step.most_queries, LANES):
        v.store(sums.largest, at, v.splat(LOWEST))
    clear(sums.total, a.step.most_queries)
    clear(sums.weighted, a.value_dim * tile.num_queries)


# --- groups of keys ---


@njit
def _gather(a: Arguments, plane: Any, dim: int, group: int, out: Any) -> None:
    """Copies a group that does not lie together, as floats; ``plane``: where slot 0 is."""
    slots = a.step.slots + GROUP * (-1 - group)
    for key in range(GROUP):
        source = plane + slots[key] * dim
        for d in range(0, dim, LANES):
            v.store(out, key * dim + d, v.load(source, d))


@njit
def _read_keys(a: Arguments, head: int, group: int, keys: Any, rows: Any) -> None:
    """Reads sixteen keys as floats, each dimension's together, ``_PAIR`` groups apart. ``rows``: memory
    to use."""
    if group < 0:
        _gather(a, keys_at(a, head, 0), a.key_dim, group, rows)
        transpose(rows, a.key_dim, keys, _PAIR * GROUP)
    else:
        transpose(keys_at(a, head, group), a.key_dim, keys, _PAIR * GROUP)


@njit
def _read_values(a: Arguments, head: int, group: int, values: Any) -> None:
    """Reads sixteen values as floats, ``[16, value_dim]``."""
    if group < 0:
        _gather(a, values_at(a, head, 0), a.value_dim, group, values)
    else:
        v.widen(values_at(a, head, group), GROUP * a.value_dim, values)


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
        return keys_at(a, head, run.groups[later])
    return values_at(a, head, run.groups[min(later - run.num_groups, run.num_groups - 1)])


@callee
def _score(a: Arguments, head: int, run: Run, memory: Memory, is_first: bool) -> None:
    """Writes the scores of a run. ``is_first``: its keys were not fetched by what came before."""
    if is_first:
        for place in range(min(_AHEAD, run.num_groups)):
            v.fetch(keys_at(a, head, run.groups[place]), GROUP * a.key_dim)
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
        _gather(a, keys_at(a, head, 0), dim, group, memory.groups)
        score_few(ahead, memory.groups, dim, queries, out, _SCORES, run.num_queries)
    else:
        keys = keys_at(a, head, group)
        score_few(ahead, keys, dim, queries, out, _SCORES, run.num_queries)


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
    most, by = v.splat(LOWEST), v.splat(cap)
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
        clear(scores + _SCORES * done, _SCORES * (row.query - done))
        for query in range(row.query, row.query + a.share):
            mine = scores + (_SCORES * query + first)
            high, total = _softmax(mine, end - first, low - first, seen - first, cap)
            sums.largest[query] = high
            sums.total[query] = total
        done = row.query + a.share
    clear(scores + _SCORES * done, _SCORES * (tile.num_queries - done))


@callee
def _after_value(a: Arguments, head: int, run: Run, place: int, num_next: int) -> Any:
    """Returns what is fetched while a run's values are weighed: values, and then the first keys of the
    next chunk's ``num_next`` groups, whose numbers follow this chunk's."""
    later = place + _AHEAD
    if later < run.num_groups:
        return values_at(a, head, run.groups[later])
    if later - run.num_groups < num_next:
        return keys_at(a, head, run.groups[CHUNK // GROUP + later - run.num_groups])
    return values_at(a, head, run.groups[place])


@njit
def _weigh_4(dim: int, ahead: Any, values: Any, weights: Any, out: Any, num_queries: int) -> None:
    """Adds the weighted values of a group, stored or floats, of up to four queries to ``out``."""
    d = 0
    while dim - d >= 64:
        weigh64(ahead + d, values + d, dim, weights, _SCORES, out + d, num_queries)
        d += 64
    for at in range(d, dim, LANES):
        weigh16(ahead + at, values + at, dim, weights, _SCORES, out + at, num_queries)


@callee
def _weigh(a: Arguments, head: int, run: Run, memory: Memory, out: Any, num_next: int) -> None:
    """Adds weighted values of a run to ``out``, of query 0; ``num_next``: see ``_after_value``."""
    dim, floats = a.value_dim, memory.groups
    for place in range(run.num_groups):
        group, ahead = run.groups[place], _after_value(a, head, run, place, num_next)
        weights = memory.scores + (_SCORES * run.first_query + GROUP * (run.place + place))
        to = out + dim * run.first_query
        if group >= 0 and run.num_queries <= QUERY_MULTIPLE:
            _weigh_4(dim, ahead, values_at(a, head, group), weights, to, run.num_queries)
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


@njit(inline="always")
def attend_chunk(
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
    begin_sums(a, tile, sums)
    _score(a, head, common, memory, chunk == tile.first_chunk or begin <= least)
    for number in range(tile.first_branch, tile.end_branch):
        _score(a, head, _own_run(a, tile, number, base, own, end), memory, True)
    _take_weights(a, tile, begin, GROUP * first, GROUP * end, memory, sums)
    is_last = chunk + 1 == tile.end_chunk
    num_next = 0 if is_last or first > 0 else tile.num_common - base - CHUNK // GROUP
    _weigh(a, head, common, memory, sums.weighted, num_next)
    for number in range(tile.first_branch, tile.end_branch):
        _weigh(a, head, _own_run(a, tile, number, base, own, end), memory, sums.weighted, 0)
