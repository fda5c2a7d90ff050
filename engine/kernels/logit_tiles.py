"""A row of logits as kernels go through it: tiles of 1024 tokens, of which token ``32 * member + group``
is a group's member, so that the largest logits of 32 groups are maxima over whole vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS

LOWEST = np.float32(-np.inf)


def num_tiles(vocab_size: int) -> int:
    return (vocab_size + TILE_TOKENS - 1) // TILE_TOKENS


count_tiles = njit(num_tiles)
room_for_tile = v.room_for(TILE_TOKENS)
"""Where ``pad`` leaves a row's last tile."""


@njit(inline="always")
def tile_at(logits: Any, vocab_size: int, tile: int, padded: Any) -> Any:
    """Where its logits are; ``padded``: where those of the last one are, if it is not full."""
    return logits + tile * TILE_TOKENS if (tile + 1) * TILE_TOKENS <= vocab_size else padded


@njit
def pad(logits: Any, vocab_size: int, padded: Any) -> None:
    """The last tokens, and nothing after them."""
    first = vocab_size // TILE_TOKENS * TILE_TOKENS
    for token in range(first, first + TILE_TOKENS):
        padded[token - first] = logits[token] if token < vocab_size else LOWEST


@njit
def find_maxima(tile: Any, maxima: Any) -> None:
    """The largest logit of each of a tile's groups."""
    for group in range(0, GROUP_TOKENS, LANES):
        most = v.splat(LOWEST)
        for member in range(0, TILE_TOKENS, GROUP_TOKENS):
            most = v.larger(v.load(tile, member + group), most)
        v.store(maxima, group, most)
