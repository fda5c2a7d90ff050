"""Which token of a row wins, in one pass over its logits: what ``engine.sampling.gumbel_argmax`` defines,
without a tensor for every operation.

The noise is ``engine.sampling.noise``'s. Of each group of 32 tokens one hash bounds the noise; only
groups that could hold the winner are looked at token by token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numba import njit

from engine.kernels import LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.lanes import (
    argument,
    bits_of,
    div,
    exp,
    fetch_add,
    first_of,
    load32,
    mul,
    only_above,
    only_from,
    read_double,
    read_float,
    read_int,
    splat,
    store32,
    sub,
    whole_sum,
    write_double,
    write_float,
    write_int,
)
from engine.kernels.largest_logits import NO_KEY, keep_largest, token_of
from engine.kernels.logit_tiles import (
    LOWEST,
    MEMBER_BYTES,
    TILE_BYTES,
    find_maxima,
    num_tiles,
    pad,
    tile_at,
)
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

_GOLDEN, _MIX1, _MIX2 = signed(GOLDEN), signed(MIX1), signed(MIX2)
_MANTISSA = (1 << MANTISSA_BITS) - 1
_BIAS = 1023 + MANTISSA_BITS
_LN2 = math.log(2.0)
_SLACK = 1e-3
"""Above what the rounding to float32 adds to any noise."""
_WEIGHT_SCALE = np.float32(2.0**40)


class Arg(IntEnum):
    """Numbers, and addresses: LOGITS float32, LOGITS_ROW bytes from row to row; of each row KEYS,
    POSITIONS and TOP_KS int64 (0: all tokens), TEMPERATURES, TOP_PS and LOG_MIN_PS float64, and TOKENS,
    int64, the result. SCRATCH_BYTES: of each worker."""

    NEXT_ROW = 0
    NUM_WORKERS = 1
    NUM_ROWS = 2
    VOCAB_SIZE = 3
    LOGITS = 4
    LOGITS_ROW = 5
    KEYS = 6
    POSITIONS = 7
    TOP_KS = 8
    TEMPERATURES = 9
    TOP_PS = 10
    LOG_MIN_PS = 11
    TOKENS = 12
    SCRATCH = 13
    SCRATCH_BYTES = 14


# --- noise ---


@njit(inline="always")
def _mix(z: int) -> int:
    """The finaliser of splitmix64. Shifts of int64 drag the sign along; the masks undo it."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@njit(inline="always")
def _hash(state: int, counter: int) -> int:
    return _mix(state + (counter + 1) * _GOLDEN)


@njit(inline="always")
def _unit(bits: int) -> float:
    """From the upper 52 bits, times 2**52: within (0, 2**52)."""
    return float((bits >> (64 - MANTISSA_BITS)) & _MANTISSA) + 0.5


@njit
def _exponential(bits: int) -> float:
    return -math.log1p(-(_unit(bits) * UNIT))


@njit(inline="always")
def _most_noise(bits: int) -> float:
    """No noise of a group with this hash is larger: an arrival is at least the uniform number that it
    comes from, over 32, and a logarithm to base 2 at least the exponent plus the fraction."""
    least_log2 = float(bits_of(_unit(bits))) * UNIT - _BIAS
    return _LN2 * (5.0 - least_log2) + _SLACK


# --- bounds ---


@njit
def _bound(
    logits: int, vocab_size: int, state: int, temperature: float,
    padded: int, maxima: int, bounds: int,
) -> tuple[Any, int]:  # fmt: skip
    """Bounds of all groups' scores; returns the largest logit and the group with the best bound."""
    top, best, best_group = LOWEST, -np.inf, 0
    for tile in range(num_tiles(vocab_size)):
        first = tile * GROUP_TOKENS
        find_maxima(tile_at(logits, vocab_size, tile, padded), maxima + 4 * first)
        for group in range(first, first + GROUP_TOKENS):
            most = read_float(maxima + 4 * group)
            bound = float(most) / temperature + _most_noise(_hash(state, group + GROUP_COUNTER))
            write_double(bounds + 8 * group, bound)
            top = max(top, most)
            if bound > best:
                best, best_group = bound, group
    return top, best_group


# --- the search ---


