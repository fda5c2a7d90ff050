"""Rows times weights in few bits, by groups of features.

A row is written as one record before it is multiplied: of each group its scale (float32), two sums and
its values (int8). A group's scale is its largest magnitude over 127, so that a value far above all
others coarsens the steps of its own group alone (real models have such outliers in some channels). Or
rows keep their floats, as float32, and weights are made floats while they are multiplied. A gated row is
one half of what a product left, after an activation, times the other half: what the second product of a
feed-forward network reads.

Every operation is rounded once, and their order is that of the groups: a row's result has the same bits
in whatever company it is computed. So few rows and many, on every machine, are one loop; ``formats`` says
how weights lie, ``integers`` what is computed with a block of them.
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
from engine.kernels.formats import CHANNELS, GROUP, Format
from engine.kernels.grouped_weight import GroupedWeight
from engine.kernels.instructions import ROWS_AT_ONCE
from engine.kernels.integers import (
    HEADER_BYTES,
    LIFT,
    half_at,
    larger_bits,
    largest_bits_of,
    multiply_add,
    multiply_tile,
    store_int8,
    to_whole,
)
from engine.kernels.packing import PackedGroups
from engine.kernels.panels import PANEL_FLOATS, PANEL_GROUPS, multiply_panel, unpack
from engine.kernels.records import NOWHERE, Bytes, Counter, Float32s, Floats, Formatted, Int64s


def reference(
    rows: torch.Tensor, weight: GroupedWeight, keeps_inputs: bool = False
) -> torch.Tensor:
    """Returns ``[num_rows, out_features]`` float32, before a bias is added. ``rows`` ``[num_rows,
    in_features]``. Sums of integers are exact in any order."""
    if keeps_inputs:
        return _reference_of_floats(rows, weight)
    filled = (0, -rows.shape[1] % GROUP)
    inputs, codes = (F.pad(each, filled) for each in (rows.float(), weight.codes))
    span = GROUP if weight.scales is not None else inputs.shape[1]
    part = weight.inner_span or span
    total = torch.zeros(len(rows), len(codes))
    for first in range(0, inputs.shape[1], span):
        group = inputs[:, first : first + span]
        by = (group.abs().amax(1, keepdim=True) / 127).clamp_min(float(_SMALLEST_SCALE))
        values = (group * (1 / by)).round().double()
        for at in range(first, first + span, part):
            mine = values[:, at - first : at - first + part]
            these = codes[:, at : at + part].double() - weight.zero
            scale, least = weight.weighing(at)
            found = (mine @ these.T).float()
            if scale is not None:
                found = found * scale
            if least is not None:
                found = v.fma_of_tensors(least, mine.sum(1, keepdim=True).float(), found)
            total = v.fma_of_tensors(found, by, total)
    return total if weight.channel_scales is None else total * weight.channel_scales


def _reference_of_floats(rows: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """Features are added one after another."""
    weights = weight._replace(channel_scales=None).dequantized()
    total = torch.zeros(len(rows), len(weights))
    for feature in range(rows.shape[1]):
        total = v.fma_of_tensors(rows[:, feature, None].float(), weights[:, feature], total)
    return total if weight.channel_scales is None else total * weight.channel_scales


_SMALLEST_SCALE = np.float32(1e-12)
_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(127.0)

# --- rows as they are multiplied ---


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
def _quantize_row(a: Any, row: Any, record: Any, step: int) -> None:
    """Writes the record of a row whose features are a multiple of 16, groups ``step`` bytes apart; a last
    group is filled with 0."""
    for first in range(0, a.num_features, a.group):
        end = min(first + a.group, a.num_features)
        most = v.splat(_ZERO)
        for at in range(first, end, LANES):
            most = larger_bits(v.magnitude(v.load(row, at)), most)
        scale = largest_bits_of(most) / _LARGEST
        if scale < _SMALLEST_SCALE:  # which what is no number is not
            scale = _SMALLEST_SCALE
        by = v.splat(_ONE / scale)
        values = record + HEADER_BYTES
        half = to_whole(v.load(row, first) * by)
        store_int8(values, half)
        rest = v.splat(_ZERO)
        for at in range(first + LANES, end, LANES):
            value = to_whole(v.load(row, at) * by)
            rest = rest + value
            store_int8(values + (at - first), value)
        for at in range(end, first + a.group, LANES):
            store_int8(values + (at - first), v.splat(_ZERO))
        v.float32s(record)[0] = scale
        v.float32s(record)[1] = v.sum_of(half + rest)
        if a.has_halves:
            v.int32s(record)[2] = a.lift - a.zero * int(v.sum_of(half))
            v.int32s(record)[3] = a.lift - a.zero * int(v.sum_of(rest))
        else:
            v.int32s(record)[2] = a.lift - a.zero * int(v.sum_of(half + rest))
        record = record + step


@njit
def _widen_row(a: Any, row: Any, record: Any, step: int) -> None:
    """Writes the same row as float32."""
    for first in range(0, a.num_features, GROUP):
        target = v.float32s(record)
        for at in range(0, GROUP, LANES):
            is_there = first + at < a.num_features
            v.store(target, at, v.load(row, first + at) if is_there else v.splat(_ZERO))
        record = record + step


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
    ``records``: room for them as they are multiplied, of ``record`` bytes each, in ``num_tiles`` tiles of
    about as many rows: of each of the ``num_units`` units of a record those of a tile's rows lie
    together. ``weights`` ``[num_blocks, block]`` bytes, as ``PackedGroups`` has them; ``scales`` and
    ``bias`` (or NOWHERE): of channels; ``output`` ``[num_rows, num_blocks * 32]``; ``group``: features
    that share a scale in a row, 0: rows keep their floats; ``zero``: of the weights' format; ``lift``: as
    ``integers`` has it, or 0; ``has_halves``: whether halves of groups are summed apart; ``release`` as
    ``wait_until`` takes it. The rest: of ``Places``."""

    rows: Floats
    gated: Floats
    output: Floats
    records: Bytes
    weights: Formatted
    scales: Float32s
    bias: Float32s
    num_rows: int
    num_features: int
    row: int
    activation: int
    other: int
    num_tiles: int
    record: int
    num_units: int
    group: int
    zero: int
    lift: int
    has_halves: bool
    release: int
    num_threads: int
    num_blocks: int
    block: int
    num_groups: int
    first_group: int
    group_stride: int
    first_outer: int
    outer_stride: int
    outer_shift: int
    next_row: Counter = 0
    num_done: Counter = 0
    next_run: Counter = 0


