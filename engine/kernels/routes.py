"""Which rows each expert is multiplied with, and what a row's experts add up to.

A pair is a row and one of the experts chosen for it; pairs are numbered row by row, in the order in
which experts were chosen. Products take them expert by expert: a segment is some of an expert's pairs,
one after another, and what belongs to a pair is written under its number. So where a pair stands among
others leaves no trace in what it gets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from numba import njit

from compiled.records import Counter, Int64s
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats

SEGMENT_INTS = 3
"""An expert, where its pairs begin and end in their order."""
PLACE_INTS = 3
"""Where a pair stands in the order, and where its segment begins and ends; all 0: it has none."""
MOST_PAIRS = 192
"""The most rows of a segment: their sums with a block of weights stay in the second-level cache."""


def reference_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``outputs`` ``[num_rows, chosen, features]``, ``weights`` ``[num_rows, chosen]``. Returns
    ``[num_rows, features]`` float32: experts are added in the order in which they were chosen."""
    total = torch.zeros(len(outputs), outputs.shape[2])
    for choice in range(outputs.shape[1]):
        weight = weights[:, choice, None].float()
        total = v.fma_of_tensors(outputs[:, choice].float(), weight, total)
    return total


# --- rows by experts ---


class Arguments(NamedTuple):
    """``chosen`` ``[num_pairs]``: experts; others than ``num_experts`` have no segment. ``segments``:
    their number, and the segments. ``places`` ``[num_pairs, PLACE_INTS]``; ``order`` ``[num_pairs]``:
    pairs in their order, of which ``rows`` has the rows; ``ends`` ``[num_experts]``: for what is computed
    on the way. A row has ``num_chosen`` pairs."""

    chosen: Int64s
    segments: Int64s
    places: Int64s
    order: Int64s
    rows: Int64s
    ends: Int64s
    num_pairs: int
    num_chosen: int
    num_experts: int


@njit
def _add_segments(a: Arguments, expert: int, first: int, end: int) -> None:
    num_parts = (end - first + MOST_PAIRS - 1) // MOST_PAIRS
    for part in range(num_parts):
        begin, last = v.share_of(end - first, num_parts, part)
        segment = a.segments + (1 + SEGMENT_INTS * a.segments[0])
        segment[0], segment[1], segment[2] = expert, first + begin, first + last
        for at in range(first + begin, first + last):
            place = a.places + PLACE_INTS * a.order[at]
            place[0], place[1], place[2] = at, first + begin, first + last
        a.segments[0] = a.segments[0] + 1


def _route(a: Arguments) -> None:
    for expert in range(a.num_experts):
        a.ends[expert] = 0
    for pair in range(a.num_pairs):
        if 0 <= a.chosen[pair] < a.num_experts:
            a.ends[a.chosen[pair]] = a.ends[a.chosen[pair]] + 1
        place = a.places + PLACE_INTS * pair
        place[0], place[1], place[2] = 0, 0, 0
    first = 0
    for expert in range(a.num_experts):
        count = a.ends[expert]
        a.ends[expert] = first
        first += count
    for pair in range(a.num_pairs):
        if 0 <= a.chosen[pair] < a.num_experts:
            at = a.ends[a.chosen[pair]]
            a.order[at], a.rows[at] = pair, pair // a.num_chosen
            a.ends[a.chosen[pair]] = at + 1
    for at in range(first, a.num_pairs):
        a.order[at], a.rows[at] = 0, 0
    a.segments[0] = 0
    first = 0
    for expert in range(a.num_experts):
        end = a.ends[expert]
        if end > first:
            _add_segments(a, expert, first, end)
        first = end


route_all = Kernel(_route)
"""Writes the routes, in one thread."""


class Routes(NamedTuple):
    """The routes of ``num_pairs`` pairs of a row and an expert; the tensors are as in ``Arguments``."""

    segments: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor
    num_pairs: int

    def sources(self, num_rows: int) -> torch.Tensor:
        """Returns the row that each pair reads, in their order, of so many that are the rows, or the
        pairs."""
        return self.order if num_rows == self.num_pairs else self.rows


def route(chosen: torch.Tensor, num_experts: int) -> Routes:
    """``chosen`` ``[num_rows, num_chosen]`` int64, a row's experts."""
    num_pairs = chosen.numel()
    most = 1 + SEGMENT_INTS * num_pairs
    sizes = [most, PLACE_INTS * num_pairs, num_pairs, num_pairs, num_experts]
    segments, places, order, rows, ends = torch.empty(sum(sizes), dtype=torch.int64).split(sizes)
    told = Arguments(
        chosen.contiguous(), segments, places, order, rows, ends,
        num_pairs, chosen.shape[-1], num_experts,
    )  # fmt: skip
    route_all.run(told)
    return Routes(segments, places, order, rows, num_pairs)


# --- what experts add up to ---


class SumArguments(NamedTuple):
    """``outputs``: of each pair ``num_features``, ``row`` apart; ``weights`` ``[num_rows,
    num_chosen]``; ``places`` as ``Arguments`` has them; ``total`` ``[num_rows, num_features]``."""

    outputs: Floats
    total: Floats
    weights: Float32s
    places: Int64s
    num_rows: int
    num_chosen: int
    num_features: int
    row: int
    next_row: Counter = 0


def _add_up(a: SumArguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        for at in range(0, a.num_features, LANES):
            total = v.splat(a.weights[row * a.num_chosen] * 0)
            count = min(LANES, a.num_features - at)
            for pair in range(row * a.num_chosen, (row + 1) * a.num_chosen):
                place = a.places + PLACE_INTS * pair
                if place[1] < place[2]:
                    output = a.outputs + (pair * a.row + at)
                    value = v.load(output, 0) if count == LANES else v.load_some(output, count)
                    total = v.fma(value, v.splat(a.weights[pair]), total)
            target = a.total + (row * a.num_features + at)
            if count == LANES:
                v.store(target, 0, total)
            else:
                v.store_some(target, total, count)


add_up = Kernel(_add_up)
"""Writes each row's sum."""


def weighted_sum(
    outputs: torch.Tensor, weights: torch.Tensor, routes: Routes, dtype: torch.dtype
) -> torch.Tensor:
    """``outputs`` ``[num_pairs, features]``, of which those of a pair lie together; ``weights``
    ``[num_rows, num_chosen]``. Returns ``[num_rows, features]``."""
    num_rows, num_chosen = weights.shape
    total = torch.empty(num_rows, outputs.shape[1], dtype=dtype)
    told = SumArguments(
        outputs, total, weights.float().contiguous(), routes.places, num_rows, num_chosen,
        outputs.shape[1], outputs.stride(0),
    )  # fmt: skip
    add_up.run(told, threads_for(outputs.numel()))
    return total
