"""Which token of a row wins, in one pass over its logits: what ``engine.sampling.sampler`` defines,
without a tensor for every operation.

The noise is ``engine.sampling.noise``'s. Of each group of 32 tokens one hash bounds the noise; only
groups that could hold the winner are looked at token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled import noise_numbers as n
from compiled.noise import exponential_of, hash_of, unit_of
from compiled.records import Counter, Float64s, Int64s
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats
from engine.kernels.top_tokens import (
    LOWEST,
    NO_KEY,
    count_tiles,
    find_maxima,
    keep_largest,
    num_tiles,
    pad,
    room_for_tile,
    tile_at,
    token_of,
)


def reference(
    logits: np.ndarray,
    noise: np.ndarray,
    temperature: float,
    top_p: float,
    min_p: float,
    top_k: int,
) -> int:
    """Returns the winner among a row's ``logits``, float32, with the ``noise`` of its tokens. Of the
    best score down, the first token that is among the ``top_k`` largest, whose probability is at least
    ``min_p`` times the largest, and above which less than ``top_p`` of the ``top_k`` lies."""
    scaled = logits.astype(np.float64) / temperature
    kth = np.sort(logits)[-top_k] if 0 < top_k < len(logits) else LOWEST
    floor = max(float(kth) / temperature, scaled.max() + (math.log(min_p) if min_p else -math.inf))
    weights = np.where(logits >= kth, np.exp(scaled - scaled.max()), 0.0)
    for token in np.argsort(-(scaled + noise), kind="stable"):
        above = weights[logits > logits[token]].sum()
        if scaled[token] >= floor and (above == 0 or above < top_p * weights.sum()):
            return int(token)
    return 0


_BIAS = 1023 + n.MANTISSA_BITS
_LN2 = math.log(2.0)
_SLACK = 1e-3
"""Above what the rounding to float32 adds to any noise."""
_WEIGHT_SCALE = np.float32(2.0**40)


class Arguments(NamedTuple):
    """``logits`` ``[num_rows, vocab_size]``; of each row ``keys``, ``positions``, ``top_ks`` (0: all
    tokens), ``limits`` (temperature, top-p, logarithm of min-p) and ``tokens``, the result; of each
    worker ``maxima`` and ``bounds`` of its row's groups, and ``heap`` ``[most_kept]``."""

    logits: Floats
    keys: Int64s
    positions: Int64s
    top_ks: Int64s
    limits: Float64s
    tokens: Int64s
    maxima: Float32s
    bounds: Float64s
    heap: Int64s
    num_rows: int
    vocab_size: int
    most_kept: int
    next_row: Counter = 0
    num_workers: Counter = 0


@njit(inline="always")
def _most_noise(bits: int) -> float:
    """No noise of a group with this hash is larger: an arrival is at least the uniform number that it
    comes from, over 32, and a logarithm to base 2 at least the exponent plus the fraction."""
    least_log2 = float(v.bits_of(unit_of(bits))) * n.UNIT - _BIAS
    return _LN2 * (5.0 - least_log2) + _SLACK


# --- bounds ---


class _Row(NamedTuple):
    """A row that is searched, and what is known of it: ``state``, what its noise is hashed from; its last
    tile ``padded``; ``maxima`` and ``bounds``: of its groups the largest logit, and of scores."""

    logits: Any
    vocab_size: int
    state: int
    temperature: float
    padded: Any
    maxima: Any
    bounds: Any


@njit(inline="always")
def _tile(row: _Row, tile: int) -> Any:
    return tile_at(row.logits, row.vocab_size, tile, row.padded)


@njit
def _bound(row: _Row) -> tuple[Any, int]:
    """Bounds of all groups' scores; returns the largest logit and the group with the best bound."""
    top, best, best_group = LOWEST, -np.inf, 0
    for tile in range(count_tiles(row.vocab_size)):
        first = tile * n.GROUP_TOKENS
        find_maxima(_tile(row, tile), row.maxima + first)
        for group in range(first, first + n.GROUP_TOKENS):
            most, bits = row.maxima[group], hash_of(row.state, group + n.GROUP_COUNTER)
            bound = float(most) / row.temperature + _most_noise(bits)
            row.bounds[group] = bound
            top = max(top, most)
            if bound > best:
                best, best_group = bound, group
    return top, best_group


