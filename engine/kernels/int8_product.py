"""Rows times weights, both in 8 bits, by groups of features.

With plain numbers, for one row and one output channel::

    total = 0.0
    for group in groups:                                     # in ascending order
        whole = sum(row[k] * weight[k] for k in group)       # integers: exact in any order
        total = fma(float(whole) * weight.group_scale[group], row.scale[group], total)
    output = total * weight.scale + bias

Every operation is rounded once, and their order is that of the groups: a row's result has the same bits
in whatever company it is computed. So few rows and many, on every machine with the instructions, are one
loop.

Weights lie in blocks of 32 channels; in a block group after group, and in those four features of each
channel, then the next four. They are stored with 128 added: the instruction multiplies unsigned by signed
bytes, and what that makes too much is one integer per row and group, where its sums begin.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

import torch
from numba import njit

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel
from engine.kernels.int8_rows import (
    HEADER_BYTES,
    ZERO_POINT,
    Gate,
    gated_or_plain,
    gating_of,
    quantize_row,
    record_bytes,
)
from engine.kernels.integers import (
    CHANNELS,
    MOST_ROWS,
    has_integer_products,
    multiply_by_channel,
    multiply_by_group,
)
from engine.kernels.lanes import add, argument, fetch_add, itemsize_of, load32, mul, store
from engine.kernels.waiting import releasing, wait_until

_BLOCKS_AT_ONCE = 64
"""Weights are packed in slices of so many blocks, which bounds the memory that takes."""


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. RECORDS: room for rows in 8 bits. WEIGHT_SCALES and BIAS
    ``[blocks * 32]`` float32: of channels; no BIAS is 0. BY_GROUP: weights have scales of groups. PARTS:
    room for ``[threads, 6, 32]`` float32. OUTPUT ``[rows, OUTPUT_ROW]`` of OUTPUT_KIND. ACTIVATION, OTHER
    and GATED as in ``int8_rows``. RELEASE as ``wait_until`` takes it."""

    NEXT_ROW = 0
    NUM_DONE = 1
    NEXT_BLOCK = 2
    NUM_WORKERS = 3
    NUM_ROWS = 4
    IN_FEATURES = 5
    NUM_BLOCKS = 6
    GROUP = 7
    KIND = 8
    OUTPUT_KIND = 9
    ROWS = 10
    ROW = 11
    RECORDS = 12
    RECORD = 13
    WEIGHTS = 14
    BLOCK = 15
    WEIGHT_SCALES = 16
    BIAS = 17
    BY_GROUP = 18
    PARTS = 19
    OUTPUT = 20
    OUTPUT_ROW = 21
    ACTIVATION = 22
    OTHER = 23
    GATED = 24
    RELEASE = 25


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
        record = argument(p, Arg.RECORDS) + row * argument(p, Arg.RECORD)
        quantize_row(kind, source, num_features, argument(p, Arg.GROUP), record)
        fetch_add(p + 8 * Arg.NUM_DONE, 1)
    # Every row that is not done is in the hands of a thread that runs.
    wait_until(p + 8 * Arg.NUM_DONE, num_rows, argument(p, Arg.RELEASE))


@njit
def _write(p: int, block: int, row: int, num_rows: int, totals: int) -> None:
    """Totals of a block of channels, of rows from ``row`` on, to where they belong."""
    kind, first = argument(p, Arg.OUTPUT_KIND), block * CHANNELS
    scales, bias = argument(p, Arg.WEIGHT_SCALES), argument(p, Arg.BIAS)
    target = argument(p, Arg.OUTPUT) + row * argument(p, Arg.OUTPUT_ROW)
    for index in range(num_rows):
        for at in range(0, CHANNELS, LANES):
            value = load32(totals + 4 * (CHANNELS * index + at))
            value = mul(value, load32(scales + 4 * (first + at)))
            if bias != 0:
                value = add(value, load32(bias + 4 * (first + at)))
            store(kind, target + itemsize_of(kind) * (first + at), value)
        target += argument(p, Arg.OUTPUT_ROW)


