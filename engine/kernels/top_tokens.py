"""The largest logits of rows, and what sums of exponentials make probabilities of them."""

from __future__ import annotations

from array import array
from enum import IntEnum

import numpy as np
import torch

from engine.kernels import LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.lanes import (
    add,
    argument,
    exp,
    fetch_add,
    larger_or_nan,
    largest_or_nan_of,
    load32,
    read_float,
    read_int,
    splat,
    sub,
    sum_of,
    write_float,
    write_int,
)
from engine.kernels.largest_logits import NO_KEY, keep_largest, sort_kept, token_of
from engine.kernels.logit_tiles import (
    LOWEST,
    MEMBER_BYTES,
    TILE_BYTES,
    find_maxima,
    num_tiles,
    pad,
    tile_at,
)

_ZERO = np.float32(0.0)


class Arg(IntEnum):
    """Numbers, and addresses: LOGITS float32 ``[num_rows, vocab_size]``; TOKENS int64 and VALUES float32
    ``[num_rows, NUM_TOP]``, or VALUES ``[num_rows]``, the results. SCRATCH_BYTES: of each worker."""

    NEXT_ROW = 0
    NUM_WORKERS = 1
    NUM_ROWS = 2
    VOCAB_SIZE = 3
    LOGITS = 4
    NUM_TOP = 5
    TOKENS = 6
    VALUES = 7
    SCRATCH = 8
    SCRATCH_BYTES = 9


def _find(p: int) -> None:
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    vocab_size, num_top = argument(p, Arg.VOCAB_SIZE), argument(p, Arg.NUM_TOP)
    padded = argument(p, Arg.SCRATCH) + worker * argument(p, Arg.SCRATCH_BYTES)
    heap = padded + TILE_BYTES
    maxima = heap + 8 * num_top
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        logits = argument(p, Arg.LOGITS) + 4 * row * vocab_size
        pad(logits, vocab_size, padded)
        for tile in range(num_tiles(vocab_size)):
            first = tile_at(logits, vocab_size, tile, padded)
            find_maxima(first, maxima + tile * MEMBER_BYTES)
        keep_largest(logits, vocab_size, num_top, padded, maxima, heap)
        sort_kept(heap, num_top)
        tokens = argument(p, Arg.TOKENS) + 8 * row * num_top
        values = argument(p, Arg.VALUES) + 4 * row * num_top
        for rank in range(num_top):
            key = read_int(heap + 8 * rank)
            token = token_of(key)
            if key == NO_KEY:  # fewer numbers than were asked for
                write_int(tokens + 8 * rank, 0)
                write_float(values + 4 * rank, np.float32(-np.inf))
            else:
                write_int(tokens + 8 * rank, token)
                write_float(values + 4 * rank, read_float(logits + 4 * token))


find = Kernel(_find, len(Arg))
"""TOKENS and VALUES of every row, best first."""


def _sum(p: int) -> None:
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    vocab_size = argument(p, Arg.VOCAB_SIZE)
    padded = argument(p, Arg.SCRATCH) + worker * argument(p, Arg.SCRATCH_BYTES)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        logits = argument(p, Arg.LOGITS) + 4 * row * vocab_size
        pad(logits, vocab_size, padded)
        most = splat(LOWEST)
        for tile in range(num_tiles(vocab_size)):
            first = tile_at(logits, vocab_size, tile, padded)
            for at in range(first, first + TILE_BYTES, 4 * LANES):
                most = larger_or_nan(load32(at), most)
        top = largest_or_nan_of(most)
        peak, total = splat(top), splat(_ZERO)
        for tile in range(num_tiles(vocab_size)):
            first = tile_at(logits, vocab_size, tile, padded)
            part = splat(_ZERO)  # beside a large sum, small numbers that come one by one are lost
            for at in range(first, first + TILE_BYTES, 4 * LANES):
                part = add(part, exp(sub(load32(at), peak)))
            total = add(total, part)
        write_float(argument(p, Arg.VALUES) + 4 * row, top + np.log(sum_of(total)))


sum_all = Kernel(_sum, len(Arg))
"""Into VALUES, of every row the logarithm of the sum of its exponentials; the sum's order is fixed: each
lane of a tile, then the tiles, then the lanes."""


def top_rows(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``logits`` ``[num_rows, vocab_size]``, float32, contiguous: tokens and values of the ``num_top``
    largest, at least one, ``[num_rows, num_top]``. Minus infinity, token 0, where a row has fewer
    numbers."""
    tokens = torch.empty(len(logits), num_top, dtype=torch.int64)
    values = torch.empty(len(logits), num_top)
    _run(find, logits, num_top, tokens.data_ptr(), values)
    return tokens, values


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Of the exponentials of each row: ``[num_rows, vocab_size]``, float32, contiguous, to
    ``[num_rows, 1]``."""
    values = torch.empty(len(logits), 1)
    _run(sum_all, logits, 0, 0, values)
    return values


def _run(
    kernel: Kernel, logits: torch.Tensor, num_top: int, tokens: int, values: torch.Tensor
) -> None:
    num_rows, vocab_size = logits.shape
    num_bytes = TILE_BYTES + 8 * num_top + num_tiles(vocab_size) * MEMBER_BYTES
    num_bytes = -(-num_bytes // 64) * 64
    num_threads = min(num_rows, threads_for(logits.numel()))
    scratch = np.empty(num_bytes * num_threads, np.uint8)
    told = array(
        "q",
        [
            *(0, 0, num_rows, vocab_size, logits.data_ptr(), num_top),
            *(tokens, values.data_ptr(), scratch.ctypes.data, num_bytes),
        ],
    )
    kernel.run(told.buffer_info()[0], num_threads)