@njit
def _write_records(a: Arguments) -> None:
    """All threads share the rows; none goes on before the last is done."""
    unit = a.record // a.num_units
    for row in v.shared(a.next_row, a.num_rows):
        tile = ((row + 1) * a.num_tiles - 1) // a.num_rows
        first, end = v.share_of(a.num_rows, a.num_tiles, tile)
        record, step = a.records + (first * a.record + (row - first) * unit), (end - first) * unit
        source = _gated_or_plain(a, row)
        if a.group == 0:
            _widen_row(a, source, record, step)
        else:
            _quantize_row(a, source, record, step)
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
def _ahead(a: Arguments, block: int, next_block: int, tile: int, halving: int) -> Any:
    """Returns what is fetched while a tile is multiplied: the block that is multiplied next, half of it
    each if there are several tiles, of which further ones fetch what is there already."""
    if tile >= 2:
        return a.weights + block * a.block
    return a.weights + next_block * a.block + tile * (a.block >> halving)


@njit
def _multiply_block(a: Arguments, block: int, next_block: int, totals: Any) -> None:
    """All rows with a block of channels, about equally many at once."""
    halving = 1 if a.num_tiles > 1 else 0
    for tile in range(a.num_tiles):
        first, end = v.share_of(a.num_rows, a.num_tiles, tile)
        multiply_tile(
            a.weights + block * a.block, end - first, a.records + first * a.record, a.record,
            a.num_groups, a.first_group, a.group_stride, a.first_outer, a.outer_stride,
            a.outer_shift, totals, _ahead(a, block, next_block, tile, halving), halving,
        )  # fmt: skip
        _write(a, block, first, end, totals)


_room_for_totals = v.room_for(ROWS_AT_ONCE * CHANNELS)


def _multiply(a: Arguments) -> None:
    totals = _room_for_totals()
    _write_records(a)
    for first, end in v.shared_runs(a.next_run, a.num_blocks, a.num_threads):
        for block in range(first, end):
            _multiply_block(a, block, min(block + 1, end - 1), totals)


multiply = Loop(_multiply, Arguments, is_long=True)
"""Writes rows, as they are multiplied, times the weights."""

_TILES_OF_AN_ITEM = 64
"""Tiles that a thread takes on at a time: their records stay in the second cache."""
_ITEMS_PER_THREAD = 4
"""At least, if there are as many: layers with few blocks are shared out by rows, too."""
_room_for_panel = v.room_for(PANEL_FLOATS)
_room_for_item = v.room_for(_TILES_OF_AN_ITEM * ROWS_AT_ONCE * CHANNELS)