# --- the search ---


@njit
def _best_of_group(
    row: _Row, group: int, floor: float, best: float, token: int
) -> tuple[float, int]:
    """``best`` and ``token``, unless a token of the group beats them. The lowest token among equals."""
    bits = hash_of(row.state, group + n.GROUP_COUNTER)
    first_arrival = exponential_of(bits) / n.GROUP_TOKENS
    most_noise = float(np.float32(-math.log(first_arrival)))
    earliest, lane = bits & (n.GROUP_TOKENS - 1), group % n.GROUP_TOKENS
    tile = group // n.GROUP_TOKENS
    logits, first_token = _tile(row, tile), tile * n.TILE_TOKENS
    for member in range(n.GROUP_TOKENS):
        at = member * n.GROUP_TOKENS + lane
        scaled = float(v.one_of(logits, at)) / row.temperature
        if scaled < floor or not scaled + most_noise >= best:
            continue
        candidate, noise = first_token + at, most_noise
        if member != earliest:
            arrival = exponential_of(hash_of(row.state, candidate)) + first_arrival
            noise = float(np.float32(-math.log(arrival)))
        score = scaled + noise
        if score > best or (score == best and candidate < token):
            best, token = score, candidate
    return best, token


@njit
def _winner(row: _Row, floor: float, first: int) -> int:
    """The token with the best score among those that reach the floor; -1: none does. ``first``: the group
    to begin with."""
    best, token = _best_of_group(row, first, floor, -np.inf, -1)
    for group in range(count_tiles(row.vocab_size) * n.GROUP_TOKENS):
        bound = row.bounds[group]
        if bound < best or bound == -np.inf or group == first:
            continue
        if float(row.maxima[group]) / row.temperature >= floor:
            best, token = _best_of_group(row, group, floor, best, token)
    return token


@njit
def _masses(row: _Row, top: float, kth: float, logit: float) -> tuple[int, int]:
    """Mass of what is not below ``kth``, and of what lies above ``logit``, in units of 2**-40 of the
    likeliest token. Sums of integers: the same in any order."""
    peak, scale, unit = v.splat(top), v.splat(np.float32(row.temperature)), v.splat(_WEIGHT_SCALE)
    limit, border = v.splat(kth), v.splat(logit)
    total = above = 0
    for tile in range(count_tiles(row.vocab_size)):
        logits = _tile(row, tile)
        for at in range(0, n.TILE_TOKENS, LANES):
            value = v.load(logits, at)
            weight = v.exp((value - peak) / scale) * unit
            total += v.whole_sum(v.only_from(limit, value, weight))
            above += v.whole_sum(v.only_above(border, value, weight))
    return total, above


@njit
def _kth_largest(row: _Row, top_k: int, heap: Any) -> Any:
    """The least logit that is among the ``top_k`` largest."""
    if not 0 < top_k < row.vocab_size:
        return LOWEST
    keep_largest(row.logits, row.vocab_size, top_k, row.maxima, heap)
    return LOWEST if heap[0] == NO_KEY else v.one_of(row.logits, token_of(heap[0]))


@njit
def _search_row(row: _Row, top_p: float, log_min_p: float, top_k: int, heap: Any) -> int:
    top, first = _bound(row)
    kth = _kth_largest(row, top_k, heap)
    floor = max(float(kth) / row.temperature, float(top) / row.temperature + log_min_p)
    while True:
        token = _winner(row, floor, first)
        if token < 0 or top_p >= 1.0:
            return token
        logit = v.one_of(row.logits, token)
        # Nothing lies above the largest logit, so it needs no sum.
        if not logit < top:
            return token
        total, above = _masses(row, top, kth, logit)
        if not float(above) >= top_p * float(total):
            return token
        # Only what lies above this logit may still win.
        floor = max(floor, float(np.nextafter(logit, np.float32(np.inf))) / row.temperature)


