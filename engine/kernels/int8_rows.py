"""Rows in 8 bits, as integer products read them: quantised by groups of features as they are, or gated
first.

A group's scale is its largest magnitude over 127, so that a value far above all others coarsens the steps
of its own group alone (real models have such outliers in some channels). With plain numbers::

    for group in groups_of(row, group_size):
        largest = max(abs(value) for value in group)
        scale = max(largest / 127, smallest_scale)
        values = [round_half_even(value * (1 / scale)) for value in group]
        correction = -128 * sum(values)     # what weights that are stored with 128 added make too much

A row is written as one record: of each group its scale (float32), its correction (int32) and its values
(int8). A gated row is one half of what a product left, after an activation, times the other half: what
the second product of a feed-forward network reads.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.integers import larger_bits, largest_bits_of, store_int8, to_whole, write_int32
from engine.kernels.lanes import (
    add,
    argument,
    fetch_add,
    gelu_tanh,
    itemsize_of,
    load,
    magnitude,
    mul,
    rounded,
    silu,
    splat,
    store,
    sum_of,
    write_float,
)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST = np.float32(127.0)
_SMALLEST_SCALE = np.float32(1e-12)
ZERO_POINT = 128
"""What is added to weights in 8 bits, for an instruction that multiplies unsigned by signed bytes."""
HEADER_BYTES = 8
"""Of a group in a record, before its values."""

SILU, GELU_TANH = 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


class Gate(NamedTuple):
    """``activation``: of ``ACTIVATIONS``; ``is_first``: it is for the first half of a row."""

    activation: str
    is_first: bool


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. GROUP: features of a group. ACTIVATION: 0 where rows are
    taken as they are; else OTHER is how far from ROWS their other halves are, and GATED has room for the
    rows. RECORDS: where rows go that are quantised."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    NUM_FEATURES = 2
    KIND = 3
    ROWS = 4
    ROW = 5
    RECORDS = 6
    GROUP = 7
    ACTIVATION = 8
    OTHER = 9
    GATED = 10


def record_bytes(num_features: int, group: int) -> int:
    """Of a row whose last group is filled up with zeros."""
    return -(-num_features // group) * (HEADER_BYTES + group)


@njit
def quantize_row(kind: int, source: int, num_features: int, group: int, record: int) -> None:
    """``num_features`` floats of ``kind``, a multiple of 16, become a record."""
    itemsize = itemsize_of(kind)
    for first in range(0, num_features, group):
        end = min(first + group, num_features)
        most = splat(_ZERO)
        for at in range(first, end, LANES):
            most = larger_bits(magnitude(load(kind, source + itemsize * at)), most)
        scale = largest_bits_of(most) / _LARGEST
        if scale < _SMALLEST_SCALE:
            scale = _SMALLEST_SCALE
        by, total = splat(_ONE / scale), splat(_ZERO)
        target = record + HEADER_BYTES
        for at in range(first, end, LANES):
            value = to_whole(mul(load(kind, source + itemsize * at), by))
            total = add(total, value)
            store_int8(target, value)
            target += LANES
        for _ in range(end, first + group, LANES):
            store_int8(target, splat(_ZERO))
            target += LANES
        write_float(record, scale)
        write_int32(record + 4, -ZERO_POINT * int(sum_of(total)))
        record = target


@njit
def gate_row(
    kind: int, activation: int, source: int, other: int, num_features: int, target: int
) -> None:
    """The activation of what is at ``source``, times what is ``other`` bytes further, both rounded."""
    itemsize = itemsize_of(kind)
    for at in range(0, num_features * itemsize, LANES * itemsize):
        value = load(kind, source + at)
        value = silu(value) if activation == SILU else gelu_tanh(value)
        store(kind, target + at, mul(rounded(kind, value), load(kind, source + other + at)))


@njit
def gated_or_plain(
    kind: int, activation: int, source: int, other: int, num_features: int, room: int
) -> int:
    """Where the row is that is to be quantised: in ``room`` once it is gated, or where it was."""
    if activation == 0:
        return source
    gate_row(kind, activation, source, other, num_features, room)
    return room


@njit
def _source(p: int, row: int) -> int:
    num_features, kind = argument(p, Arg.NUM_FEATURES), argument(p, Arg.KIND)
    return gated_or_plain(
        kind, argument(p, Arg.ACTIVATION), argument(p, Arg.ROWS) + row * argument(p, Arg.ROW),
        argument(p, Arg.OTHER), num_features,
        argument(p, Arg.GATED) + row * num_features * itemsize_of(kind),
    )  # fmt: skip


def _gate(p: int) -> None:
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        _source(p, row)


def _quantize(p: int) -> None:
    num_features, group = argument(p, Arg.NUM_FEATURES), argument(p, Arg.GROUP)
    stride = (num_features + group - 1) // group * (HEADER_BYTES + group)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        quantize_row(
            argument(p, Arg.KIND), _source(p, row), num_features, group,
            argument(p, Arg.RECORDS) + row * stride,
        )  # fmt: skip


quantize = Kernel(_quantize, len(Arg))
"""Of each row its record."""


gate_all = Kernel(_gate, len(Arg))
"""Of each row, GATED."""


def gate_rows(rows: torch.Tensor, how: Gate) -> torch.Tensor:
    """``rows`` ``[num_rows, 2 * num_features]``, of a type in ``KINDS``; features a multiple of 16, which
    lie together. Returns ``[num_rows, num_features]``, of the same type."""
    gated = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    first, *gating = gating_of(rows, how)
    row = rows.stride(0) * rows.element_size()
    told = array(
        "q",
        [0, *gated.shape, KINDS[rows.dtype], first, row, 0, 0, *gating, gated.data_ptr()],
    )
    gate_all.run(told.buffer_info()[0], threads_for(rows.numel()))
    return gated


def quantize_rows(rows: torch.Tensor, group: int, gate: Gate | None = None) -> torch.Tensor:
    """``rows`` ``[num_rows, num_features]``, of a type in ``KINDS``; features lie together, and are a
    multiple of 16; ``group`` is one of 32. Of gated rows there are twice as many. Returns records
    ``[num_rows, record_bytes]`` uint8."""
    num_rows, num_features = rows.shape[0], rows.shape[1] // (2 if gate else 1)
    records = torch.empty((num_rows, record_bytes(num_features, group)), dtype=torch.uint8)
    first, *gating = gating_of(rows, gate)
    gated = torch.empty((num_rows, num_features), dtype=rows.dtype) if gate else records
    told = array(
        "q",
        [
            *(0, num_rows, num_features, KINDS[rows.dtype]),
            *(first, rows.stride(0) * rows.element_size(), records.data_ptr(), group),
            *(*gating, gated.data_ptr()),
        ],
    )
    quantize.run(told.buffer_info()[0], threads_for(rows.numel()))
    return records


def gating_of(rows: torch.Tensor, gate: Gate | None) -> tuple[int, int, int]:
    """Where ROWS are, ACTIVATION and OTHER."""
    first = rows.data_ptr()
    if gate is None:
        return first, 0, 0
    half = rows.shape[1] // 2 * rows.element_size()
    activation = ACTIVATIONS[gate.activation]
    return (first, activation, half) if gate.is_first else (first + half, activation, -half)