@njit
def _add_panel(
    a: Arguments, tiles: tuple[int, int], groups: tuple[int, int], panel: Any, totals: Any
) -> None:
    """Adds to the totals of some tiles their products with some groups, unpacked."""
    first, end = groups
    row = v.share_of(a.num_rows, a.num_tiles, tiles[0])[0]
    for tile in range(tiles[0], tiles[1]):
        num_rows = a.num_rows * (tile + 1) // a.num_tiles - row
        records = a.records + (row * a.record + first * num_rows * (HEADER_BYTES + GROUP))
        multiply_panel(a.weights, num_rows, panel, records, end - first, totals)
        totals, row = totals + num_rows * CHANNELS, row + num_rows


@njit
def _multiply_item(
    a: Arguments, block: int, tiles: tuple[int, int], panel: Any, totals: Any
) -> None:
    """Some tiles with a block of channels."""
    first = v.share_of(a.num_rows, a.num_tiles, tiles[0])[0]
    end = v.share_of(a.num_rows, a.num_tiles, tiles[1])[0]
    for at in range(0, (end - first) * CHANNELS, LANES):
        v.store(totals, at, v.splat(_ZERO))
    num_panels = (a.num_groups + PANEL_GROUPS - 1) // PANEL_GROUPS
    for number in range(num_panels):
        groups = v.share_of(a.num_groups, num_panels, number)
        unpack(
            a.weights + block * a.block, panel, groups[0], groups[1], a.first_group,
            a.group_stride, a.first_outer, a.outer_stride, a.outer_shift,
        )  # fmt: skip
        _add_panel(a, tiles, groups, panel, totals)
    _write(a, block, first, end, totals)


