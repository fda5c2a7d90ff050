"""Squares of floats for attention: scores and weighted values with sums in registers, and rows turned
into columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm

# --- sums of products ---

_AT_ONCE = 2  # products of a sum in one round of a loop


def _add_all(
    tile: asm.Tile, builder: Any, sums: Any, count: Any, rows: list[Any], row_step: int,
    columns: Any, column_step: Any,
) -> None:  # fmt: skip
    """Adds ``count`` products, an even number, to each sum, one after another."""
    kind = count.type
    with cgutils.for_range(builder, builder.udiv(count, kind(_AT_ONCE))) as loop:
        for which in range(_AT_ONCE):
            index = asm.plus(builder, asm.times(builder, loop.index, _AT_ONCE), which)
            tile.add(sums, index, rows, kind(row_step), columns, column_step, asm.FLOAT32_NUMBERS)


def _scoring(num_queries: int) -> asm.Emit:
    def emit(builder: Any, keys: Any, dim: Any, queries: Any, out: Any, stride: Any) -> None:
        tile = asm.Tile(builder, num_queries, 2 * LANES)
        starts = [
            asm.plus(
                builder,
                builder.add(queries, asm.times(builder, dim, 16 * (query // 4))),
                4 * (query % 4),
            )
            for query in range(num_queries)
        ]
        sums = tile.sums(asm.constant(0.0))
        _add_all(tile, builder, sums, dim, starts, 16, keys, dim.type(8 * LANES))
        tile.write(sums, tile.rows(out, asm.times(builder, stride, 4)))

    return emit


score8, score4 = (asm.operation("int " * 5 + "-> none", _scoring(count)) for count in (8, 4))
"""``score8(keys, dim, queries, target, stride)`` writes eight queries' (or four's) products with twice
sixteen keys, ``stride`` floats from query to query. Queries lie by fours, of which each dimension's are
together; keys as ``transpose`` leaves them, twice sixteen of each dimension together. A sum runs over
dimensions, in their order."""


def _weighing(num_dims: int) -> asm.Emit:
    def emit(
        builder: Any, values: Any, dim: Any, weights: Any, stride: Any, count: Any, out: Any
    ) -> None:
        tile, row = asm.Tile(builder, 4, num_dims), asm.times(builder, dim, 4)
        places = tile.rows(out, row)
        sums, starts = tile.sums_at(places), tile.rows(weights, asm.times(builder, stride, 4))
        _add_all(tile, builder, sums, count, starts, 4, values, row)
        tile.write(sums, places)

    return emit


weigh64, weigh16 = (asm.operation("int " * 6 + "-> none", _weighing(dims)) for dims in (64, 16))
"""``weigh64(values, dim, weights, stride, count, target)`` adds four queries' weighted values, 64 (or 16)
dimensions of them, to the target, one of ``count`` keys after another. Values and targets are ``dim``
floats apart, weights ``stride`` from query to query."""


def _interleaved(builder: Any, source: Any, dim: Any, target: Any) -> None:
    """Sums are added by pairs, and pairs of pairs."""
    pairs = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
    fours = [2 * (lane // 4) + lane % 2 + LANES * (lane // 2 % 2) for lane in range(LANES)]

    def halves(a: Any, b: Any, which: list[int]) -> list[Any]:
        later = [lane + LANES // 2 for lane in which]
        return [
            builder.shuffle_vector(a, b, ir.Constant(asm.INTS, each)) for each in (which, later)
        ]

    with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
        at = builder.add(source, asm.times(builder, loop.index, 4 * LANES))
        rows = [
            asm.load_float32(builder, builder.add(at, asm.times(builder, dim, 4 * row)))
            for row in range(4)
        ]
        these, those = halves(rows[0], rows[1], pairs), halves(rows[2], rows[3], pairs)
        to = builder.add(target, asm.times(builder, loop.index, 16 * LANES))
        parts = [part for pair in zip(these, those, strict=True) for part in halves(*pair, fours)]
        for index, part in enumerate(parts):
            asm.write(builder, asm.plus(builder, to, 4 * LANES * index), part, 4)


interleave = asm.operation("int int int -> none", _interleaved)
"""``interleave(rows, dim, target)`` writes four rows of floats, one after another, as ``score8`` takes
them."""


# --- transposition ---


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """``rows[i]`` lane j becomes ``rows[j]`` lane i, by exchanging ever larger squares."""
    width = 1
    while width < LANES:
        low = [lane + (LANES - width if lane & width else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & width else width) for lane in range(LANES)]
        for index in range(LANES):
            if not index & width:
                pair = rows[index], rows[index + width]
                rows[index], rows[index + width] = (
                    builder.shuffle_vector(*pair, ir.Constant(asm.INTS, which))
                    for which in (low, high)
                )
        width *= 2
    return rows


def _transposing(
    itemsize: int,
    read: Callable[[Any, Any], Any],
    parts: Callable[[Any, Any], asm.Parts] = lambda _builder, row: [row],
) -> asm.Emit:
    """``read`` reads sixteen lanes of a row; ``parts`` makes floats of a column of them: rows of which
    several floats are in 32 bits are transposed before they are made floats."""

    def emit(builder: Any, source: Any, stride: Any, ahead: Any, target: Any, step: Any) -> None:
        rows, step = [], asm.times(builder, step, 4)
        for index in range(LANES):
            offset = asm.times(builder, stride, itemsize * index)
            rows.append(read(builder, builder.add(source, offset)))
            asm.fetch(builder, builder.add(ahead, offset))
        for row in _transposed(builder, rows):
            for part in parts(builder, row):
                asm.write(builder, target, part, 4)
                target = builder.add(target, step)

    return emit


def _read_whole(builder: Any, address: Any) -> Any:
    return asm.read(builder, address, asm.INTS, 1)


def _parts_float16(builder: Any, bits: Any) -> asm.Parts:
    kind = ir.VectorType(ir.HalfType(), LANES)
    pair = (
        builder.trunc(each, ir.VectorType(asm.INT16, LANES))
        for each in (bits, builder.lshr(bits, asm.whole_numbers(16)))
    )
    return [builder.fpext(builder.bitcast(each, kind), asm.FLOATS) for each in pair]


def _parts_float8(builder: Any, bits: Any) -> asm.Parts:
    codes = builder.bitcast(bits, ir.VectorType(asm.INT16, 2 * LANES))
    even = asm.float8_halves(builder, builder.shl(codes, asm.like(codes, 8)))
    pairs = [builder.bitcast(each, asm.INTS) for each in (even, asm.float8_halves(builder, codes))]
    narrow = ir.VectorType(asm.INT16, LANES)
    halves = [
        builder.trunc(pair if low else builder.lshr(pair, asm.whole_numbers(16)), narrow)
        for low in (True, False)
        for pair in pairs
    ]
    return [asm.float8_floats(builder, each) for each in halves]


_OF_ROWS = "int int int int int -> none"
_transpose_16 = asm.operation(
    _OF_ROWS, {dtype: _transposing(dtype.itemsize, load) for dtype, load in asm.LOADS.items()}
)
_transpose_more = asm.operation(
    _OF_ROWS,
    {
        torch.float32: _transposing(4, asm.load_float32),
        torch.bfloat16: _transposing(2, _read_whole, asm.both_bfloat16),
        torch.float16: _transposing(2, _read_whole, _parts_float16),
        torch.float8_e4m3fn: _transposing(1, _read_whole, _parts_float8),
    },
)
_columns_of_more = asm.operation(
    "int -> int",
    {dtype: lambda _b, at, more=4 // dtype.itemsize: at.type(more * LANES) for dtype in asm.LOADS},
)


@njit
def transpose(source: Any, stride: int, columns: int, ahead: Any, target: Any, step: int) -> None:
    """Writes sixteen rows of ``columns`` floats, ``stride`` of them apart, to float32 at ``target``, so
    that each column becomes sixteen floats one after another, ``step`` floats after the column before.
    Rows that lie at ``ahead`` as these do are fetched meanwhile."""
    done, more = 0, _columns_of_more(source)
    while done < columns:
        at, later, to = source + done, ahead + done, target + step * done
        if columns - done >= more:
            _transpose_more(at, stride, later, to, step)
            done += more
        else:
            _transpose_16(at, stride, later, to, step)
            done += LANES
