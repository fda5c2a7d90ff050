"""The numbers that the noise of ``engine/sampling/noise.py`` is made of: tensors and compiled kernels
share them. And splitmix64 (Steele, Lea, Flood 2014) over Python's integers."""

from __future__ import annotations

GROUP_TOKENS = 32
TILE_TOKENS = GROUP_TOKENS * 32
"""Members of a group lie 32 ids apart within a tile of 1024 ids: group maxima of a row of logits
are then maxima over whole vectors, three times as fast as over 32 neighbours."""

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
GROUP_COUNTER = 1 << 40
"""Counters of groups start here, counters of tokens at 0: no vocabulary reaches it."""
MANTISSA_BITS = 52
UNIT = 2.0**-MANTISSA_BITS
MASK = (1 << 64) - 1


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def mixed(z: int) -> int:
    """Returns splitmix64's finaliser of an unsigned 64-bit number."""
    z = ((z ^ (z >> 30)) * MIX1) & MASK
    z = ((z ^ (z >> 27)) * MIX2) & MASK
    return z ^ (z >> 31)


def hashed(state: int, counter: int) -> int:
    """Returns splitmix64's number ``counter`` from a state: unsigned, 64 bits."""
    return mixed((state + (counter + 1) * GOLDEN) & MASK)
