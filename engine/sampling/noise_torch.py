"""The noise of ``engine/sampling/noise.py`` over tensors, on any device: the same integers, the same
floats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from engine.noise_numbers import (
    GOLDEN,
    GROUP_COUNTER,
    GROUP_TOKENS,
    MANTISSA_BITS,
    MIX1,
    MIX2,
    TILE_TOKENS,
    UNIT,
    signed,
)

_GOLDEN_S, _MIX1_S, _MIX2_S = signed(GOLDEN), signed(MIX1), signed(MIX2)


def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32.

    ``keys``, ``positions``: int64 ``[num_rows]``; ``token_ids``: int64 ``[num_rows, k]``, or
    ``[k]`` for the same tokens in every row. Returns ``[num_rows, k]``.
    """
    states = row_states(keys, positions)[:, None]  # [num_rows, 1]
    groups = (token_ids // TILE_TOKENS) * GROUP_TOKENS + token_ids % GROUP_TOKENS
    members = (token_ids // GROUP_TOKENS) % GROUP_TOKENS
    bits = _hash(states, groups + GROUP_COUNTER)
    # The low bits of a group's hash name its earliest member, the high ones its arrival.
    later = (bits & (GROUP_TOKENS - 1)) != members
    arrivals = _exponential(bits) / GROUP_TOKENS
    return (arrivals + _exponential(_hash(states, token_ids)) * later).log_().neg_().float()


def row_states(keys: Tensor, positions: Tensor) -> Tensor:
    """Where the counters of each (key, position) start: int64 ``[num_rows]``."""
    return _hash(keys, positions)


def num_groups(vocab_size: int) -> int:
    return -(-vocab_size // TILE_TOKENS) * GROUP_TOKENS


@dataclass(frozen=True, slots=True)
class GroupTable:
    """Index tables of the first ``num`` groups on one device."""

    token_ids: Tensor  # [num, 32], ascending; those of the last tile may exceed the vocabulary
    counters: (
        Tensor  # [num, 33]: what a token's hash, and last the group's, adds to the row's state
    )
    members: Tensor  # [32]


@lru_cache(maxsize=16)
def group_table(num: int, device: torch.device) -> GroupTable:
    groups = torch.arange(num, device=device)
    members = torch.arange(GROUP_TOKENS, device=device)
    first = (groups // GROUP_TOKENS) * TILE_TOKENS + groups % GROUP_TOKENS
    token_ids = first[:, None] + members * GROUP_TOKENS
    counters = torch.cat([token_ids, (groups + GROUP_COUNTER)[:, None]], dim=1)
    return GroupTable(token_ids, (counters + 1) * _GOLDEN_S, members)


def group_noise(states: Tensor, groups: Tensor, table: GroupTable) -> Tensor:
    """Noise of whole groups, ``states`` and ``groups`` ``[num]``: float32 ``[num, 32]``."""
    bits = _mix(states[:, None] + table.counters.index_select(0, groups))  # [num, 33]
    later = (bits[:, GROUP_TOKENS:] & (GROUP_TOKENS - 1)) != table.members
    arrivals = _exponential(bits)
    firsts = arrivals[:, GROUP_TOKENS:] / GROUP_TOKENS
    return (arrivals[:, :GROUP_TOKENS] * later).add_(firsts).log_().neg_().float()


def group_bounds(states: Tensor, table: GroupTable) -> Tensor:
    """No noise of group ``b`` of a row exceeds ``[row, b]``: float32 ``[num_rows, num_groups]``.

    It is the noise of the group's earliest member, in cheap arithmetic. The slack covers float32;
    the clamp keeps the arrival's error within it, at the price of a loose bound for one group in
    4096.
    """
    bits = _mix(states[:, None] + table.counters[:, GROUP_TOKENS])
    mantissa = bits.bitwise_right_shift_(64 - MANTISSA_BITS).bitwise_and_((1 << MANTISSA_BITS) - 1)
    uniform = mantissa.float().add_(0.5).mul_(-UNIT).clamp_(min=2**-12 - 1)
    return uniform.log1p_().mul_(-1 / GROUP_TOKENS).log_().neg_().add_(1e-3)


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
    mantissa = (bits >> (64 - MANTISSA_BITS)).bitwise_and_((1 << MANTISSA_BITS) - 1)
    return mantissa.double().add_(0.5).mul_(-UNIT).log1p_().neg_()
