"""Compiled: the noise that a request's tokens are sampled with."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)


@njit
def _mix(z):
    z = (z ^ (z >> np.uint64(30))) * MIX1
    z = (z ^ (z >> np.uint64(27))) * MIX2
    return z ^ (z >> np.uint64(31))


@njit
def hash_of(state, counter):
    return _mix(np.uint64(state) + (np.uint64(counter) + np.uint64(1)) * GOLDEN)


@njit
def _unit(bits):
    return (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52


@njit
def gumbel(state, token):
    group = (token // 1024) * 32 + token % 32
    bits = hash_of(state, group + (1 << 40))
    arrival = -math.log1p(-_unit(bits)) / 32.0
    if np.int64(bits % np.uint64(32)) != (token // 32) % 32:
        arrival -= math.log1p(-_unit(hash_of(state, token)))
    return -math.log(arrival)
