"""Counter-based Gumbel noise ``g(key, position, token)``: the only randomness of generation.

The noise is a pure function of a request's key, the absolute position of the token to choose and a
token id, so a draft, a retry or a different batch cannot shift it (Daliri, Musco and
Suresh, arXiv 2408.07978). It is stream 0, the target's; drafters share it by :func:`gumbel_list`.

Rejection verification has three streams of its own: what drafts are sampled with, what accepts
them, and what the token after them is sampled with. A position may be drafted again in a later step
after a rejection, so they are keyed by (request, stream, step) and never used twice; and they are
separate, since a sample that shares noise with the decision it depends on is biased.

Tokens come in groups of 32. By the memorylessness of the exponential law, 32 independent
Exp(1) arrival times are one minimum ~ Exp(32) at a uniformly chosen member, and minimum + Exp(1) for
the others; ``g = -log(arrival)`` is then exactly standard Gumbel, independent over tokens. The
gain: one hash bounds the noise of a whole group, so the largest ``logit + g`` of a vocabulary is
found without computing most of the noise (``engine/kernels/gumbel_argmax.py``).

Integers come from splitmix64 (Steele, Lea, Flood 2014) on wrapping int64 and are equal on every
device and in the Python twin. Floats are computed in float64 and rounded to float32, so that the
last-place freedom of different ``log`` implementations vanishes.

This module is the definition, in plain Python; ``noise_torch.py`` computes it over tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from compiled import noise_numbers as n

STREAM_COUNTER = 1 << 41
"""Counters of a request's further streams start here: no position reaches it."""
DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = 1, 2, 3
_FLOAT32 = struct.Struct("f")


def _unit_float(bits: int) -> float:
    """Uniform in (0, 1), never 0 nor 1, finest near 0: noise reaches 36 and beyond."""
    return ((bits >> (64 - n.MANTISSA_BITS)) + 0.5) * n.UNIT


def request_key(seed: int, choice_index: int) -> int:
    """The key of one choice of a request, as a signed 64-bit integer. Any integer seed will do."""
    return n.signed(n.hashed(n.mixed(seed & n.MASK), choice_index))


def step_key(key: int, stream: int, step: int) -> int:
    """The key of one of a request's further streams in one of its steps, as ``request_key``'s.

    ``step`` counts the steps in which the request emitted, from 0.
    """
    return n.signed(n.hashed(n.hashed(key & n.MASK, STREAM_COUNTER + stream), step))


def uniform_scalar(key: int, counter: int) -> float:
    """Uniform in (0, 1), neither end included."""
    return _unit_float(n.hashed(key & n.MASK, counter))


def gumbel_list(key: int, position: int, token_ids: Sequence[int]) -> list[float]:
    """The noise of several tokens at one position, to float32 precision: for drafters that share it.

    ``position`` and ``token_ids`` are not negative.
    """
    state = n.hashed(key & n.MASK, position)
    return [_gumbel(state, token_id) for token_id in token_ids]


def _gumbel(state: int, token_id: int) -> float:
    group = (token_id // n.TILE_TOKENS) * n.GROUP_TOKENS + token_id % n.GROUP_TOKENS
    bits = n.hashed(state, group + n.GROUP_COUNTER)
    arrival = -math.log1p(-_unit_float(bits)) / n.GROUP_TOKENS
    if bits % n.GROUP_TOKENS != (token_id // n.GROUP_TOKENS) % n.GROUP_TOKENS:
        arrival -= math.log1p(-_unit_float(n.hashed(state, token_id)))
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(-math.log(arrival)))[0]
    return rounded