def _multiply_many(a: Arguments) -> None:
    panel, totals = _room_for_panel(), _room_for_item()
    wanted = (_ITEMS_PER_THREAD * a.num_threads + a.num_blocks - 1) // a.num_blocks
    least = (a.num_tiles + _TILES_OF_AN_ITEM - 1) // _TILES_OF_AN_ITEM
    num_parts = max(least, min(wanted, a.num_tiles))
    _write_records(a)
    for item in v.shared(a.next_run, a.num_blocks * num_parts):
        tiles = v.share_of(a.num_tiles, num_parts, item // a.num_blocks)
        _multiply_item(a, item % a.num_blocks, tiles, panel, totals)


multiply_many = Loop(_multiply_many, Arguments, is_long=True)
"""The same for many rows, and weights whose codes are not bytes: a block is unpacked first."""
_MANY_ROWS = 24
"""From so many rows on unpacking pays; they are divided into tiles of at least ``LEAST_ROWS``."""


def _is_unpacked(kind: Format) -> bool:
    return kind.bits < 8 and kind.has_scales and kind.inputs == "int8"


def product(
    rows: torch.Tensor,
    packed: PackedGroups,
    dtype: torch.dtype,
    gate: Gate | None = None,
    keeps_inputs: bool = False,
) -> torch.Tensor:
    """``rows`` ``[num_rows, in_features]``, or twice as many features that are to be gated, of a type in
    ``KINDS``. Returns ``[num_rows, out_features]``. ``keeps_inputs``: rows are not rounded to 8 bits."""
    rows = _readable(rows, gate)
    num_rows, num_features = len(rows), rows.shape[1] // (2 if gate else 1)
    first, activation, other = _gating_of(rows, gate)
    gated = rows.new_empty(num_rows, num_features) if gate else rows
    kind, group, record, num_units = _record_of(packed, keeps_inputs)
    records = torch.empty(num_rows * record, dtype=torch.uint8)
    output = torch.empty((num_rows, packed.num_blocks * CHANNELS), dtype=dtype)
    num_threads = torch.get_num_threads()
    told = Arguments(
        first, gated, output, records, packed.blocks, packed.scales,
        NOWHERE if packed.bias is None else packed.bias,
        num_rows, num_features, rows.stride(0), activation, other, -(-num_rows // ROWS_AT_ONCE),
        record, num_units,
        group, kind.zero, LIFT if kind.has_scales else 0, kind.num_parts == 2, releasing(), num_threads,
        packed.num_blocks, packed.blocks.shape[1], *packed.places,
    )  # fmt: skip
    is_many = num_rows >= _MANY_ROWS and _is_unpacked(kind)
    (multiply_many if is_many else multiply).run(told, num_threads, kind)
    width = packed.out_features
    return output if output.shape[1] == width else output[:, :width]


def _record_of(packed: PackedGroups, keeps_inputs: bool) -> tuple[Any, int, int, int]:
    """Returns the format that rows are multiplied with, features of theirs that share a scale (0: they
    keep their floats), the bytes of a row's record, and in how many units it is divided."""
    num_groups = packed.places.num_groups
    if keeps_inputs:
        return packed.format._replace(inputs="float32"), 0, 4 * num_groups * GROUP, num_groups
    if packed.format.has_scales:
        return packed.format, GROUP, num_groups * (HEADER_BYTES + GROUP), num_groups
    return packed.format, num_groups * GROUP, HEADER_BYTES + num_groups * GROUP, 1


def _readable(rows: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """Features lie together, and fill sixteens."""
    missing = -rows.shape[1] % LANES
    if missing and gate is None:
        return F.pad(rows, (0, missing))
    return rows if rows.stride(1) == 1 else rows.contiguous()


# --- rows of the weights themselves ---


class LookUpArguments(NamedTuple):
    """``ids`` ``[num_rows]``: output channels, whose weights become rows of ``output`` ``[num_rows,
    num_groups * 32]``. Weights as ``Arguments`` has them, of ``bits`` bits with ``zero``, ``inner``,
    ``has_minima``, ``has_zeros`` and ``has_scales`` of their ``Format``."""

    output: Floats
    ids: Int64s
    weights: Bytes
    scales: Float32s
    num_rows: int
    bits: int
    zero: int
    inner: int
    has_minima: bool
    has_zeros: bool
    has_scales: bool
    block: int
    num_groups: int
    first_group: int
    group_stride: int
    first_outer: int
    outer_stride: int
    outer_shift: int
    next_row: Counter = 0


@njit
def _code(a: Any, group: Any, lane: int, half: int, feature: int) -> int:
    """Returns the code of a feature of the channel ``lane`` of sixteen."""
    four, place = feature // 4, 4 * lane + feature % 4
    if a.bits == 8:
        return int(group[64 * (2 * four + half) + place])
    code = (int(group[64 * four + place]) >> (4 * half)) & 15
    high = a.bits - 4
    if high > 0:
        index, per_plane = 2 * four + half, 8 // high
        plane = group[64 * (8 + index // per_plane) + place]
        code += ((int(plane) >> (high * (index % per_plane))) & ((1 << high) - 1)) << 4
    return code


@njit
def _steps(a: Any, group: Any, outer: Any, channel: int, part: int) -> tuple[Any, Any, Any]:
    """Returns scale, minimum and zero of a channel in a part of a group."""
    if not a.has_scales:
        return _ONE, _ZERO, a.zero
    scale = half_at(outer + 2 * channel)
    least, zero = _ZERO, a.zero
    if a.has_minima:
        least = half_at(outer + (64 + 2 * channel))
    if a.has_zeros:
        zero += int(outer[64 + channel])
    if a.inner:
        numbers = group + 128 * a.bits
        number = int(numbers[32 * part + channel])
        if a.inner == 16 and number > 127:
            number -= 256
        scale = scale * np.float32(number)
        if a.has_minima:
            least = least * np.float32(int(numbers[32 * (GROUP // a.inner) + channel]))
    return scale, least, zero


_room_for_group = v.room_for(GROUP)


def _look_up(a: LookUpArguments) -> None:
    room = _room_for_group()
    for row in v.shared(a.next_row, a.num_rows):
        token = a.ids[row]
        channel = token % CHANNELS
        block = a.weights + (token // CHANNELS) * a.block
        by = v.splat(a.scales[token])
        for index in range(a.num_groups):
            group = block + (a.first_group + index * a.group_stride)
            outer = block + (a.first_outer + (index >> a.outer_shift) * a.outer_stride)
            for feature in range(GROUP):
                part = feature // a.inner if a.inner else 0
                scale, least, zero = _steps(a, group, outer, channel, part)
                code = _code(a, group, channel % LANES, channel // LANES, feature)
                room[feature] = multiply_add(np.float32(code - zero), scale, least)
            for at in range(0, GROUP, LANES):
                target = row * a.num_groups * GROUP + index * GROUP + at
                v.store(a.output, target, v.load(room, at) * by)


look_up_all = Loop(_look_up, LookUpArguments)
"""Writes the weights of some channels."""


def look_up(packed: PackedGroups, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``ids`` int64, each below ``out_features``. Returns their weights ``[.., in_features]``."""
    flat = ids.reshape(-1)
    kind, places = packed.format, packed.places
    output = torch.empty(len(flat), places.num_groups * GROUP, dtype=dtype)
    told = LookUpArguments(
        output, flat, packed.blocks, packed.scales, len(flat), kind.bits, kind.zero, kind.inner,
        kind.offset == "minima", kind.offset == "zeros", kind.has_scales,
        packed.blocks.shape[1], *places,
    )  # fmt: skip
    look_up_all.run(told, threads_for(output.numel()))
    return output[:, : packed.in_features].view(*ids.shape, packed.in_features)
