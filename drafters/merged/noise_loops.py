"""Compiled: the noise that tokens are sampled with, as ``engine/sampling/noise.py`` defines it.

A guess at a sampled token is worth more the more the noise favours it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@njit
def hash_of(state: Any, counter: int) -> Any:
    mixed = np.uint64(state) + (np.uint64(counter) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
    return mixed ^ (mixed >> np.uint64(31))


@njit
def _exponential(bits: Any) -> float:
    return -math.log1p(-(np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52)


@njit
def gumbel(state: Any, token: int) -> float:
    """Returns a token's noise; ``state``: the hash of the request's key and the position."""
    bits = hash_of(state, (token // 1024) * 32 + token % 32 + (1 << 40))
    arrival = _exponential(bits) / 32.0
    if np.int64(bits % np.uint64(32)) != (token // 32) % 32:
        arrival += _exponential(hash_of(state, token))
    return -math.log(arrival)
