"""Few rows times many weights in 8 bits: rows quantised, multiplied in integers and scaled in one pass.

What a product of few rows costs is reading its weights once. oneDNN's takes about twice as long for that
where there is AVX-512 VNNI, and reads the same packed weights: blocks of 64 output channels, and in them
four input features of each channel, then the next four.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

import torch
from numba import njit

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, numbers_at
from engine.kernels.int8_rows import Gate, gated_or_plain, gating_of, quantize_row
from engine.kernels.lanes import (
    add,
    argument,
    dots1,
    dots2,
    dots3,
    dots4,
    fetch_add,
    has_integer_products,
    int_sums,
    itemsize_of,
    load32,
    load_ints,
    mul,
    read_float,
    splat,
    store,
    store_zeros,
)

CHANNELS = 64
"""Output channels of a block of packed weights; features are filled up to a multiple of it, too."""
_ROWS_AT_ONCE = 4
_FEATURES_AT_ONCE = 256


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. SUMS ``[out_features]`` int32: what zero points add to
    every row's sums, as integers if IS_WHOLE; BIAS ``[out_features]`` float32, or 0; VALUES uint8 and
    SCALES float32: the rows in 8 bits; PARTS int32, ``[threads, rows, 64]``; NUMBERS,
    ACTIVATION, OTHER and GATED as in ``int8_rows``."""

    NEXT_ROW = 0
    NUM_DONE = 1
    NEXT_BLOCK = 2
    NUM_WORKERS = 3
    NUM_ROWS = 4
    IN_FEATURES = 5
    OUT_FEATURES = 6
    KIND = 7
    OUTPUT_KIND = 8
    ROWS = 9
    ROW = 10
    VALUES = 11
    VALUE_ROW = 12
    SCALES = 13
    NUMBERS = 14
    WEIGHTS = 15
    WEIGHT_SCALES = 16
    SUMS = 17
    BIAS = 18
    IS_WHOLE = 19
    PARTS = 20
    OUTPUT = 21
    ACTIVATION = 22
    OTHER = 23
    GATED = 24


@njit
def _quantize(p: int) -> None:
    """All threads share the rows; none goes on before the last is done."""
    num_rows, num_features = argument(p, Arg.NUM_ROWS), argument(p, Arg.IN_FEATURES)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= num_rows:
            break
        kind, source = argument(p, Arg.KIND), argument(p, Arg.ROWS) + row * argument(p, Arg.ROW)
        source = gated_or_plain(
            kind, argument(p, Arg.ACTIVATION), source, argument(p, Arg.OTHER), num_features,
            argument(p, Arg.GATED) + row * num_features * itemsize_of(kind),
        )  # fmt: skip
        quantize_row(
            kind, source, num_features,
            argument(p, Arg.VALUES) + row * argument(p, Arg.VALUE_ROW),
            argument(p, Arg.SCALES) + 4 * row, argument(p, Arg.NUMBERS),
        )  # fmt: skip
        fetch_add(p + 8 * Arg.NUM_DONE, 1)
    # Every row that is not done is in the hands of a thread that runs.
    while fetch_add(p + 8 * Arg.NUM_DONE, 0) < num_rows:
        pass


@njit
def _scale(p: int, row: int, block: int, part: int) -> None:
    """Sums of one row and block become floats: times the channel's scale, times the row's, plus bias."""
    out_features, kind = argument(p, Arg.OUT_FEATURES), argument(p, Arg.OUTPUT_KIND)
    itemsize, bias, is_whole = itemsize_of(kind), argument(p, Arg.BIAS), argument(p, Arg.IS_WHOLE)
    by = splat(read_float(argument(p, Arg.SCALES) + 4 * row))
    target = argument(p, Arg.OUTPUT) + itemsize * row * out_features
    first = block * CHANNELS
    for channel in range(first, min(first + CHANNELS, out_features), LANES):
        sums, added = part + 4 * (channel - first), argument(p, Arg.SUMS) + 4 * channel
        value = int_sums(sums, added) if is_whole else add(load_ints(sums), load_ints(added))
        value = mul(mul(value, load32(argument(p, Arg.WEIGHT_SCALES) + 4 * channel)), by)
        if bias != 0:
            value = add(value, load32(bias + 4 * channel))
        store(kind, target + itemsize * channel, value)


@njit
def _add_dots(count: int, rows: int, stride: int, weights: int, num_fours: int, sums: int) -> None:
    """As many rows at once as there are registers for."""
    if count == 1:
        dots1(rows, stride, weights, num_fours, sums)
    elif count == 2:
        dots2(rows, stride, weights, num_fours, sums)
    elif count == 3:
        dots3(rows, stride, weights, num_fours, sums)
    else:
        dots4(rows, stride, weights, num_fours, sums)


