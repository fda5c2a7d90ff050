"""The largest logits of rows, and what sums of exponentials make probabilities of them.

Kernels go through a row by tiles of 1024 tokens, of which token ``32 * member + group`` is a group's
member, so that the largest logits of 32 groups are maxima over whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.noise_numbers import GROUP_TOKENS, TILE_TOKENS
from compiled.records import Counter, Int64s
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import NOWHERE, Float32s, Floats, listed


def reference(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ``top_rows`` does, of logits that are numbers: of equal ones the lowest token first,
    and of two zeros, too."""
    values, tokens = (logits + 0.0).sort(dim=-1, descending=True, stable=True)
    return tokens[:, :num_top], values[:, :num_top]


# --- tiles of a row ---

LOWEST = np.float32(-np.inf)
_ZERO = np.float32(0.0)


def num_tiles(vocab_size: int) -> int:
    """Returns how many tiles a row has; the last one may not be full."""
    return (vocab_size + TILE_TOKENS - 1) // TILE_TOKENS


count_tiles = njit(num_tiles)
room_for_tile = v.room_for(TILE_TOKENS)
"""Where ``pad`` leaves a row's last tile, as elements of the row's type."""


@njit(inline="always")
def tile_at(logits: Any, vocab_size: int, tile: int, padded: Any) -> Any:
    """Where its logits are; ``padded``: where those of the last one are, if it is not full."""
    return logits + tile * TILE_TOKENS if (tile + 1) * TILE_TOKENS <= vocab_size else padded


@njit
def pad(logits: Any, vocab_size: int, padded: Any) -> None:
    """The last tokens, and nothing after them."""
    first = vocab_size // TILE_TOKENS * TILE_TOKENS
    for at in range(0, TILE_TOKENS, LANES):
        v.store(padded, at, v.splat(LOWEST))
    for token in range(first, vocab_size, LANES):
        count = min(LANES, vocab_size - token)
        v.store_some(padded + (token - first), v.load_some(logits + token, count), count)


@njit
def find_maxima(tile: Any, maxima: Any) -> None:
    """The largest logit of each of a tile's groups."""
    for group in range(0, GROUP_TOKENS, LANES):
        most = v.splat(LOWEST)
        for member in range(0, TILE_TOKENS, GROUP_TOKENS):
            most = v.larger(v.load(tile, member + group), most)
        v.store(maxima, group, most)


# --- the largest ones, by a heap of as many ---

NO_KEY = -(1 << 63)
"""In the place of a key, where a row has fewer numbers."""
_ID_BITS = 32


@njit(inline="always")
def _key(logit: Any, token: int) -> int:
    """An integer that orders logits, and among equal ones the lowest token as largest."""
    bits: Any = v.float_bits(logit)
    if bits == -(1 << 31):  # there are two zeros, of one value
        bits = 0
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
    return (bits << _ID_BITS) - token


@njit
def _sink(heap: Any, size: int, at: int, key: int) -> None:
    """Put ``key`` at the place ``at`` or below it, in a heap of which ``size`` keys are left."""
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key


@njit
def keep_largest(logits: Any, vocab_size: int, count: int, maxima: Any, heap: Any) -> None:
    """The keys of the largest logits into a heap, the least of them at its root."""
    for at in range(count):
        heap[at] = NO_KEY
    for group in range(count_tiles(vocab_size) * GROUP_TOKENS):
        # Of equal logits every token may be the one with the lowest number.
        if _key(maxima[group], 0) < heap[0]:
            continue
        first = group // GROUP_TOKENS * TILE_TOKENS
        end = min(first + TILE_TOKENS, vocab_size)
        for token in range(first + group % GROUP_TOKENS, end, GROUP_TOKENS):
            value = v.one_of(logits, token)
            if value == value:
                key = _key(value, token)
                if key > heap[0]:
                    _sink(heap, count, 0, key)


@njit
def sort_kept(heap: Any, count: int) -> None:
    """Best first."""
    for size in range(count - 1, 0, -1):
        least = heap[0]
        _sink(heap, size, 0, heap[size])
        heap[size] = least


@njit(inline="always")
def token_of(key: int) -> int:
    """Not of ``NO_KEY``."""
    return (-key) & ((1 << _ID_BITS) - 1)


# --- top tokens ---


class Arguments(NamedTuple):
    """``logits`` ``[.., vocab_size]``, of which ``rows`` are looked at (NOWHERE: all of them), so many
    as ``num_rows``; ``tokens`` and ``values`` ``[num_rows, num_top]``, the results; of each worker
    ``heap`` ``[num_top]`` and ``maxima`` of its row's groups."""

    logits: Floats
    rows: Int64s
    tokens: Int64s
    values: Float32s
    heap: Int64s
    maxima: Float32s
    num_rows: int
    vocab_size: int
    num_top: int
    next_row: Counter = 0
    num_workers: Counter = 0


