"""Rows times weights in few bits, by groups of features.

Rows are written as records before they are multiplied (``row_records``), or keep their floats, and
weights are made floats on the way.

Every operation is rounded once, and their order is that of the groups: a row's result has the same bits
in whatever company it is computed. So few rows and many, on every machine, are one loop; ``formats`` says
how weights lie, ``block_products`` what is computed with a block of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numba import njit

from compiled.records import Bytes, Counter, Int64s, Within
from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.amx_products import ROOM
from engine.kernels.block_products import MOST_ROWS, multiply_tile, rows_of_a_tile
from engine.kernels.compiled import Kernel, releasing
from engine.kernels.formats import CHANNELS, GROUP, Places
from engine.kernels.grouped_weight import GroupedWeight
from engine.kernels.instructions import ROWS_AT_ONCE
from engine.kernels.packing import PackedGroups, Weights
from engine.kernels.records import NOWHERE, Floats
from engine.kernels.routes import PLACE_INTS, SEGMENT_INTS, Routes
from engine.kernels.row_records import (
    SMALLEST_SCALE,
    Form,
    Gate,
    Rows,
    form_of,
    gated_or_plain,
    quantize_row,
    rows_of,
    widen_row,
)


def reference(
    rows: torch.Tensor, weight: GroupedWeight, keeps_inputs: bool = False
) -> torch.Tensor:
    """Returns ``[num_rows, out_features]`` float32, before a bias is added. ``rows`` ``[num_rows,
    in_features]``. Sums of integers are exact in any order."""
    if keeps_inputs:
        return _reference_of_floats(rows, weight)
    filled = (0, -rows.shape[1] % GROUP)
    inputs, codes = (F.pad(each, filled) for each in (rows.float(), weight.values))
    span = GROUP if weight.scales is not None else inputs.shape[1]
    part = weight.inner_span or span
    total = torch.zeros(len(rows), len(codes))
    for first in range(0, inputs.shape[1], span):
        group = inputs[:, first : first + span]
        by = (group.abs().amax(1, keepdim=True) / 127).clamp_min(float(SMALLEST_SCALE))
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


# --- products ---


class Pairs(NamedTuple):
    """Which rows each expert is multiplied with, as ``routes`` writes them, or NOWHERE: all rows with one
    matrix. Every row has ``num_copies`` places, ``total`` in all."""

    segments: Int64s
    places: Int64s
    order: Int64s
    num_copies: int
    total: int


class Arguments(NamedTuple):
    """``records``: room for rows as they are multiplied, in tiles of about as many: of each unit those of
    a tile's rows lie together. ``output`` ``[pairs.total, weights.num_blocks * 32]``; ``release`` as
    ``wait_until`` takes it."""

    rows: Within[Rows]
    form: Within[Form]
    weights: Within[Weights]
    places: Within[Places]
    pairs: Within[Pairs]
    records: Bytes
    output: Floats
    num_threads: int
    release: int
    next_row: Counter = 0
    num_done: Counter = 0
    next_run: Counter = 0


_ITEMS_PER_THREAD = 4
"""At least, if there are as many: layers with few blocks are shared out by rows, too."""


@njit
def _tiles(a: Arguments, num_rows: int) -> int:
    """Returns in how many tiles rows are divided; in more where there are few blocks for the threads."""
    most = rows_of_a_tile(a.weights.blocks)
    if a.weights.num_blocks < _ITEMS_PER_THREAD * a.num_threads:
        most = min(most, ROWS_AT_ONCE)
    return (num_rows + most - 1) // most


@njit
def _place(a: Arguments, copy: int) -> tuple[Any, int]:
    """Returns where a record is, and the bytes from one unit of it to the next; no bytes: it is for no
    expert."""
    at, first, end = copy, 0, a.rows.num_rows
    if not v.is_none(a.pairs.places):
        place = a.pairs.places + PLACE_INTS * copy
        at, first, end = place[0], place[1], place[2]
    if first == end:
        return a.records, 0
    num_rows, unit = end - first, a.form.size // a.form.num_units
    tile = ((at - first + 1) * _tiles(a, num_rows) - 1) // num_rows
    begin, last = v.share_of(num_rows, _tiles(a, num_rows), tile)
    here = (first + begin) * a.form.size + (at - first - begin) * unit
    return a.records + here, (last - begin) * unit


_ROWS_OF_A_RUN = 8
"""At most. Records of rows side by side share lines of the cache: one thread writes several."""


@njit
def _write_records(a: Arguments) -> None:
    """All threads share the rows; none goes on before the last is done. Few rows are divided by their
    units, whose records lie apart."""
    num_rows, num_units, num_copies = a.rows.num_rows, a.form.num_units, a.pairs.num_copies
    num_parts = min(num_units, a.num_threads) if num_rows < _ROWS_OF_A_RUN * a.num_threads else 1
    unit, num_items = a.form.size // num_units, num_rows * num_parts
    run = min((num_items + a.num_threads - 1) // a.num_threads, _ROWS_OF_A_RUN)
    for item in v.shared(a.next_row, num_items, run):
        row, units = item % num_rows, v.share_of(num_units, num_parts, item // num_rows)
        begin, end = units[0] * GROUP, a.rows.num_features
        if units[1] < num_units:
            end = units[1] * GROUP
        source = gated_or_plain(a.rows, row, begin, end)
        done, done_step = a.records, 0
        for copy in range(row * num_copies, (row + 1) * num_copies):
            record, step = _place(a, copy)
            if step == 0:
                continue
            record = record + units[0] * step
            if done_step != 0:
                for number in range(units[1] - units[0]):
                    _copy(done + number * done_step, record + number * step, unit)
            elif a.form.group == 0:
                widen_row(source, begin, end, record, step)
            else:
                quantize_row(a.weights.blocks, a.form, source, begin, end, record, step)
            done, done_step = record, step
        v.fetch_add(a.num_done, 1)
    # Every item that is not done is in the hands of a thread that runs.
    v.wait_until(a.num_done, num_items, a.release)


@njit
def _copy(source: Any, target: Any, count: int) -> None:
    these, those = v.int32s(source), v.int32s(target)
    for at in range(count // 4):
        those[at] = these[at]


@njit
def _segment(a: Arguments, number: int) -> tuple[int, int, int]:
    """Returns the first block of an expert, and the rows that it is multiplied with."""
    if v.is_none(a.pairs.segments):
        return 0, 0, a.pairs.total
    segment = a.pairs.segments + (1 + SEGMENT_INTS * number)
    return segment[0] * a.weights.num_blocks, segment[1], segment[2]


@njit
def _num_segments(a: Arguments) -> int:
    return 1 if v.is_none(a.pairs.segments) else a.pairs.segments[0]


@njit
def _write(a: Arguments, block: int, column: int, first: int, end: int, totals: Any) -> None:
    """Totals of a block of channels, the ``column``-th of its expert, of some rows, to where they
    belong."""
    for row in range(first, end):
        which = row if v.is_none(a.pairs.order) else a.pairs.order[row]
        output = a.output + (which * a.weights.num_blocks + column) * CHANNELS
        for at in range(0, CHANNELS, LANES):
            channel = block * CHANNELS + at
            value = v.load(totals, at) * v.load(a.weights.scales, channel)
            if not v.is_none(a.weights.bias):
                value = value + v.load(a.weights.bias, channel)
            v.store(output, at, value)
        totals = totals + CHANNELS


@njit
def _num_parts(a: Arguments) -> int:
    """Returns into how many parts the tiles of a segment are divided."""
    if not v.is_none(a.pairs.segments):
        return 1
    num_blocks = a.weights.num_blocks
    wanted = (_ITEMS_PER_THREAD * a.num_threads + num_blocks - 1) // num_blocks
    return max(1, min(wanted, _tiles(a, a.pairs.total)))


@njit
def _ahead(weights: Weights, block: int, next_block: int, left: int, halving: int) -> Any:
    """Returns what is fetched while a tile is multiplied after which so many are left: the block that is
    multiplied next, half of it by each of the last two; those before fetch what is there already."""
    size = weights.block_bytes
    if left >= 2:
        return weights.blocks + block * size
    return weights.blocks + next_block * size + (halving - left) * (size >> halving)


@njit
def _block(a: Arguments, item: int, num_parts: int) -> int:
    """Returns an item's block among those of all experts."""
    num_blocks = a.weights.num_blocks
    return _segment(a, item // num_blocks // num_parts)[0] + item % num_blocks


@njit(inline="always")
def _multiply_item(a: Arguments, item: int, next_item: int, num_parts: int, totals: Any) -> None:
    """A part of a segment's tiles, of about as many rows each, with a block of channels. Items are the
    blocks of one part after another."""
    weights, num_blocks = a.weights, a.weights.num_blocks
    column, which = item % num_blocks, item // num_blocks
    _, first_row, last_row = _segment(a, which // num_parts)
    block, next_block = _block(a, item, num_parts), _block(a, next_item, num_parts)
    num_rows = last_row - first_row
    num_tiles = _tiles(a, num_rows)
    tiles = v.share_of(num_tiles, num_parts, which % num_parts)
    halving = 1 if tiles[1] - tiles[0] > 1 else 0
    for tile in range(tiles[0], tiles[1]):
        first, end = v.share_of(num_rows, num_tiles, tile)
        first, end = first_row + first, first_row + end
        here, rows = weights.blocks + block * weights.block_bytes, a.records + first * a.form.size
        ahead = _ahead(weights, block, next_block, tiles[1] - 1 - tile, halving)
        multiply_tile(here, a.places, end - first, rows, a.form.size, totals, ahead, halving)
        _write(a, block, column, first, end, totals)


_FETCHED_FIRST = 1 << 13
"""Bytes of a thread's first block that are fetched while rows are written: more would be waited for."""
_room_for_totals = v.room_for(MOST_ROWS * CHANNELS + ROOM)


def _multiply(a: Arguments) -> None:
    totals, num_parts = _room_for_totals(), _num_parts(a)
    num_items = _num_segments(a) * num_parts * a.weights.num_blocks
    item, end = v.take_run(a.next_run, num_items, a.num_threads)
    if item < end:
        size = a.weights.block_bytes
        first = a.weights.blocks + _block(a, item, num_parts) * size
        v.fetch(v.float32s(first), min(size, _FETCHED_FIRST) // 4)
    _write_records(a)
    while item < end:
        following, next_end = item + 1, end
        if following == end:  # what comes after a run is known before its last block is multiplied
            following, next_end = v.take_run(a.next_run, num_items, a.num_threads)
        _multiply_item(a, item, following if following < next_end else item, num_parts, totals)
        item, end = following, next_end


multiply = Kernel(_multiply, is_long=True)
"""Writes rows, as they are multiplied, times the weights."""


def product(
    rows: torch.Tensor,
    packed: PackedGroups,
    dtype: torch.dtype,
    gate: Gate | None = None,
    keeps_inputs: bool = False,
    routes: Routes | None = None,
) -> torch.Tensor:
    """``rows`` ``[num_rows, in_features]``, or twice as many features that are to be gated, of a type in
    ``KINDS``. Returns ``[num_rows, out_features]``. ``keeps_inputs``: rows are not rounded to 8 bits.
    ``routes``: of rows, or of their pairs, to the experts whose weights are ``packed``; the result has a
    row for each pair: ``[num_pairs, out_features]``, those of one expert."""
    told_rows = rows_of(_readable(rows, gate), gate)
    num_rows = told_rows.num_rows
    if routes is None:
        pairs = Pairs(NOWHERE, NOWHERE, NOWHERE, num_copies=1, total=num_rows)
    else:
        num_copies = routes.num_pairs // max(num_rows, 1)
        pairs = Pairs(routes.segments, routes.places, routes.order, num_copies, routes.num_pairs)
    kind, form = form_of(packed.format, packed.places.num_groups, keeps_inputs)
    width, num_threads = packed.weights.num_blocks * CHANNELS, torch.get_num_threads()
    told = Arguments(
        rows=told_rows,
        form=form,
        weights=packed.weights,
        places=packed.places,
        pairs=pairs,
        records=torch.empty(pairs.total * form.size, dtype=torch.uint8),
        output=torch.empty((pairs.total, width), dtype=dtype),
        num_threads=num_threads,
        release=releasing(),
    )
    multiply.run(told, num_threads, kind)
    output, num_features = told.output, packed.out_features
    return output if width == num_features else output[:, :num_features]


def _readable(rows: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """Features lie together, and fill sixteens."""
    missing = -rows.shape[1] % LANES
    if missing and gate is None:
        return F.pad(rows, (0, missing))
    return rows if rows.stride(1) == 1 else rows.contiguous()
