"""A row of logits as kernels go through it: tiles of 1024 tokens, of which token ``32 * member + group``
is a group's member, so that the largest logits of 32 groups are maxima over whole vectors."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels.lanes import larger, load32, read_float, splat, store32, write_float
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS

TILE_BYTES = 4 * TILE_TOKENS
MEMBER_BYTES = 4 * GROUP_TOKENS
"""From one member of a group to the next."""
LOWEST = np.float32(-np.inf)


@njit(inline="always")
def num_tiles(vocab_size: int) -> int:
    return (vocab_size + TILE_TOKENS - 1) // TILE_TOKENS


@njit(inline="always")
def tile_at(logits: int, vocab_size: int, tile: int, padded: int) -> int:
    """Where its logits are; ``padded``: where those of the last one are, if it is not full."""
    is_full = (tile + 1) * TILE_TOKENS <= vocab_size
    return logits + tile * TILE_BYTES if is_full else padded


@njit
def pad(logits: int, vocab_size: int, padded: int) -> None:
    """The last tokens, and nothing after them."""
    first = vocab_size // TILE_TOKENS * TILE_TOKENS
    for token in range(first, first + TILE_TOKENS):
        logit = read_float(logits + 4 * token) if token < vocab_size else LOWEST
        write_float(padded + 4 * (token - first), logit)


@njit
def find_maxima(tile: int, maxima: int) -> None:
    """The largest logit of each of a tile's groups."""
    for half in range(0, MEMBER_BYTES, 4 * LANES):
        most = splat(LOWEST)
        for member in range(0, TILE_BYTES, MEMBER_BYTES):
            most = larger(load32(tile + member + half), most)
        store32(maxima + half, most)
