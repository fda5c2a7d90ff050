"""Sums, softmax and the largest numbers of rows, which do not depend on the rows beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.records import Counter, Int64s
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Floats

_LOWEST = np.float32(-np.inf)


class Arguments(NamedTuple):
    """``rows`` ``[num_rows, num_features]``; ``output``: of each the sum over ``share``, or, of
    ``is_softmax``, as many numbers as it has."""

    rows: Floats
    output: Floats
    num_rows: int
    num_features: int
    share: float
    is_softmax: bool
    next_row: Counter = 0


@njit
def _sum(row: Any, num_features: int) -> Any:
    total = v.splat(np.float32(0.0))
    for at in range(0, num_features, LANES):
        total = total + v.load_some(row + at, min(num_features - at, LANES))
    return v.splat(v.sum_of(total))


@njit
def _power(row: Any, at: int, num_features: int, largest: Any) -> Any:
    """e to the power of what numbers are below the largest; 0 beyond the row's end."""
    some = min(num_features - at, LANES)
    return v.exp(v.keep(v.load_some(row + at, some), 0, some) - largest)


@njit
def _write_softmax(row: Any, num_features: int, output: Any) -> None:
    largest = v.splat(_LOWEST)
    for at in range(0, num_features, LANES):
        some = min(num_features - at, LANES)
        largest = v.larger_or_nan(largest, v.keep(v.load_some(row + at, some), 0, some))
    largest = v.splat(v.largest_or_nan_of(largest))
    total = v.splat(np.float32(0.0))
    for at in range(0, num_features, LANES):
        total = total + _power(row, at, num_features, largest)
    total = v.splat(v.sum_of(total))
    for at in range(0, num_features, LANES):
        share = _power(row, at, num_features, largest) / total
        v.store_some(output + at, share, min(num_features - at, LANES))


def _reduce(a: Arguments) -> None:
    for number in v.shared(a.next_row, a.num_rows):
        row = a.rows + number * a.num_features
        if a.is_softmax:
            _write_softmax(row, a.num_features, a.output + number * a.num_features)
        else:
            share = v.splat(np.float32(a.share))
            v.store_some(a.output + number, _sum(row, a.num_features) / share, 1)


reduce_all = Kernel(_reduce)


def sums(rows: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """Returns the sums of ``rows`` ``[.., num_features]``, of a type in ``KINDS`` on a CPU, over
    ``share``: ``[.., 1]``."""
    return _reduced(rows, rows.new_empty(*rows.shape[:-1], 1), share, False)


def softmax(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the softmax of ``rows`` ``[.., num_features]`` over their features."""
    return _reduced(rows, rows.new_empty(rows.shape, dtype=dtype), 1.0, True)


def _reduced(
    rows: torch.Tensor, output: torch.Tensor, share: float, is_softmax: bool
) -> torch.Tensor:
    num_features, rows = rows.shape[-1], rows.contiguous()
    num_rows = rows.numel() // num_features
    arguments = Arguments(rows, output, num_rows, num_features, share, is_softmax)
    reduce_all.run(arguments, threads_for(rows.numel()))
    return output


# --- the largest ---


class TopArguments(NamedTuple):
    """``rows`` ``[num_rows, num_features]``; ``values`` and their ``places`` ``[num_rows, num_top]``."""

    rows: Floats
    values: Floats
    places: Int64s
    num_rows: int
    num_features: int
    num_top: int
    next_row: Counter = 0


def _choose(a: TopArguments) -> None:
    for number in v.shared(a.next_row, a.num_rows):
        row = a.rows + number * a.num_features
        values, places = a.values + number * a.num_top, a.places + number * a.num_top
        for place in range(a.num_features):
            value = v.one_of(row, place)
            if place >= a.num_top and not value > v.one_of(values, a.num_top - 1):
                continue
            at = min(place, a.num_top - 1)
            while at > 0 and value > v.one_of(values, at - 1):
                v.store_some(values + at, v.splat(v.one_of(values, at - 1)), 1)
                places[at] = places[at - 1]
                at -= 1
            v.store_some(values + at, v.splat(value), 1)
            places[at] = place


choose_all = Kernel(_choose)


def largest(rows: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``num_top`` largest numbers of ``rows`` ``[.., num_features]``, at most so many, the
    largest first and of equal ones the first, and their places."""
    shape, rows = (*rows.shape[:-1], num_top), rows.contiguous()
    values, places = rows.new_empty(shape), rows.new_empty(shape, dtype=torch.int64)
    num_features = rows.shape[-1]
    num_rows = rows.numel() // num_features
    arguments = TopArguments(rows, values, places, num_rows, num_features, num_top)
    choose_all.run(arguments, threads_for(rows.numel()))
    return values, places
