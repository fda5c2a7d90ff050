"""The largest logits of a row, by a heap of as many."""

from __future__ import annotations

from numba import njit

from engine.kernels.lanes import read_float, read_int, read_int32, write_int
from engine.kernels.logit_tiles import MEMBER_BYTES, num_tiles, tile_at
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS

NO_KEY = -(1 << 63)
"""In the place of a key, where a row has fewer numbers."""
_ID_BITS = 32


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
def keep_largest(
    logits: int, vocab_size: int, count: int, padded: int, maxima: int, heap: int
) -> None:
    """The keys of the largest logits into a heap, the least of them at its root."""
    for at in range(count):
        write_int(heap + 8 * at, NO_KEY)
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
                    _sink(heap, count, 0, key)
            at += MEMBER_BYTES
            token += GROUP_TOKENS
            if token % TILE_TOKENS < GROUP_TOKENS:
                break  # the tile's last member was the one before


@njit
def sort_kept(heap: int, count: int) -> None:
    """Best first."""
    for size in range(count - 1, 0, -1):
        least = read_int(heap)
        _sink(heap, size, 0, read_int(heap + 8 * size))
        write_int(heap + 8 * size, least)


@njit(inline="always")
def token_of(key: int) -> int:
    """Not of ``NO_KEY``."""
    return (-key) & ((1 << _ID_BITS) - 1)
