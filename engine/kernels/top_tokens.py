"""The largest logits of rows, and what sums of exponentials make probabilities of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.compiled import Loop, threads_for
from engine.kernels.largest_logits import NO_KEY, keep_largest, sort_kept, token_of
from engine.kernels.logit_tiles import (
    LOWEST,
    count_tiles,
    find_maxima,
    num_tiles,
    pad,
    room_for_tile,
    tile_at,
)
from engine.kernels.records import Counter, Float32s, Int64s
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS


def reference(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what ``top_rows`` does, of logits that are numbers: of equal ones the lowest token first,
    and of two zeros, too."""
    values, tokens = (logits + 0.0).sort(dim=-1, descending=True, stable=True)
    return tokens[:, :num_top], values[:, :num_top]


class Arguments(NamedTuple):
    """``logits`` ``[num_rows, vocab_size]``; ``tokens`` and ``values`` ``[num_rows, num_top]``, the
    results; of each worker ``heap`` ``[num_top]`` and ``maxima`` of its row's groups."""

    logits: Float32s
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
    padded = room_for_tile()
    for row in v.shared(a.next_row, a.num_rows):
        logits = a.logits + row * a.vocab_size
        pad(logits, a.vocab_size, padded)
        for tile in range(count_tiles(a.vocab_size)):
            find_maxima(tile_at(logits, a.vocab_size, tile, padded), maxima + tile * GROUP_TOKENS)
        keep_largest(logits, a.vocab_size, a.num_top, padded, maxima, heap)
        sort_kept(heap, a.num_top)
        tokens, values = a.tokens + row * a.num_top, a.values + row * a.num_top
        for rank in range(a.num_top):
            is_missing = heap[rank] == NO_KEY  # fewer numbers than were asked for
            tokens[rank] = 0 if is_missing else token_of(heap[rank])
            values[rank] = LOWEST if is_missing else logits[tokens[rank]]


find = Loop(_find, Arguments)
"""Writes tokens and values of every row, best first."""


class SumArguments(NamedTuple):
    """``logits`` ``[num_rows, vocab_size]``; ``sums`` ``[num_rows]``, the results."""

    logits: Float32s
    sums: Float32s
    num_rows: int
    vocab_size: int
    next_row: Counter = 0


def _sum(a: SumArguments) -> None:
    zero, padded = np.float32(0.0), room_for_tile()
    for row in v.shared(a.next_row, a.num_rows):
        logits = a.logits + row * a.vocab_size
        pad(logits, a.vocab_size, padded)
        most = v.splat(LOWEST)
        for tile in range(count_tiles(a.vocab_size)):
            values = tile_at(logits, a.vocab_size, tile, padded)
            for at in range(0, TILE_TOKENS, LANES):
                most = v.larger_or_nan(v.load(values, at), most)
        top = v.largest_or_nan_of(most)
        peak, total = v.splat(top), v.splat(zero)
        for tile in range(count_tiles(a.vocab_size)):
            values = tile_at(logits, a.vocab_size, tile, padded)
            part = v.splat(zero)  # beside a large sum, small numbers that come one by one are lost
            for at in range(0, TILE_TOKENS, LANES):
                part = part + v.exp(v.load(values, at) - peak)
            total = total + part
        a.sums[row] = top + np.log(v.sum_of(total))


sum_all = Loop(_sum, SumArguments)
"""Writes of every row the logarithm of the sum of its exponentials; the sum's order is fixed: each lane
of a tile, then the tiles, then the lanes."""


def top_rows(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``logits`` ``[num_rows, vocab_size]``, float32, contiguous: tokens and values of the ``num_top``
    largest, at least one, ``[num_rows, num_top]``. Minus infinity, token 0, where a row has fewer
    numbers."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, num_top, dtype=torch.int64)
    values = torch.empty(num_rows, num_top)
    num_threads = min(num_rows, threads_for(logits.numel()))
    heap = torch.empty(num_threads * num_top, dtype=torch.int64)
    maxima = torch.empty(num_threads * num_tiles(vocab_size) * GROUP_TOKENS)
    arguments = Arguments(logits, tokens, values, heap, maxima, num_rows, vocab_size, num_top)
    find.run(arguments, num_threads)
    return tokens, values


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Of the exponentials of each row: ``[num_rows, vocab_size]``, float32, contiguous, to
    ``[num_rows, 1]``."""
    sums = torch.empty(len(logits), 1)
    num_threads = min(len(logits), threads_for(logits.numel()))
    sum_all.run(SumArguments(logits, sums, *logits.shape), num_threads)
    return sums
