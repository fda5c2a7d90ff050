"""Rows in 8 bits, as integer products read them."""

from __future__ import annotations

from array import array
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from numba import njit

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.lanes import (
    add,
    argument,
    div,
    fetch_add,
    itemsize_of,
    larger_or_nan,
    largest_or_nan_of,
    load,
    magnitude,
    read_float,
    splat,
    store_uint8,
    write_float,
)

_ZERO = np.float32(0.0)


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. NUMBERS, float32: largest value, smallest scale, what is
    added before the fraction is cut off."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    NUM_FEATURES = 2
    KIND = 3
    ROWS = 4
    ROW = 5
    VALUES = 6
    SCALES = 7
    NUMBERS = 8


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


def _quantize(p: int) -> None:
    num_features = argument(p, Arg.NUM_FEATURES)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        quantize_row(
            argument(p, Arg.KIND), argument(p, Arg.ROWS) + row * argument(p, Arg.ROW), num_features,
            argument(p, Arg.VALUES) + row * num_features, argument(p, Arg.SCALES) + 4 * row,
            argument(p, Arg.NUMBERS),
        )  # fmt: skip


quantize = Kernel(_quantize)
"""Of each row its values, uint8, and its scale, float32: its largest value over ``largest``."""


def quantize_rows(
    rows: torch.Tensor, largest: float, smallest_scale: float, shift: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` ``[num_rows, num_features]``, of a type in ``KINDS``; features lie together, and are a
    multiple of 16. Returns values ``[num_rows, num_features]`` uint8, which are a row over its scale plus
    ``shift`` without the fraction, and scales ``[num_rows, 1]`` float32."""
    num_rows, num_features = rows.shape
    values = torch.empty(rows.shape, dtype=torch.uint8)
    scales = torch.empty(num_rows, 1)
    numbers = numbers_at(largest, smallest_scale, shift)
    told = array(
        "q",
        [
            *(0, num_rows, num_features, KINDS[rows.dtype]),
            *(rows.data_ptr(), rows.stride(0) * rows.element_size()),
            *(values.data_ptr(), scales.data_ptr(), numbers),
        ],
    )
    quantize.run(told.buffer_info()[0], threads_for(rows.numel()))
    return values, scales


_KEPT: list[array[float]] = []


@cache
def numbers_at(*numbers: float) -> int:
    """Where they are, as float32, for as long as the process lives."""
    _KEPT.append(array("f", numbers))
    return _KEPT[-1].buffer_info()[0]


def can_quantize(rows: torch.Tensor) -> bool:
    return (
        rows.dtype in KINDS
        and rows.shape[1] % LANES == 0
        and rows.stride(1) == 1
        and rows.device.type == "cpu"
    )
