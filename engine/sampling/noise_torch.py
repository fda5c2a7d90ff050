"""The noise of ``engine/sampling/noise.py`` over tensors, on any device: the same integers, the same
floats."""

from __future__ import annotations

from torch import Tensor

from compiled import noise_numbers as n

_GOLDEN_S, _MIX1_S, _MIX2_S = n.signed(n.GOLDEN), n.signed(n.MIX1), n.signed(n.MIX2)


def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32.

    ``keys``, ``positions``: int64 ``[num_rows]``; ``token_ids``: int64 ``[num_rows, k]``, or
    ``[k]`` for the same tokens in every row. Returns ``[num_rows, k]``.
    """
    states = _hash(keys, positions)[:, None]  # [num_rows, 1]
    groups = (token_ids // n.TILE_TOKENS) * n.GROUP_TOKENS + token_ids % n.GROUP_TOKENS
    members = (token_ids // n.GROUP_TOKENS) % n.GROUP_TOKENS
    bits = _hash(states, groups + n.GROUP_COUNTER)
    # The low bits of a group's hash name its earliest member, the high ones its arrival.
    later = (bits & (n.GROUP_TOKENS - 1)) != members
    arrivals = _exponential(bits) / n.GROUP_TOKENS
    return (arrivals + _exponential(_hash(states, token_ids)) * later).log_().neg_().float()


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place. Shifts of int64 drag the sign along; the masks undo
    it."""
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1_S)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2_S)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _hash(states: Tensor, counters: Tensor) -> Tensor:
    return _mix(states + (counters + 1) * _GOLDEN_S)


def _exponential(bits: Tensor) -> Tensor:
    """Exp(1) from the upper 52 bits, float64."""
    mantissa = (bits >> (64 - n.MANTISSA_BITS)).bitwise_and_((1 << n.MANTISSA_BITS) - 1)
    return mantissa.double().add_(0.5).mul_(-n.UNIT).log1p_().neg_()