def _search(a: Arguments) -> None:
    worker, num_groups = v.fetch_add(a.num_workers, 1), count_tiles(a.vocab_size) * n.GROUP_TOKENS
    padded = v.as_elements_of(a.logits, room_for_tile())
    heap = a.heap + worker * a.most_kept
    maxima, bounds = a.maxima + worker * num_groups, a.bounds + worker * num_groups
    for index in v.shared(a.next_row, a.num_rows):
        logits = a.logits + index * a.vocab_size
        state = hash_of(a.keys[index], a.positions[index])
        limits = a.limits + 3 * index
        temperature, top_p, log_min_p = limits[0], limits[1], limits[2]
        row = _Row(logits, a.vocab_size, state, temperature, padded, maxima, bounds)
        pad(logits, a.vocab_size, padded)
        token = _search_row(row, top_p, log_min_p, a.top_ks[index], heap)
        a.tokens[index] = max(token, 0)


search = Kernel(_search)
"""Writes the winner of every row."""


def search_rows(
    logits: torch.Tensor,
    keys: np.ndarray,
    positions: np.ndarray,
    limits: Sequence[tuple[float, float, float, int]],
) -> torch.Tensor:
    """The winning tokens, int64 ``[num_rows]``; 0 where no logit is finite.

    ``logits`` ``[num_rows, vocab_size]``, floats, contiguous; ``keys`` and ``positions`` int64
    ``[num_rows]``; ``limits``: of each row temperature, top-p, min-p, top-k.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    top_ks = np.array([top_k for *_, top_k in limits], np.int64)
    numbers = np.array(
        [
            (temperature, top_p, math.log(min_p) if min_p else -math.inf)
            for temperature, top_p, min_p, _ in limits
        ]
    )
    num_threads = min(num_rows, threads_for(logits.numel()))
    num_groups = num_threads * num_tiles(vocab_size) * n.GROUP_TOKENS
    most_kept = int(top_ks.max(initial=0))
    maxima, bounds = torch.empty(num_groups), torch.empty(num_groups, dtype=torch.float64)
    heap = torch.empty(num_threads * most_kept, dtype=torch.int64)
    arguments = Arguments(
        logits=logits,
        keys=torch.from_numpy(keys),
        positions=torch.from_numpy(positions),
        top_ks=torch.from_numpy(top_ks),
        limits=torch.from_numpy(numbers),
        tokens=tokens,
        maxima=maxima,
        bounds=bounds,
        heap=heap,
        num_rows=num_rows,
        vocab_size=vocab_size,
        most_kept=most_kept,
    )
    search.run(arguments, num_threads)
    return tokens


# --- weights, for who needs them as a table ---


class WeighArguments(NamedTuple):
    """``values`` ``[num_rows, num_tokens]``, in place; of each row ``tops`` and ``temperatures``."""

    values: Float32s
    tops: Float32s
    temperatures: Float64s
    num_rows: int
    num_tokens: int
    next_row: Counter = 0


def _weigh(a: WeighArguments) -> None:
    unit = v.splat(_WEIGHT_SCALE)
    for row in v.shared(a.next_row, a.num_rows):
        values = a.values + a.num_tokens * row
        peak, scale = v.splat(a.tops[row]), v.splat(np.float32(a.temperatures[row]))
        whole = a.num_tokens // LANES * LANES
        for at in range(0, whole, LANES):
            v.store(values, at, v.exp((v.load(values, at) - peak) / scale) * unit)
        for at in range(whole, a.num_tokens):
            values[at] = v.first_of(v.exp((v.splat(values[at]) - peak) / scale) * unit)


weigh = Kernel(_weigh)
"""Writes the weights that ``search`` sums, of all tokens."""


def weigh_rows(
    values: torch.Tensor, tops: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """``values`` float32 ``[num_rows, num_tokens]``, contiguous, none above its row's ``tops`` float32
    ``[num_rows, 1]``; ``temperatures`` float64 ``[num_rows, 1]``. In place."""
    arguments = WeighArguments(values, tops.contiguous(), temperatures.contiguous(), *values.shape)
    weigh.run(arguments, threads_for(values.numel()))
    return values
