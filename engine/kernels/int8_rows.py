"""Rows in 8 bits, as integer products read them: quantised as they are, or gated first.

A gated row is one half of what a product left, after an activation, times the other half: what the second
product of a feed-forward network reads.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, numbers_at, threads_for
from engine.kernels.lanes import (
    add,
    argument,
    div,
    fetch_add,
    gelu_tanh,
    itemsize_of,
    larger_or_nan,
    largest_or_nan_of,
    load,
    magnitude,
    mul,
    read_float,
    rounded,
    silu,
    splat,
    store,
    store_uint8,
    write_float,
)

_ZERO = np.float32(0.0)


SILU, GELU_TANH = 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


class Gate(NamedTuple):
    """``activation``: of ``ACTIVATIONS``; ``is_first``: it is for the first half of a row."""

    activation: str
    is_first: bool


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. NUMBERS, float32: largest value, smallest scale, what is
    added before the fraction is cut off. ACTIVATION: 0 where rows are taken as they are; else OTHER is
    how far from ROWS their other halves are, and GATED has room for the rows."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    NUM_FEATURES = 2
    KIND = 3
    ROWS = 4
    ROW = 5
    VALUES = 6
    SCALES = 7
    NUMBERS = 8
    ACTIVATION = 9
    OTHER = 10
    GATED = 11


@njit
def quantize_row(
    kind: int, source: int, num_features: int, target: int, scale_at: int, numbers: int
) -> None:
    """``num_features`` floats of ``kind`` become uint8 at ``target``, and a float32 at ``scale_at``."""
    itemsize = itemsize_of(kind)
    most = splat(_ZERO)
    for at in range(0, num_features, LANES):
        most = larger_or_nan(magnitude(load(kind, source + itemsize * at)), most)
    scale = largest_or_nan_of(most) / read_float(numbers)
    smallest = read_float(numbers + 4)
    if scale < smallest:
        scale = smallest
    write_float(scale_at, scale)
    by, shift = splat(scale), splat(read_float(numbers + 8))
    for at in range(0, num_features, LANES):
        store_uint8(target + at, add(div(load(kind, source + itemsize * at), by), shift))


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


def _gate(p: int) -> None:
    num_features, kind = argument(p, Arg.NUM_FEATURES), argument(p, Arg.KIND)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        gate_row(
            kind, argument(p, Arg.ACTIVATION), argument(p, Arg.ROWS) + row * argument(p, Arg.ROW),
            argument(p, Arg.OTHER), num_features,
            argument(p, Arg.GATED) + row * num_features * itemsize_of(kind),
        )  # fmt: skip


def _quantize(p: int) -> None:
    num_features = argument(p, Arg.NUM_FEATURES)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        kind, source = argument(p, Arg.KIND), argument(p, Arg.ROWS) + row * argument(p, Arg.ROW)
        source = gated_or_plain(
            kind, argument(p, Arg.ACTIVATION), source, argument(p, Arg.OTHER), num_features,
            argument(p, Arg.GATED) + row * num_features * itemsize_of(kind),
        )  # fmt: skip
        quantize_row(
            kind, source, num_features,
            argument(p, Arg.VALUES) + row * num_features, argument(p, Arg.SCALES) + 4 * row,
            argument(p, Arg.NUMBERS),
        )  # fmt: skip


quantize = Kernel(_quantize, len(Arg))
"""Of each row its values, uint8, and its scale, float32: its largest value over ``largest``."""


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
        [
            *(0, *gated.shape, KINDS[rows.dtype], first, row, 0, 0, 0),
            *(*gating, gated.data_ptr()),
        ],
    )
    gate_all.run(told.buffer_info()[0], threads_for(rows.numel()))
    return gated


def quantize_rows(
    rows: torch.Tensor,
    largest: float,
    smallest_scale: float,
    shift: float,
    gate: Gate | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``[num_rows, num_features]``, of a type in ``KINDS``; features lie together, and are a
    multiple of 16; of gated rows there are twice as many. Returns values ``[num_rows, num_features]``
    uint8, which are a row over its scale plus ``shift`` without the fraction, and scales
    ``[num_rows, 1]`` float32."""
    num_rows, num_features = rows.shape[0], rows.shape[1] // (2 if gate else 1)
    values = torch.empty((num_rows, num_features), dtype=torch.uint8)
    scales = torch.empty(num_rows, 1)
    first, *gating = gating_of(rows, gate)
    gated = torch.empty((num_rows, num_features), dtype=rows.dtype) if gate else scales
    told = array(
        "q",
        [
            *(0, num_rows, num_features, KINDS[rows.dtype]),
            *(first, rows.stride(0) * rows.element_size()),
            *(values.data_ptr(), scales.data_ptr(), numbers_at(largest, smallest_scale, shift)),
            *(*gating, gated.data_ptr()),
        ],
    )
    quantize.run(told.buffer_info()[0], threads_for(rows.numel()))
    return values, scales


def gating_of(rows: torch.Tensor, gate: Gate | None) -> tuple[int, int, int]:
    """Where ROWS are, ACTIVATION and OTHER."""
    first = rows.data_ptr()
    if gate is None:
        return first, 0, 0
    half = rows.shape[1] // 2 * rows.element_size()
    activation = ACTIVATIONS[gate.activation]
    return (first, activation, half) if gate.is_first else (first + half, activation, -half)


def can_quantize(rows: torch.Tensor) -> bool:
    return (
        rows.dtype in KINDS
        and rows.shape[1] % LANES == 0
        and rows.stride(1) == 1
        and rows.device.type == "cpu"
    )
