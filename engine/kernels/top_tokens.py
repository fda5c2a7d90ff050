"""The largest logits of rows, and what sums of exponentials make probabilities of them."""

from __future__ import annotations

from array import array
from enum import IntEnum

import numpy as np
import torch
from numba import njit

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
    read_int32,
    splat,
    sub,
    sum_of,
    write_float,
    write_int,
)
from engine.kernels.logit_tiles import (
    LOWEST,
    MEMBER_BYTES,
    TILE_BYTES,
    find_maxima,
    num_tiles,
    pad,
    tile_at,
)
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS

_ZERO = np.float32(0.0)
_LEAST = -(1 << 63)
_ID_BITS = 32


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


# --- a heap of the k best, the least of them at its root ---


@njit(inline="always")
def _key(address: int, token: int) -> int:
    """An integer that orders logits, and among equal ones the lowest token as largest."""
    bits = read_int32(address)
    if bits == -(1 << 31):  # there are two zeros, of one value
        bits = 0
    if bits < 0:
        bits = bits ^ 0x7FFFFFFF
    return (bits << _ID_BITS) - token


@njit
def _sink(heap: int, size: int, at: int, key: int) -> None:
    """Put ``key`` at the place ``at`` or below it, in a heap of which ``size`` keys are left."""
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and read_int(heap + 8 * child + 8) < read_int(heap + 8 * child):
            child += 1
        if read_int(heap + 8 * child) >= key:
            break
        write_int(heap + 8 * at, read_int(heap + 8 * child))
        at = child
    write_int(heap + 8 * at, key)


@njit
def _collect(
    logits: int, vocab_size: int, num_top: int, padded: int, maxima: int, heap: int
) -> None:
    """The keys of the largest logits, best first."""
    for at in range(num_top):
        write_int(heap + 8 * at, _LEAST)
    for group in range(num_tiles(vocab_size) * GROUP_TOKENS):
        # Of equal logits every token may be the one with the lowest number.
        if _key(maxima + 4 * group, 0) < read_int(heap):
            continue
        at = tile_at(logits, vocab_size, group // GROUP_TOKENS, padded)
        at += 4 * (group % GROUP_TOKENS)
        token = group // GROUP_TOKENS * TILE_TOKENS + group % GROUP_TOKENS
        while token < vocab_size:
            value = read_float(at)
            if value == value:
                key = _key(at, token)
                if key > read_int(heap):
                    _sink(heap, num_top, 0, key)
            at += MEMBER_BYTES
            token += GROUP_TOKENS
            if token % TILE_TOKENS < GROUP_TOKENS:
                break  # the tile's last member was the one before
    for size in range(num_top - 1, 0, -1):
        least = read_int(heap)
        _sink(heap, size, 0, read_int(heap + 8 * size))
        write_int(heap + 8 * size, least)


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
        _collect(logits, vocab_size, num_top, padded, maxima, heap)
        tokens = argument(p, Arg.TOKENS) + 8 * row * num_top
        values = argument(p, Arg.VALUES) + 4 * row * num_top
        for rank in range(num_top):
            key = read_int(heap + 8 * rank)
            token = (-key) & ((1 << _ID_BITS) - 1)
            if key == _LEAST:  # fewer numbers than were asked for
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
            for at in range(first, first + TILE_BYTES, 4 * LANES):
                total = add(total, exp(sub(load32(at), peak)))
        write_float(argument(p, Arg.VALUES) + 4 * row, top + np.log(sum_of(total)))


sum_all = Kernel(_sum, len(Arg))
"""Into VALUES, of every row the logarithm of the sum of its exponentials; the sum's order is fixed."""


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
