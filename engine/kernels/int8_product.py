"""Rows times weights, both in 8 bits, by groups of features.

Every operation is rounded once, and their order is that of the groups: a row's result has the same bits
in whatever company it is computed. So few rows and many, on every machine with the instructions, are one
loop.

Weights lie in blocks of 32 channels; in a block group after group, and in those four features of each
channel, then the next four. They are stored with 128 added: the instruction multiplies unsigned by signed
bytes, and what that makes too much is one integer per row and group, where its sums begin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numba import njit

from engine.kernels import LANES, int8_rows
from engine.kernels import lanes as v
from engine.kernels.compiled import Loop
from engine.kernels.exact import fma
from engine.kernels.int8_rows import (
    ZERO_POINT,
    Gate,
    gated_or_plain,
    gating_of,
    quantize_row,
    record_bytes,
)
from engine.kernels.integers import (
    CHANNELS,
    HEADER_BYTES,
    has_integer_products,
    multiply_by_channel,
    multiply_by_group,
)
from engine.kernels.records import NOWHERE, Bytes, Counter, Float32s, Floats
from engine.kernels.tiling import ROWS_AT_ONCE, share_of
from engine.kernels.waiting import releasing, wait_until


def reference(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    group_scales: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """Returns ``[num_rows, out_features]`` float32, before a bias is added. ``rows`` ``[num_rows,
    in_features]``; weights as ``PackedWeights`` takes them. Sums of integers are exact in any order."""
    quantized = int8_rows.reference(rows, group)
    weights = F.pad(values.double(), (0, -values.shape[1] % group)).unflatten(1, (-1, group))
    total = torch.zeros(len(rows), len(values))
    for index in range(weights.shape[1]):
        whole = (quantized.values[:, index].double() @ weights[:, index].T).float()
        if group_scales is not None:
            whole = whole * group_scales[:, index].float()
        total = fma(whole, quantized.scales[:, index, None], total)
    return total * scales


_BLOCKS_AT_ONCE = 64
"""Weights are packed in slices of so many blocks, which bounds the memory that takes."""


class Arguments(NamedTuple):
    """Rows and ``gated`` as ``int8_rows`` takes them; ``records``: room for them in 8 bits, of ``record``
    bytes each. ``weights`` ``[num_blocks, block]`` bytes, of which groups have scales if ``by_group``;
    ``scales`` and ``bias`` (or NOWHERE): of channels; ``output`` ``[num_rows, num_blocks * 32]``;
    ``release`` as ``wait_until`` takes it."""

    rows: Floats
    gated: Floats
    output: Floats
    records: Bytes
    weights: Bytes
    scales: Float32s
    bias: Float32s
    num_rows: int
    num_features: int
    row: int
    activation: int
    other: int
    record: int
    release: int
    num_blocks: int
    block: int
    group: int
    by_group: bool
    next_row: Counter = 0
    num_done: Counter = 0
    next_block: Counter = 0
    num_workers: Counter = 0


@njit
def _quantize(a: Arguments) -> None:
    """All threads share the rows; none goes on before the last is done."""
    for row in v.shared(a.next_row, a.num_rows):
        record = a.records + row * a.record
        quantize_row(gated_or_plain(a, row), a.num_features, a.group, record)
        v.fetch_add(a.num_done, 1)
    # Every row that is not done is in the hands of a thread that runs.
    wait_until(a.num_done, a.num_rows, a.release)


@njit
def _write(a: Arguments, block: int, first: int, end: int, totals: Any) -> None:
    """Totals of a block of channels, of some rows, to where they belong."""
    for row in range(first, end):
        output = a.output + row * a.num_blocks * CHANNELS
        for at in range(0, CHANNELS, LANES):
            channel = block * CHANNELS + at
            value = v.load(totals, at) * v.load(a.scales, channel)
            if not v.is_none(a.bias):
                value = value + v.load(a.bias, channel)
            v.store(output, channel, value)
        totals = totals + CHANNELS


@njit
def _ahead(a: Arguments, block: int, tile: int) -> Any:
    """What is fetched while a tile is multiplied: halves of the block that this thread is likely to take
    next, which then need not be waited for. Further tiles fetch what is there already."""
    next_block = block + v.read_shared(a.num_workers)
    if tile >= 2 or next_block >= a.num_blocks:
        return a.weights + block * a.block
    return a.weights + (2 * next_block + tile) * (a.block // 2)


@njit
def _multiply_block(a: Arguments, block: int, totals: Any) -> None:
    """All rows with a block of channels, about equally many at once."""
    num_tiles = (a.num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    groups, weights = a.record // (a.group + HEADER_BYTES), a.weights + block * a.block
    for tile in range(num_tiles):
        first, end = share_of(a.num_rows, num_tiles, tile)
        rows, count, ahead = a.records + first * a.record, end - first, _ahead(a, block, tile)
        if a.by_group:
            multiply_by_group(count, rows, a.record, weights, groups, a.group, totals, ahead)
        else:
            multiply_by_channel(count, rows, a.record, weights, groups, a.group, totals, ahead)
        _write(a, block, first, end, totals)


_room_for_totals = v.room_for(ROWS_AT_ONCE * CHANNELS)


def _multiply(a: Arguments) -> None:
    v.fetch_add(a.num_workers, 1)
    totals = _room_for_totals()
    _quantize(a)
    for block in v.shared(a.next_block, a.num_blocks):
        _multiply_block(a, block, totals)


multiply = Loop(_multiply, Arguments, is_long=True)
"""Writes rows, quantised, times the weights."""


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
        self._where = self._packed, self._scales, NOWHERE if self._bias is None else self._bias
        self._sizes = self._num_blocks, self._packed.shape[1], group
        self._by_group = group_scales is not None

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
        first, activation, other = gating_of(rows, gate)
        gated = rows.new_empty(num_rows, num_features) if gate else rows
        record = record_bytes(num_features, self._group)
        records = torch.empty(num_rows * record, dtype=torch.uint8)
        num_threads, width = torch.get_num_threads(), self._num_blocks * CHANNELS
        output = torch.empty((num_rows, width), dtype=dtype)
        told = Arguments(
            first, gated, output, records, *self._where,
            num_rows, num_features, rows.stride(0), activation, other, record, releasing(),
            *self._sizes, self._by_group,
        )  # fmt: skip
        multiply.run(told, num_threads)
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