@njit
def _ahead(p: int, block: int, tile: int, weights: int) -> int:
    """What is fetched while a tile is multiplied: halves of the block that this thread is likely to take
    next, which then need not be waited for. Further tiles fetch what is there already."""
    next_block = block + argument(p, Arg.NUM_WORKERS)
    if tile >= 2 or next_block >= argument(p, Arg.NUM_BLOCKS):
        return weights
    return argument(p, Arg.WEIGHTS) + (2 * next_block + tile) * (argument(p, Arg.BLOCK) // 2)


@njit
def _multiply_block(p: int, block: int, totals: int) -> None:
    """All rows with a block of channels, about equally many at once."""
    num_rows, record = argument(p, Arg.NUM_ROWS), argument(p, Arg.RECORD)
    group = argument(p, Arg.GROUP)
    weights = argument(p, Arg.WEIGHTS) + block * argument(p, Arg.BLOCK)
    num_tiles, groups = (num_rows + MOST_ROWS - 1) // MOST_ROWS, record // (group + HEADER_BYTES)
    for tile in range(num_tiles):
        row, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        rows = argument(p, Arg.RECORDS) + row * record
        ahead = _ahead(p, block, tile, weights)
        if argument(p, Arg.BY_GROUP):
            multiply_by_group(end - row, rows, record, weights, groups, group // 4, totals, ahead)
        else:
            multiply_by_channel(end - row, rows, record, weights, groups, group // 4, totals, ahead)
        _write(p, block, row, end - row, totals)


def _multiply(p: int) -> None:
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    totals = argument(p, Arg.PARTS) + 4 * CHANNELS * MOST_ROWS * worker
    _quantize(p)
    while True:
        block = fetch_add(p + 8 * Arg.NEXT_BLOCK, 1)
        if block >= argument(p, Arg.NUM_BLOCKS):
            break
        _multiply_block(p, block, totals)


multiply = Kernel(_multiply, len(Arg), is_long=True)
"""Rows, quantised, times the weights: OUTPUT."""


class PackedWeights:
    """What rows are multiplied with.

    ``values``: ``[out_features, in_features]`` int8. ``scales``: ``[out_features]`` float32.
    ``group_scales``: ``[out_features, groups]`` float16, by which a group's weights are smaller, or None.
    ``bias``: ``[out_features]`` float32. ``group``: features of rows and weights that have a scale, a
    multiple of 32.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        group_scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        group: int,
    ) -> None:
        self._out_features = len(values)
        self._group = group
        self._num_blocks = -(-self._out_features // CHANNELS)
        self._packed = _pack(values, group_scales, group)
        filled = self._num_blocks * CHANNELS
        self._scales = _filled(scales, filled)
        self._bias = None if bias is None else _filled(bias, filled)
        bias_at = 0 if self._bias is None else self._bias.data_ptr()
        self._where = self._scales.data_ptr(), bias_at, group_scales is not None

    @property
    def num_bytes(self) -> int:
        held = (self._packed, self._scales, self._bias)
        return sum(each.numel() * each.element_size() for each in held if each is not None)

    def times(
        self, rows: torch.Tensor, dtype: torch.dtype, gate: Gate | None = None
    ) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``, or twice as many features that are to be gated, of a type
        in ``KINDS``. Returns ``[num_rows, out_features]``."""
        rows = _readable(rows, gate)
        num_rows, num_features = len(rows), rows.shape[1] // (2 if gate else 1)
        num_threads = torch.get_num_threads()
        width = self._num_blocks * CHANNELS
        output = torch.empty((num_rows, width), dtype=dtype)
        parts = 4 * CHANNELS * MOST_ROWS * num_threads
        gated = num_rows * num_features * rows.element_size() if gate else 0
        record = record_bytes(num_features, self._group)
        scratch = torch.empty(parts + gated + num_rows * record, dtype=torch.uint8)
        parts_at = scratch.data_ptr()
        gated_at = parts_at + parts
        first, *gating = gating_of(rows, gate)
        told = array(
            "q",
            [
                *(0, 0, 0, 0, num_rows, num_features, self._num_blocks, self._group),
                *(KINDS[rows.dtype], KINDS[dtype], first, rows.stride(0) * rows.element_size()),
                *(gated_at + gated, record, self._packed.data_ptr(), self._packed.shape[1]),
                *(*self._where, parts_at, output.data_ptr(), width * output.element_size()),
                *(*gating, gated_at, releasing()),
            ],
        )
        multiply.run(told.buffer_info()[0], num_threads)
        return output if width == self._out_features else output[:, : self._out_features]


def _readable(rows: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """Features lie together, and fill sixteens."""
    missing = -rows.shape[1] % LANES
    if missing and gate is None:
        return torch.nn.functional.pad(rows, (0, missing))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _pack(values: torch.Tensor, scales: torch.Tensor | None, group: int) -> torch.Tensor:
    """``[blocks, bytes of a block]`` uint8."""
    num_blocks, num_groups = -(-values.shape[0] // CHANNELS), -(-values.shape[1] // group)
    bytes_of_group = CHANNELS * (group + (0 if scales is None else 2))
    packed = torch.empty(num_blocks, num_groups, bytes_of_group, dtype=torch.uint8)
    for first in range(0, num_blocks, _BLOCKS_AT_ONCE):
        part = packed[first : first + _BLOCKS_AT_ONCE]
        channels = slice(first * CHANNELS, (first + len(part)) * CHANNELS)
        some = torch.zeros(len(part) * CHANNELS, num_groups * group, dtype=torch.int8)
        some[: len(values[channels]), : values.shape[1]] = values[channels]
        fours = (some.view(torch.uint8) ^ ZERO_POINT).view(
            len(part), CHANNELS, num_groups, group // 4, 4
        )
        target = part[..., : CHANNELS * group].view(len(part), num_groups, group // 4, CHANNELS, 4)
        target.copy_(fours.permute(0, 2, 3, 1, 4))
        if scales is not None:
            mine = _filled(scales[channels], len(part) * CHANNELS).view(
                len(part), CHANNELS, num_groups
            )
            part[..., CHANNELS * group :].copy_(mine.transpose(1, 2).contiguous().view(torch.uint8))
    return packed.view(num_blocks, -1)


def _filled(values: torch.Tensor, count: int) -> torch.Tensor:
    """With zeros, up to so many channels."""
    filled = values.new_zeros(count, *values.shape[1:])
    filled[: len(values)] = values
    return filled


def can_multiply() -> bool:
    """Whether this machine has the instruction."""
    return has_integer_products()
