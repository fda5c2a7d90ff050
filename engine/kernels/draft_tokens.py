"""Which tokens a draft model's rows suggest, in one pass over their logits: what
``engine.drafting.draft_model`` defines, without a tensor for every operation.

A greedy row suggests its largest logits. A sampled one has the noise of its position added to the
log-probabilities of its likeliest tokens, and suggests the best sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.noise import hash_of, noise_of
from compiled.noise_numbers import GROUP_TOKENS
from compiled.records import Counter, Float64s, Int64s
from engine.kernels import lanes as v
from engine.kernels import threads_for
from engine.kernels.compiled import Kernel
from engine.kernels.records import NOWHERE, Float32s
from engine.kernels.top_tokens import (
    NO_KEY,
    count_tiles,
    find_maxima,
    keep_largest,
    num_tiles,
    pad,
    room_for_tile,
    sort_kept,
    sum_row,
    tile_at,
    token_of,
)


def reference(
    logits: np.ndarray, noise: np.ndarray | None, temperature: float, num_likeliest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns of one row, best first, and how sure each is. ``noise``: of the columns; None:
    the row is greedy. Only the ``num_likeliest`` take part in a row with noise."""
    order = np.argsort(-logits, kind="stable")
    if noise is None:
        scores = logits.astype(np.float64)
    else:
        order = order[:num_likeliest]
        scaled = logits[order].astype(np.float64) / temperature
        scores = scaled - np.logaddexp.reduce(scaled) + noise[order]
        best = np.argsort(-scores, kind="stable")
        return order[best], np.exp(scores[best] - np.logaddexp.reduce(scores))
    return order, np.exp(scores[order] - np.logaddexp.reduce(scores))


class Arguments(NamedTuple):
    """``logits`` ``[num_rows, num_columns]``; ``token_map`` ``[num_columns]`` (or NOWHERE): the token of
    each column; of each row ``keys``, ``positions`` and ``temperatures`` (0: greedy); ``tokens`` and
    ``shares`` ``[num_rows, num_wanted]``, the results; of each worker ``heap`` and ``scores``
    ``[num_likeliest]``, ``maxima`` of its row's groups."""

    logits: Float32s
    token_map: Int64s
    keys: Int64s
    positions: Int64s
    temperatures: Float64s
    tokens: Int64s
    shares: Float64s
    heap: Int64s
    scores: Float64s
    maxima: Float32s
    num_rows: int
    num_columns: int
    num_wanted: int
    num_likeliest: int
    next_row: Counter = 0
    num_workers: Counter = 0


@njit
def _mapped(a: Arguments, column: int) -> int:
    return column if v.is_none(a.token_map) else a.token_map[column]


@njit
def _log_sum(values: Any, count: int) -> float:
    most = -np.inf
    for at in range(count):
        most = max(most, values[at])
    total = 0.0
    for at in range(count):
        total += math.exp(values[at] - most)
    return most + math.log(total)


@njit
def _suggest_likeliest(a: Arguments, row: int, logits: Any, heap: Any, padded: Any) -> None:
    """``heap``: sorted."""
    whole = float(sum_row(logits, a.num_columns, padded))
    for rank in range(a.num_wanted):
        at = row * a.num_wanted + rank
        is_missing = heap[rank] == NO_KEY  # fewer numbers than were asked for
        column = 0 if is_missing else token_of(heap[rank])
        a.tokens[at] = _mapped(a, column)
        a.shares[at] = 0.0 if is_missing else math.exp(float(logits[column]) - whole)


@njit
def _score(a: Arguments, row: int, logits: Any, heap: Any, scores: Any) -> int:
    """Writes the scores of the columns in the heap. Returns how many there are."""
    count = 0
    while count < a.num_likeliest and heap[count] != NO_KEY:
        scores[count] = float(logits[token_of(heap[count])]) / a.temperatures[row]
        count += 1
    whole, state = _log_sum(scores, count), hash_of(a.keys[row], a.positions[row])
    for at in range(count):
        noise = noise_of(state, _mapped(a, token_of(heap[at])))
        scores[at] = scores[at] - whole + noise
    return count


@njit
def _suggest_best(a: Arguments, row: int, logits: Any, heap: Any, scores: Any) -> None:
    """``heap``: sorted. A score that was suggested is taken out."""
    count = _score(a, row, logits, heap, scores)
    whole = _log_sum(scores, count)
    for rank in range(a.num_wanted):
        best = 0
        for at in range(count):
            if scores[at] > scores[best]:
                best = at
        place, is_missing = row * a.num_wanted + rank, rank >= count
        a.tokens[place] = _mapped(a, 0 if is_missing else token_of(heap[best]))
        a.shares[place] = 0.0 if is_missing else math.exp(scores[best] - whole)
        scores[best] = -np.inf


def _suggest(a: Arguments) -> None:
    worker, num_groups = v.fetch_add(a.num_workers, 1), count_tiles(a.num_columns) * GROUP_TOKENS
    heap, scores = a.heap + worker * a.num_likeliest, a.scores + worker * a.num_likeliest
    maxima, padded = a.maxima + worker * num_groups, room_for_tile()
    for row in v.shared(a.next_row, a.num_rows):
        logits, is_greedy = a.logits + row * a.num_columns, a.temperatures[row] == 0.0
        count = a.num_wanted if is_greedy else a.num_likeliest
        pad(logits, a.num_columns, padded)
        for tile in range(count_tiles(a.num_columns)):
            find_maxima(tile_at(logits, a.num_columns, tile, padded), maxima + tile * GROUP_TOKENS)
        keep_largest(logits, a.num_columns, count, maxima, heap)
        sort_kept(heap, count)
        if is_greedy:
            _suggest_likeliest(a, row, logits, heap, padded)
        else:
            _suggest_best(a, row, logits, heap, scores)


suggest = Kernel(_suggest)
"""Writes tokens and shares of every row, best first."""


class RowNoise(NamedTuple):
    """The key and position of a row's noise, and its temperature; 0: it is greedy."""

    key: int
    position: int
    temperature: float


def suggest_rows(
    logits: torch.Tensor,
    rows: Sequence[RowNoise],
    num_wanted: int,
    num_likeliest: int,
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens that each row suggests, best first, int64 ``[num_rows, num_wanted]``, and how
    sure it is of each, float64; where there are fewer, the rest has a share of 0.

    ``logits`` float32 ``[num_rows, num_columns]``, contiguous; ``token_map`` int64 ``[num_columns]``:
    their tokens, None: the columns. Sampled rows suggest some of their ``num_likeliest`` columns.
    """
    num_rows, num_columns = logits.shape
    num_wanted = min(num_wanted, num_columns)
    num_likeliest = min(max(num_wanted, num_likeliest), num_columns)
    num_threads = min(num_rows, threads_for(logits.numel()))
    tokens = torch.empty(num_rows, num_wanted, dtype=torch.int64)
    shares = torch.empty(num_rows, num_wanted, dtype=torch.float64)
    keys, positions, temperatures = zip(*rows, strict=True)
    told = Arguments(
        logits,
        NOWHERE if token_map is None else token_map,
        torch.tensor(keys),
        torch.tensor(positions),
        torch.tensor(temperatures, dtype=torch.float64),
        tokens,
        shares,
        torch.empty(num_threads * num_likeliest, dtype=torch.int64),
        torch.empty(num_threads * num_likeliest, dtype=torch.float64),
        torch.empty(num_threads * num_tiles(num_columns) * GROUP_TOKENS),
        num_rows,
        num_columns,
        num_wanted,
        num_likeliest,
    )
    suggest.run(told, num_threads)
    return tokens, shares
