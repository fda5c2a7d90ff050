"""The noise of ``engine/sampling/noise.py`` in compiled code: for kernels that sample, and for drafters.
A guess at a sampled token is worth more the more the noise favours it."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from compiled import noise_numbers as n

_GOLDEN, _MIX1, _MIX2 = n.signed(n.GOLDEN), n.signed(n.MIX1), n.signed(n.MIX2)
_MANTISSA = (1 << n.MANTISSA_BITS) - 1


@njit(inline="always")
def hash_of(state: int, counter: int) -> int:
    """Returns splitmix64's number. Shifts of int64 drag the sign along; the masks undo it."""
    z = state + (counter + 1) * _GOLDEN
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@njit(inline="always")
def unit_of(bits: int) -> float:
    """From the upper 52 bits, times 2**52: within (0, 2**52)."""
    return float((bits >> (64 - n.MANTISSA_BITS)) & _MANTISSA) + 0.5


@njit
def exponential_of(bits: int) -> float:
    return -math.log1p(-(unit_of(bits) * n.UNIT))


@njit
def noise_of(state: int, token: int) -> float:
    """The noise of one token; ``state``: the hash of the request's key and the position."""
    group = token // n.TILE_TOKENS * n.GROUP_TOKENS + token % n.GROUP_TOKENS
    bits = hash_of(state, group + n.GROUP_COUNTER)
    arrival = exponential_of(bits) / n.GROUP_TOKENS
    if token // n.GROUP_TOKENS % n.GROUP_TOKENS != bits & (n.GROUP_TOKENS - 1):
        arrival += exponential_of(hash_of(state, token))
    return float(np.float32(-math.log(arrival)))