@njit
def _add_block(num_rows: int, values: int, stride: int, weights: int, sums: int) -> None:
    """All rows' products with a block of channels. Of the weights so many at a time as stay in the
    nearest cache while all rows are multiplied with them."""
    num_groups = (num_rows + _ROWS_AT_ONCE - 1) // _ROWS_AT_ONCE
    for at in range(0, CHANNELS * num_rows, LANES):
        store_zeros(sums + 4 * at)
    for first in range(0, stride, _FEATURES_AT_ONCE):
        num_fours = min(_FEATURES_AT_ONCE, stride - first) // 4
        for group in range(num_groups):
            row, end = num_rows * group // num_groups, num_rows * (group + 1) // num_groups
            _add_dots(
                end - row, values + row * stride + first, stride,
                weights + CHANNELS * first, num_fours, sums + 4 * CHANNELS * row,
            )  # fmt: skip


def _multiply(p: int) -> None:
    num_rows, stride = argument(p, Arg.NUM_ROWS), argument(p, Arg.VALUE_ROW)
    sums = argument(p, Arg.PARTS) + 4 * CHANNELS * num_rows * fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    _quantize(p)
    num_blocks = (argument(p, Arg.OUT_FEATURES) + CHANNELS - 1) // CHANNELS
    while True:
        block = fetch_add(p + 8 * Arg.NEXT_BLOCK, 1)
        if block >= num_blocks:
            break
        weights = argument(p, Arg.WEIGHTS) + block * CHANNELS * stride
        _add_block(num_rows, argument(p, Arg.VALUES), stride, weights, sums)
        for row in range(num_rows):
            _scale(p, row, block, sums + 4 * CHANNELS * row)


multiply = Kernel(_multiply, len(Arg), is_long=True)
"""Rows, quantised, times the weights: OUTPUT."""


class PackedWeights:
    """What is multiplied with.

    ``packed``: address of the weights as oneDNN packs them; ``scales`` and ``bias`` ``[out_features]``
    float32; ``sums`` ``[out_features]`` int32, what is added to every row's sums, as integers if
    ``is_whole``, else when both have become floats.
    """

    def __init__(
        self,
        in_features: int,
        packed: int,
        scales: torch.Tensor,
        sums: torch.Tensor,
        bias: torch.Tensor | None,
        is_whole: bool,
    ) -> None:
        self._kept = scales, sums, bias
        self._in_features, self._out_features = in_features, len(scales)
        self._stride = _filled(in_features)
        bias_at = 0 if bias is None else bias.data_ptr()
        self._where = (packed, scales.data_ptr(), sums.data_ptr(), bias_at, is_whole)

    def times(
        self,
        rows: torch.Tensor,
        dtype: torch.dtype,
        numbers: tuple[float, float, float],
        gate: Gate | None = None,
    ) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``, or twice as many to be gated, of a type in ``KINDS``;
        ``numbers`` as ``int8_rows.quantize_rows`` takes them. Returns ``[num_rows, out_features]``."""
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        num_rows = len(rows)
        num_threads = torch.get_num_threads()
        stride, width = self._stride, self._out_features
        output = torch.empty((num_rows, width), dtype=dtype)
        parts = 4 * CHANNELS * num_rows * num_threads
        gated = num_rows * self._in_features * rows.element_size() if gate else 0
        scratch = torch.empty(gated + parts + num_rows * (4 + stride), dtype=torch.uint8)
        gated_at = scratch.data_ptr()
        at = gated_at + gated
        first, *gating = gating_of(rows, gate)
        told = array(
            "q",
            [
                *(0, 0, 0, 0, num_rows, self._in_features, width, KINDS[rows.dtype], KINDS[dtype]),
                *(first, rows.stride(0) * rows.element_size()),
                *(at + parts + 4 * num_rows, stride, at + parts, numbers_at(*numbers)),
                *(*self._where, at, output.data_ptr(), *gating, gated_at),
            ],
        )
        multiply.run(told.buffer_info()[0], num_threads)
        return output


def can_multiply(in_features: int, out_features: int) -> bool:
    """Whether this machine and products of these sizes are for this kernel."""
    return in_features % LANES == 0 and out_features % LANES == 0 and has_integer_products()


def packed_bytes(in_features: int, out_features: int) -> int:
    """That are read of packed weights."""
    return _filled(in_features) * _filled(out_features)


def _filled(count: int) -> int:
    return -(-count // CHANNELS) * CHANNELS