@njit
def _best_of_group(
    tile: int, group: int, state: int, temperature: float, floor: float, best: float, token: int
) -> tuple[float, int]:
    """``best`` and ``token``, unless a token of the group beats them. The lowest token among equals."""
    bits = _hash(state, group + GROUP_COUNTER)
    first_arrival = _exponential(bits) / GROUP_TOKENS
    most_noise = float(np.float32(-math.log(first_arrival)))
    earliest = bits & (GROUP_TOKENS - 1)
    lane = group % GROUP_TOKENS
    first_token = group // GROUP_TOKENS * TILE_TOKENS + lane
    for member in range(GROUP_TOKENS):
        scaled = float(read_float(tile + member * MEMBER_BYTES + 4 * lane)) / temperature
        if scaled < floor or not scaled + most_noise >= best:
            continue
        candidate, noise = first_token + GROUP_TOKENS * member, most_noise
        if member != earliest:
            arrival = _exponential(_hash(state, candidate)) + first_arrival
            noise = float(np.float32(-math.log(arrival)))
        score = scaled + noise
        if score > best or (score == best and candidate < token):
            best, token = score, candidate
    return best, token


@njit
def _winner(
    logits: int, vocab_size: int, state: int, temperature: float, floor: float,
    first: int, padded: int, maxima: int, bounds: int,
) -> int:  # fmt: skip
    """The token with the best score among those that reach the floor; -1: none does. ``first``: the group
    to begin with."""
    tile = tile_at(logits, vocab_size, first // GROUP_TOKENS, padded)
    best, token = _best_of_group(tile, first, state, temperature, floor, -np.inf, -1)
    for group in range(num_tiles(vocab_size) * GROUP_TOKENS):
        bound = read_double(bounds + 8 * group)
        if bound < best or bound == -np.inf or group == first:
            continue
        if float(read_float(maxima + 4 * group)) / temperature < floor:
            continue
        tile = tile_at(logits, vocab_size, group // GROUP_TOKENS, padded)
        best, token = _best_of_group(tile, group, state, temperature, floor, best, token)
    return token


@njit
def _masses(
    logits: int, vocab_size: int, top: float, temperature: float, kth: float, logit: float,
    padded: int,
) -> tuple[int, int]:  # fmt: skip
    """Mass of what is not below ``kth``, and of what lies above ``logit``, in units of 2**-40 of the
    likeliest token. Sums of integers: the same in any order."""
    peak, scale, unit = splat(top), splat(np.float32(temperature)), splat(_WEIGHT_SCALE)
    limit, border = splat(kth), splat(logit)
    total = above = 0
    for tile in range(num_tiles(vocab_size)):
        first = tile_at(logits, vocab_size, tile, padded)
        for at in range(first, first + TILE_BYTES, 4 * LANES):
            value = load32(at)
            weight = mul(exp(div(sub(value, peak), scale)), unit)
            total += whole_sum(only_from(limit, value, weight))
            above += whole_sum(only_above(border, value, weight))
    return total, above


def _search(p: int) -> None:
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    vocab_size = argument(p, Arg.VOCAB_SIZE)
    num_groups = num_tiles(vocab_size) * GROUP_TOKENS
    padded = argument(p, Arg.SCRATCH) + worker * argument(p, Arg.SCRATCH_BYTES)
    maxima = padded + TILE_BYTES
    bounds = maxima + 4 * num_groups
    heap = bounds + 8 * num_groups
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        logits = argument(p, Arg.LOGITS) + row * argument(p, Arg.LOGITS_ROW)
        temperature = read_double(argument(p, Arg.TEMPERATURES) + 8 * row)
        top_k = read_int(argument(p, Arg.TOP_KS) + 8 * row)
        top_p = read_double(argument(p, Arg.TOP_PS) + 8 * row)
        state = _hash(
            read_int(argument(p, Arg.KEYS) + 8 * row),
            read_int(argument(p, Arg.POSITIONS) + 8 * row),
        )
        pad(logits, vocab_size, padded)
        top, first = _bound(logits, vocab_size, state, temperature, padded, maxima, bounds)
        kth = LOWEST
        if 0 < top_k < vocab_size:
            keep_largest(logits, vocab_size, top_k, padded, maxima, heap)
            least = read_int(heap)
            if least != NO_KEY:
                kth = read_float(logits + 4 * token_of(least))
        floor = max(
            float(kth) / temperature,
            float(top) / temperature + read_double(argument(p, Arg.LOG_MIN_PS) + 8 * row),
        )
        while True:
            token = _winner(
                logits, vocab_size, state, temperature, floor, first, padded, maxima, bounds
            )
            if token < 0 or top_p >= 1.0:
                break
            logit = read_float(logits + 4 * token)
            # Nothing lies above the largest logit, so it needs no sum.
            if not logit < top:
                break
            total, above = _masses(logits, vocab_size, top, temperature, kth, logit, padded)
            if not float(above) >= top_p * float(total):
                break
            # Only what lies above this logit may still win.
            floor = max(floor, float(np.nextafter(logit, np.float32(np.inf))) / temperature)
        write_int(argument(p, Arg.TOKENS) + 8 * row, max(token, 0))


search = Kernel(_search, len(Arg))
"""The winner of every row."""


def search_rows(
    logits: torch.Tensor,
    keys: np.ndarray,
    positions: np.ndarray,
    limits: Sequence[tuple[float, float, float, int]],
) -> torch.Tensor:
    """The winning tokens, int64 ``[num_rows]``; 0 where no logit is finite.

    ``logits`` ``[num_rows, vocab_size]``, float32, contiguous; ``keys`` and ``positions`` int64
    ``[num_rows]``; ``limits``: of each row temperature, top-p, min-p, top-k.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    numbers = np.array(
        [
            [temperature, top_p, math.log(min_p) if min_p else -math.inf]
            for temperature, top_p, min_p, _ in limits
        ]
    ).T.copy()
    top_ks = np.array([k for *_, k in limits], np.int64)
    num_groups = num_tiles(vocab_size) * GROUP_TOKENS
    num_floats = TILE_TOKENS + 3 * num_groups + 2 * int(top_ks.max(initial=0))
    num_floats = -(-num_floats // LANES) * LANES
    num_threads = min(num_rows, threads_for(logits.numel()))
    scratch = np.empty(num_floats * num_threads, np.float32)
    told = array(
        "q",
        [
            *(0, 0, num_rows, vocab_size, logits.data_ptr(), 4 * vocab_size),
            *(each.ctypes.data for each in (keys, positions, top_ks, *numbers)),
            *(tokens.data_ptr(), scratch.ctypes.data, 4 * num_floats),
        ],
    )
    search.run(told.buffer_info()[0], num_threads)
    return tokens


# --- weights, for who needs them as a table ---


class WeighArg(IntEnum):
    """VALUES float32 ``[num_rows, num_tokens]``, in place; of each row TOPS float32, TEMPERATURES
    float64."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    NUM_TOKENS = 2
    VALUES = 3
    TOPS = 4
    TEMPERATURES = 5


def _weigh(p: int) -> None:
    num_tokens = argument(p, WeighArg.NUM_TOKENS)
    unit = splat(_WEIGHT_SCALE)
    while True:
        row = fetch_add(p + 8 * WeighArg.NEXT_ROW, 1)
        if row >= argument(p, WeighArg.NUM_ROWS):
            break
        values = argument(p, WeighArg.VALUES) + 4 * num_tokens * row
        peak = splat(read_float(argument(p, WeighArg.TOPS) + 4 * row))
        scale = splat(np.float32(read_double(argument(p, WeighArg.TEMPERATURES) + 8 * row)))
        at, end = values, values + 4 * num_tokens
        while at + 4 * LANES <= end:
            store32(at, mul(exp(div(sub(load32(at), peak), scale)), unit))
            at += 4 * LANES
        while at < end:
            weight = mul(exp(div(sub(splat(read_float(at)), peak), scale)), unit)
            write_float(at, first_of(weight))
            at += 4


weigh = Kernel(_weigh, len(WeighArg))
"""The weights that ``search`` sums, of all tokens."""


def weigh_rows(
    values: torch.Tensor, tops: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """``values`` float32 ``[num_rows, num_tokens]``, contiguous, none above its row's ``tops`` float32
    ``[num_rows, 1]``; ``temperatures`` float64 ``[num_rows, 1]``. In place."""
    tops, temperatures = tops.contiguous(), temperatures.contiguous()
    addresses = (each.data_ptr() for each in (values, tops, temperatures))
    told = array("q", [0, *values.shape, *addresses])
    weigh.run(told.buffer_info()[0], threads_for(values.numel()))
    return values
