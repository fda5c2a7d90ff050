"""Rows times weights, both in 8 bits, by groups of features.

A row is written as one record before it is multiplied: of each group its scale (float32), its correction
(int32) and its values (int8). A group's scale is its largest magnitude over 127, so that a value far
above all others coarsens the steps of its own group alone (real models have such outliers in some
channels). A gated row is one half of what a product left, after an activation, times the other half:
what the second product of a feed-forward network reads.

Every operation is rounded once, and their order is that of the groups: a row's result has the same bits
in whatever company it is computed. So few rows and many, on every machine with the instructions, are one
loop.

Weights lie in blocks of 32 channels; in a block group after group, and in those four features of each
channel, then the next four. They are stored with 128 added: the instruction multiplies unsigned by signed
bytes, and what that makes too much is one integer per row and group, where its sums begin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.compiled import Loop, releasing, threads_for
from engine.kernels.instructions import ROWS_AT_ONCE
from engine.kernels.integers import (
    CHANNELS,
    HEADER_BYTES,
    has_integer_products,
    larger_bits,
    largest_bits_of,
    multiply_by_channel,
    multiply_by_group,
    store_int8,
    to_whole,
)
from engine.kernels.records import NOWHERE, Bytes, Counter, Float32s, Floats


def reference(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    group_scales: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """Returns ``[num_rows, out_features]`` float32, before a bias is added. ``rows`` ``[num_rows,
    in_features]``; weights as ``PackedWeights`` takes them. Sums of integers are exact in any order."""
    filled = (0, -rows.shape[1] % group)
    groups = F.pad(rows.float(), filled).unflatten(1, (-1, group))
    weights = F.pad(values.double(), filled).unflatten(1, (-1, group))
    by = (groups.abs().amax(2) / 127).clamp_min(float(_SMALLEST_SCALE))
    quantized = (groups * (1 / by)[:, :, None]).round().double()
    total = torch.zeros(len(rows), len(values))
    for index in range(weights.shape[1]):
        whole = (quantized[:, index] @ weights[:, index].T).float()
        if group_scales is not None:
            whole = whole * group_scales[:, index].float()
        total = v.fma_of_tensors(whole, by[:, index, None], total)
    return total * scales


_ZERO_POINT = 128
_SMALLEST_SCALE = np.float32(1e-12)
_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(127.0)
_BLOCKS_AT_ONCE = 64
"""Weights are packed in slices of so many blocks, which bounds the memory that takes."""

# --- rows in 8 bits ---


class Gate(NamedTuple):
    """``activation``: of ``v.ACTIVATIONS``; ``is_first``: it is for the first half of a row."""

    activation: str
    is_first: bool


def _gating_of(rows: torch.Tensor, gate: Gate | None) -> tuple[torch.Tensor, int, int]:
    """Returns ``rows``, ``activation`` and ``other`` as a kernel is told them. ``rows`` ``[num_rows,
    num_features]``, or twice as many that ``gate`` halves."""
    if gate is None:
        return rows, 0, 0
    half, activation = rows.shape[1] // 2, v.ACTIVATIONS[gate.activation]
    if gate.is_first:
        return rows, activation, half
    return rows[:, half:], activation, -half


@njit
def _quantize_row(row: Any, num_features: int, group: int, record: Any) -> None:
    """Writes the record of ``num_features`` floats, a multiple of 16; a last group is filled with 0."""
    for first in range(0, num_features, group):
        end = min(first + group, num_features)
        most = v.splat(_ZERO)
        for at in range(first, end, LANES):
            most = larger_bits(v.magnitude(v.load(row, at)), most)
        scale = largest_bits_of(most) / _LARGEST
        if scale < _SMALLEST_SCALE:  # which what is no number is not
            scale = _SMALLEST_SCALE
        by, total = v.splat(_ONE / scale), v.splat(_ZERO)
        values = record + HEADER_BYTES
        for at in range(first, end, LANES):
            value = to_whole(v.load(row, at) * by)
            total = total + value
            store_int8(values + (at - first), value)
        for at in range(end, first + group, LANES):
            store_int8(values + (at - first), v.splat(_ZERO))
        v.float32s(record)[0] = scale
        v.int32s(record)[1] = -_ZERO_POINT * int(v.sum_of(total))
        record = values + group


@njit
def _gated_or_plain(a: Any, row: int) -> Any:
    """Returns where the row is that is to be quantised: in ``a.gated``, once it is gated, or where it
    was."""
    source = a.rows + row * a.row
    if a.activation == 0:
        return source
    target, other = a.gated + row * a.num_features, source + a.other
    for at in range(0, a.num_features, LANES):
        value = v.activated(a.activation, v.load(source, at))
        v.store(target, at, v.rounded(source, value) * v.load(other, at))
    return target


class GateArguments(NamedTuple):
    """``rows`` ``[num_rows, num_features]``, ``row`` features apart: the halves that ``activation`` is
    for, with the other halves ``other`` features further; ``gated`` ``[num_rows, num_features]``."""

    rows: Floats
    gated: Floats
    num_rows: int
    num_features: int
    row: int
    activation: int
    other: int
    next_row: Counter = 0


def _gate(a: GateArguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        _gated_or_plain(a, row)


gate_all = Loop(_gate, GateArguments)
"""Gates each row."""


def gate_rows(rows: torch.Tensor, how: Gate) -> torch.Tensor:
    """``rows`` ``[num_rows, 2 * num_features]``, of a type in ``KINDS``; features a multiple of 16, which
    lie together. Returns ``[num_rows, num_features]``, of the same type."""
    gated = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    first, activation, other = _gating_of(rows, how)
    num_rows, num_features = gated.shape
    arguments = GateArguments(
        first, gated, num_rows, num_features, rows.stride(0), activation, other
    )
    gate_all.run(arguments, threads_for(rows.numel()))
    return gated


# --- products ---


class Arguments(NamedTuple):
    """Rows as ``GateArguments`` has them, or as they are: ``activation`` 0, ``gated`` unused;
    ``records``: room for them in 8 bits, of ``record`` bytes each. ``weights`` ``[num_blocks, block]``
    bytes, of which groups have scales if ``by_group``; ``scales`` and ``bias`` (or NOWHERE): of
    channels; ``output`` ``[num_rows, num_blocks * 32]``; ``release`` as ``wait_until`` takes it."""

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
        _quantize_row(_gated_or_plain(a, row), a.num_features, a.group, record)
        v.fetch_add(a.num_done, 1)
    # Every row that is not done is in the hands of a thread that runs.
    v.wait_until(a.num_done, a.num_rows, a.release)


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
    """Returns what is fetched while a tile is multiplied: halves of the block that this thread is likely
    to take next, which then need not be waited for. Further tiles fetch what is there already."""
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
        first, end = v.share_of(a.num_rows, num_tiles, tile)
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
    """Weights in 8 bits, packed for products with rows.

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
        first, activation, other = _gating_of(rows, gate)
        gated = rows.new_empty(num_rows, num_features) if gate else rows
        record = -(-num_features // self._group) * (HEADER_BYTES + self._group)
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
        fours = (some.view(torch.uint8) ^ _ZERO_POINT).view(
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