def _find(a: Arguments) -> None:
    worker, num_groups = v.fetch_add(a.num_workers, 1), count_tiles(a.vocab_size) * GROUP_TOKENS
    heap, maxima = a.heap + worker * a.num_top, a.maxima + worker * num_groups
    padded = v.as_elements_of(a.logits, room_for_tile())
    for row in v.shared(a.next_row, a.num_rows):
        which = row if v.is_none(a.rows) else a.rows[row]
        logits = a.logits + which * a.vocab_size
        pad(logits, a.vocab_size, padded)
        for tile in range(count_tiles(a.vocab_size)):
            find_maxima(tile_at(logits, a.vocab_size, tile, padded), maxima + tile * GROUP_TOKENS)
        keep_largest(logits, a.vocab_size, a.num_top, maxima, heap)
        sort_kept(heap, a.num_top)
        tokens, values = a.tokens + row * a.num_top, a.values + row * a.num_top
        for rank in range(a.num_top):
            is_missing = heap[rank] == NO_KEY  # fewer numbers than were asked for
            tokens[rank] = 0 if is_missing else token_of(heap[rank])
            values[rank] = LOWEST if is_missing else v.one_of(logits, tokens[rank])


find = Kernel(_find)
"""Writes tokens and values of every row, best first."""


class SumArguments(NamedTuple):
    """``logits`` ``[num_rows, vocab_size]``; ``sums`` ``[num_rows]``, the results."""

    logits: Floats
    sums: Float32s
    num_rows: int
    vocab_size: int
    next_row: Counter = 0


@njit
def sum_row(logits: Any, vocab_size: int, padded: Any) -> Any:
    """The logarithm of the sum of a row's exponentials. ``padded``: as ``pad`` left it."""
    most = v.splat(LOWEST)
    for tile in range(count_tiles(vocab_size)):
        values = tile_at(logits, vocab_size, tile, padded)
        for at in range(0, TILE_TOKENS, LANES):
            most = v.larger_or_nan(v.load(values, at), most)
    top = v.largest_or_nan_of(most)
    peak, total = v.splat(top), v.splat(_ZERO)
    for tile in range(count_tiles(vocab_size)):
        values = tile_at(logits, vocab_size, tile, padded)
        part = v.splat(_ZERO)  # beside a large sum, small numbers that come one by one are lost
        for at in range(0, TILE_TOKENS, LANES):
            part = part + v.exp(v.load(values, at) - peak)
        total = total + part
    return top + np.log(v.sum_of(total))


def _sum(a: SumArguments) -> None:
    padded = v.as_elements_of(a.logits, room_for_tile())
    for row in v.shared(a.next_row, a.num_rows):
        logits = a.logits + row * a.vocab_size
        pad(logits, a.vocab_size, padded)
        a.sums[row] = sum_row(logits, a.vocab_size, padded)


sum_all = Kernel(_sum)
"""Writes of every row the logarithm of the sum of its exponentials; the sum's order is fixed: each lane
of a tile, then the tiles, then the lanes."""


def top_rows(
    logits: torch.Tensor, num_top: int, rows: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and values of the ``num_top`` largest ``logits``, at least one, ``[num_rows,
    num_top]``, of ``rows``, or of all. ``logits``: ``[.., vocab_size]``, floats, contiguous. Minus
    infinity, token 0, where a row has fewer numbers."""
    num_rows, vocab_size = len(logits) if rows is None else len(rows), logits.shape[1]
    tokens = torch.empty(num_rows, num_top, dtype=torch.int64)
    values = torch.empty(num_rows, num_top)
    num_threads = min(num_rows, threads_for(num_rows * vocab_size))
    heap = torch.empty(num_threads * num_top, dtype=torch.int64)
    maxima = torch.empty(num_threads * num_tiles(vocab_size) * GROUP_TOKENS)
    told = NOWHERE if rows is None else listed(rows)
    find.run(
        Arguments(logits, told, tokens, values, heap, maxima, num_rows, vocab_size, num_top),
        num_threads,
    )
    return tokens, values


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logarithm of the sum of exponentials of each row: ``[num_rows, vocab_size]``, floats,
    contiguous, to ``[num_rows, 1]``."""
    sums = torch.empty(len(logits), 1)
    num_threads = min(len(logits), threads_for(logits.numel()))
    sum_all.run(SumArguments(logits, sums, *logits.shape), num_threads)
    return sums
