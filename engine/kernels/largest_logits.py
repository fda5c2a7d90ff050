"""The largest logits of a row, by a heap of as many."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels import lanes as v
from engine.kernels.logit_tiles import count_tiles, tile_at
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS

NO_KEY = -(1 << 63)
"""In the place of a key, where a row has fewer numbers."""
_ID_BITS = 32


@njit(inline="always")
def _key(logits: Any, at: int, token: int) -> int:
    """An integer that orders logits, and among equal ones the lowest token as largest."""
    bits: Any = np.int64(v.int32s(logits)[at])
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
def keep_largest(
    logits: Any, vocab_size: int, count: int, padded: Any, maxima: Any, heap: Any
) -> None:
    """The keys of the largest logits into a heap, the least of them at its root."""
    for at in range(count):
        heap[at] = NO_KEY
    for group in range(count_tiles(vocab_size) * GROUP_TOKENS):
        # Of equal logits every token may be the one with the lowest number.
        if _key(maxima, group, 0) < heap[0]:
            continue
        tile = tile_at(logits, vocab_size, group // GROUP_TOKENS, padded)
        first = group // GROUP_TOKENS * TILE_TOKENS
        for at in range(group % GROUP_TOKENS, TILE_TOKENS, GROUP_TOKENS):
            if first + at >= vocab_size:
                break
            value = tile[at]
            if value == value:
                key = _key(tile, at, first + at)
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
