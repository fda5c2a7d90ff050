"""Products with adapters of low rank (Hu et al. 2021, "LoRA"), each row with its own request's, added to
what a layer has computed.

A row's sums run over its features, then over the rank, in one order and in fp32, and are rounded once
with what they are added to: its bits depend on the row, the layer's product and the adapter alone. Which
rows have adapters is read when the kernel runs: they name the memory of theirs, which may change from
step to step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from compiled.records import Counter, address_of, record_of
from engine.kernels import LANES, MOST_RANK, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats, words

_AT_ONCE = 4
"""Sums that go on side by side; ranks are filled up to a multiple of it."""


def reference(
    rows: torch.Tensor, output: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """Returns ``output`` ``[num_rows, out_features]`` plus ``rows`` ``[num_rows, in_features]`` times
    ``first`` ``[rank, in_features]`` times ``second`` ``[out_features, rank]``, but for the order of
    sums."""
    return (output.float() + rows.float() @ first.T @ second.T).to(output.dtype)


class Place(NamedTuple):
    """An adapter's part in one layer: ``first`` ``[rank, in_features]``; ``second`` ``[blocks, rank,
    16]`` of channels. Without it ``rank`` is 0."""

    first: Float32s
    second: Float32s
    rank: int


class RowAdapter(NamedTuple):
    """``places``: those of all layers, of the row's adapter; NOWHERE: it has none."""

    places: Sequence[Place]


class Arguments(NamedTuple):
    """``rows`` ``[num_rows, in_features]`` and ``output`` ``[num_rows, out_features]``, whose rows are
    ``row`` and ``output_row`` floats apart; ``adapters``: of the rows; ``place``: the layer's."""

    rows: Floats
    output: Floats
    adapters: Annotated[Any, record_of(RowAdapter)]
    num_rows: int
    row: int
    output_row: int
    in_features: int
    out_features: int
    place: int
    next_row: Counter = 0


_room_for_sums = v.room_for(MOST_RANK)
_ZERO = np.float32(0.0)


@njit
def _shrink(row: Any, num_features: int, first: Any, rank: int, sums: Any) -> None:
    """Writes a row's products with the ranks, four side by side."""
    for at in range(0, rank, _AT_ONCE):
        a0 = first + at * num_features
        a1 = a0 + num_features
        a2 = a1 + num_features
        a3 = a2 + num_features
        s0 = s1 = s2 = s3 = v.splat(_ZERO)
        for feature in range(0, num_features, LANES):
            x = v.load(row, feature)
            s0 = v.fma(x, v.load(a0, feature), s0)
            s1 = v.fma(x, v.load(a1, feature), s1)
            s2 = v.fma(x, v.load(a2, feature), s2)
            s3 = v.fma(x, v.load(a3, feature), s3)
        sums[at] = v.sum_of(s0)
        sums[at + 1] = v.sum_of(s1)
        sums[at + 2] = v.sum_of(s2)
        sums[at + 3] = v.sum_of(s3)


@njit
def _expand(output: Any, num_features: int, second: Any, rank: int, sums: Any) -> None:
    """Adds the products with the sums to a row, 64 channels at a time as far as there are so many. All
    channels' sums have one order, however many go on side by side."""
    block, at = rank * LANES, 0
    while at + _AT_ONCE * LANES <= num_features:
        b0 = second + at * rank
        b1 = b0 + block
        b2 = b1 + block
        b3 = b2 + block
        s0 = s1 = s2 = s3 = v.splat(_ZERO)
        for index in range(rank):
            x, where = v.splat(sums[index]), index * LANES
            s0 = v.fma(x, v.load(b0, where), s0)
            s1 = v.fma(x, v.load(b1, where), s1)
            s2 = v.fma(x, v.load(b2, where), s2)
            s3 = v.fma(x, v.load(b3, where), s3)
        v.store(output, at, v.load(output, at) + s0)
        v.store(output, at + LANES, v.load(output, at + LANES) + s1)
        v.store(output, at + 2 * LANES, v.load(output, at + 2 * LANES) + s2)
        v.store(output, at + 3 * LANES, v.load(output, at + 3 * LANES) + s3)
        at += _AT_ONCE * LANES
    while at < num_features:
        b0 = second + at * rank
        s0 = v.splat(_ZERO)
        for index in range(rank):
            s0 = v.fma(v.splat(sums[index]), v.load(b0, index * LANES), s0)
        v.store(output, at, v.load(output, at) + s0)
        at += LANES


def _add(a: Arguments) -> None:
    sums = _room_for_sums()
    for row in v.shared(a.next_row, a.num_rows):
        places = a.adapters[row].places
        if v.is_none(places):
            continue
        place = places[a.place]
        if place.rank != 0:
            _shrink(a.rows + row * a.row, a.in_features, place.first, place.rank, sums)
            output = a.output + row * a.output_row
            _expand(output, a.out_features, place.second, place.rank, sums)


add_all = Kernel(_add, is_long=True)
"""Adds each row's product with its adapter to the output."""


def add_low_rank(
    rows: torch.Tensor, output: torch.Tensor, adapters: torch.Tensor, place: int
) -> None:
    """Adds to ``output`` ``[num_rows, out_features]``, in place, the products of ``rows`` ``[num_rows,
    in_features]`` with what the rows' ``adapters`` have in a layer, its number ``place``. Both of types
    in ``KINDS``, with features that lie together. ``adapters`` ``[num_rows]`` int64: addresses of
    ``packed`` places of all layers (``PackedAdapter.address``), or 0."""
    in_features, out_features = rows.shape[1], output.shape[1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if in_features % LANES:
        rows = F.pad(rows, (0, -in_features % LANES))
    # Channels that do not fill the last sixteen are added apart: the kernel writes sixteen at a time.
    wide = F.pad(output, (0, -out_features % LANES)) if out_features % LANES else output
    arguments = Arguments(
        rows=rows,
        output=wide,
        adapters=adapters,
        num_rows=len(rows),
        row=rows.stride(0),
        output_row=wide.stride(0),
        in_features=rows.shape[1],
        out_features=wide.shape[1],
        place=place,
    )
    # A row is one thread's: how much there is to do is known only when rows have their adapters.
    add_all.run(arguments, threads_for((len(rows) - 1) * (in_features + out_features) * LANES))
    if wide is not output:
        output.copy_(wide[:, :out_features])


class PackedAdapter:
    """The matrices of an adapter in some of ``num_places`` layers, as the kernel reads them: by the
    layer's number ``first`` ``[rank, in_features]`` and ``second`` ``[out_features, rank]``, float32.
    Rows that name it by its ``address`` need it to live on."""

    def __init__(
        self, num_places: int, parts: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._held = {number: _packed_part(*part) for number, part in parts.items()}
        absent = Place(_NOTHING, _NOTHING, 0)
        places = [self._held.get(number, absent) for number in range(num_places)]
        self._places = array("q", chain.from_iterable(map(words, places)))
        self.address = address_of(self._places)

    @property
    def num_bytes(self) -> int:
        tensors = (tensor for place in self._held.values() for tensor in place[:2])
        return sum(tensor.nbytes for tensor in tensors)


_NOTHING = torch.zeros(LANES)


def _packed_part(first: torch.Tensor, second: torch.Tensor) -> Place:
    missing = -len(first) % _AT_ONCE
    first = F.pad(first.float(), (0, -first.shape[1] % LANES, 0, missing)).contiguous()
    second = F.pad(second.float(), (0, missing, 0, -len(second) % LANES))
    blocks = second.view(-1, LANES, len(first)).transpose(1, 2).contiguous()
    return Place(first, blocks, len(first))
