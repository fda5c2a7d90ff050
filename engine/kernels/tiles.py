"""Squares of floats for attention: scores and weighted values with sums in registers, and rows turned
into columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels.attention_tiles import QUERY_MULTIPLE

# --- sums of products ---

_AT_ONCE = 2  # products of a sum in one round of a loop
_LINE = 64  # bytes
# Columns of a tile of four rows whose sums there are registers for.
_WIDTH = 64 if asm.has_wide_registers() else LANES


def _add_all(
    tile: asm.Tile, builder: Any, sums: Any, count: Any, rows: list[Any], row_step: int,
    columns: Any, column_step: Any, numbers: asm.Numbers, fetch: Callable[[Any], None],
) -> None:  # fmt: skip
    """Adds ``count`` products, an even number, to each sum, one after another; ``fetch`` fetches some of
    what is read next, by the round: all at once it would be in the way of what is read now."""
    kind = count.type
    with cgutils.for_range(builder, builder.udiv(count, kind(_AT_ONCE))) as loop:
        fetch(loop.index)
        for which in range(_AT_ONCE):
            index = asm.plus(builder, asm.times(builder, loop.index, _AT_ONCE), which)
            tile.add(sums, index, rows, kind(row_step), columns, column_step, numbers)


def _scoring(num_queries: int, itemsize: int) -> asm.Emit:
    at_once = num_queries if _WIDTH > LANES else QUERY_MULTIPLE

    def emit(
        builder: Any,
        ahead: Any,
        also: Any,
        keys: Any,
        dim: Any,
        queries: Any,
        out: Any,
        stride: Any,
    ) -> None:
        def fetch(number: Any) -> None:
            offset = asm.times(builder, number, _AT_ONCE * LANES * itemsize)
            for group in (ahead, also):
                for line in range(0, _AT_ONCE * LANES * itemsize, _LINE):
                    asm.fetch(builder, asm.plus(builder, builder.add(group, offset), line))

        tile = asm.Tile(builder, at_once, min(2 * LANES, _WIDTH))
        starts = [
            asm.plus(
                builder,
                builder.add(queries, asm.times(builder, dim, 16 * (query // 4))),
                4 * (query % 4),
            )
            for query in range(num_queries)
        ]
        places = asm.Tile(builder, num_queries, 0).rows(out, asm.times(builder, stride, 4))
        step = dim.type(8 * LANES)
        for first in range(0, num_queries, at_once):
            mine = slice(first, first + at_once)
            for column in range(0, 2 * LANES, _WIDTH):
                sums, at = tile.sums(asm.constant(0.0)), asm.plus(builder, keys, 4 * column)
                numbers = asm.FLOAT32_NUMBERS
                _add_all(tile, builder, sums, dim, starts[mine], 16, at, step, numbers, fetch)
                tile.write(sums, [asm.plus(builder, each, 4 * column) for each in places[mine]])

    return emit


score8, score4 = (
    asm.operation(
        "int " * 7 + "-> none", {dtype: _scoring(count, dtype.itemsize) for dtype in asm.LOADS}
    )
    for count in (8, 4)
)
"""``score8(ahead, also, keys, dim, queries, target, stride)`` writes eight queries' (or four's) products
with twice sixteen keys, ``stride`` floats from query to query. Queries lie by fours, of which each
dimension's are together; keys as ``transpose`` leaves them, twice sixteen of each dimension together. A
sum runs over dimensions, in their order. Sixteen keys at ``ahead`` and ``also`` are fetched meanwhile."""


def _weighing(num_dims: int, ahead_size: int, dtype: torch.dtype, num_queries: int) -> asm.Emit:
    """``ahead_size``: bytes of a number of what is fetched."""
    load, width = asm.LOADS[dtype], min(num_dims, _WIDTH)
    numbers = asm.FLOAT32_NUMBERS._replace(
        bytes=dtype.itemsize, column=lambda builder, at: [load(builder, at)]
    )

    def emit(
        builder: Any, ahead: Any, values: Any, dim: Any, weights: Any, stride: Any, out: Any
    ) -> None:
        def fetch(number: Any, first: int) -> None:
            for key in range(_AT_ONCE):
                which = asm.plus(builder, asm.times(builder, number, _AT_ONCE), key)
                place = builder.add(ahead, builder.mul(which, asm.times(builder, dim, ahead_size)))
                for line in range(first * ahead_size, (first + width) * ahead_size, _LINE):
                    asm.fetch(builder, asm.plus(builder, place, line))

        tile = asm.Tile(builder, num_queries, width)
        rows = tile.rows(weights, asm.times(builder, stride, 4))
        step = asm.times(builder, dim, dtype.itemsize)
        for first in range(0, num_dims, width):
            places = tile.rows(asm.plus(builder, out, 4 * first), asm.times(builder, dim, 4))
            sums, at = tile.sums_at(places), asm.plus(builder, values, dtype.itemsize * first)
            told = dim.type(LANES), rows, 4, at, step, numbers
            _add_all(tile, builder, sums, *told, partial(fetch, first=first))
            tile.write(sums, places)

    return emit


def _of_few(emit_for: Callable[[int], asm.Emit]) -> asm.Emit:
    """The last value that is given is the number of queries, up to four; one is computed as two are."""

    def emit(builder: Any, *values: Any) -> None:
        *told, num_queries = values
        least = builder.icmp_signed("<", num_queries, num_queries.type(2))
        counted = builder.select(least, num_queries.type(2), num_queries)
        asm.by_rows(emit_for, range(2, QUERY_MULTIPLE + 1), builder, counted, *told)

    return emit


def _by_kinds(emit_of: Callable[[torch.dtype, torch.dtype], asm.Emit]) -> Any:
    """Returns an operation whose first two values are where stored numbers are that are fetched, and
    where those are that are read: stored ones, or float32."""
    kinds = [(stored, dtype) for stored in asm.LOADS for dtype in {stored, torch.float32}]
    return asm.operation("int " * 7 + "-> none", {kind: emit_of(*kind) for kind in kinds})


def _weighings(num_dims: int) -> Any:
    def of(stored: torch.dtype, dtype: torch.dtype) -> asm.Emit:
        emit_for = partial(_weighing, num_dims, stored.itemsize, dtype)
        if stored == dtype:
            return _of_few(emit_for)
        return lambda builder, *told: emit_for(QUERY_MULTIPLE)(builder, *told[:-1])

    return _by_kinds(of)


weigh64, weigh16 = (_weighings(dims) for dims in (64, 16))
"""``weigh64(ahead, values, dim, weights, stride, target, num_queries)`` adds weighted values of up to
four queries, 64 (or 16) dimensions of them, to the target, one of sixteen keys after another. Values are
as they are stored, or float32; stored ones that lie at ``ahead`` as these do are fetched meanwhile.
Values and targets are ``dim`` numbers apart, weights ``stride`` from query to query."""


def _shuffled(builder: Any, a: Any, b: Any, which: list[int], later: int) -> list[Any]:
    """Returns lanes of two, those of b after a's: ``which``, and those so much ``later``."""
    lanes = which, [lane + later for lane in which]
    return [builder.shuffle_vector(a, b, ir.Constant(asm.INTS, each)) for each in lanes]


def _interleaved(builder: Any, source: Any, dim: Any, target: Any) -> None:
    """Sums are added by pairs, and pairs of pairs."""
    pairs = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
    fours = [2 * (lane // 4) + lane % 2 + LANES * (lane // 2 % 2) for lane in range(LANES)]
    with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
        at = builder.add(source, asm.times(builder, loop.index, 4 * LANES))
        rows = [
            asm.load_float32(builder, builder.add(at, asm.times(builder, dim, 4 * row)))
            for row in range(4)
        ]
        half = LANES // 2
        these = _shuffled(builder, rows[0], rows[1], pairs, half)
        those = _shuffled(builder, rows[2], rows[3], pairs, half)
        to = builder.add(target, asm.times(builder, loop.index, 16 * LANES))
        both = zip(these, those, strict=True)
        parts = [part for pair in both for part in _shuffled(builder, *pair, fours, half)]
        for index, part in enumerate(parts):
            asm.write(builder, asm.plus(builder, to, 4 * LANES * index), part, 4)


interleave = asm.operation("int int int -> none", _interleaved)
"""``interleave(rows, dim, target)`` writes four rows of floats, one after another, as ``score8`` takes
them."""


# --- transposition ---


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """``rows[i]`` lane j becomes ``rows[j]`` lane i: squares of four are turned, by steps that are one
    instruction everywhere, and then exchanged."""
    firsts = [lane - lane % 4 + lane % 4 // 2 + LANES * (lane % 2) for lane in range(LANES)]
    pairs = [lane - lane % 4 + lane % 2 + LANES * (lane % 4 // 2) for lane in range(LANES)]
    for first in range(0, LANES, 4):
        a, b, c, d = rows[first : first + 4]
        these, those = (_shuffled(builder, *pair, firsts, 2) for pair in ((a, b), (c, d)))
        both = zip(these, those, strict=True)
        rows[first : first + 4] = [
            part for pair in both for part in _shuffled(builder, *pair, pairs, 2)
        ]
    for width in (4, 8):
        low = [lane + (LANES - width if lane & width else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & width else width) for lane in range(LANES)]
        for index in range(LANES):
            if not index & width:
                pair = rows[index], rows[index + width]
                rows[index], rows[index + width] = (
                    builder.shuffle_vector(*pair, ir.Constant(asm.INTS, which))
                    for which in (low, high)
                )
    return rows


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


class _Reading(NamedTuple):
    """How columns are read: ``columns`` of them with each sixteen numbers of a row, which ``read`` reads;
    ``parts`` makes floats of what was turned. Of rows of which several floats are in 32 bits, these are
    turned before they are made floats."""

    columns: int
    read: Callable[[Any, Any], Any]
    parts: Callable[[Any, Any], asm.Parts]


_NARROW = {
    dtype: _Reading(LANES, load, lambda _builder, row: [row]) for dtype, load in asm.LOADS.items()
}
_WIDE = {
    torch.float32: _NARROW[torch.float32],
    torch.bfloat16: _Reading(2 * LANES, _read_whole, asm.both_bfloat16),
    torch.float16: _Reading(2 * LANES, _read_whole, _parts_float16),
    torch.float8_e4m3fn: _Reading(4 * LANES, _read_whole, _parts_float8),
}


def _turn(
    builder: Any, dtype: torch.dtype, source: Any, columns: Any,
    take: Callable[[Any, int, asm.Parts], None],
) -> None:  # fmt: skip
    """Turns sixteen rows of ``columns`` numbers, a multiple of sixteen: ``take`` is told the first column
    of those that are read at once, and of each sixteen lines of them the number, and its columns."""
    kind, done = columns.type, columns.type(0)
    for reading in dict.fromkeys((_WIDE[dtype], _NARROW[dtype])):
        step = kind(reading.columns)
        rounds = builder.udiv(builder.sub(columns, done), step)
        with cgutils.for_range(builder, rounds) as loop:
            first = builder.add(done, builder.mul(loop.index, step))
            at = builder.add(source, asm.times(builder, first, dtype.itemsize))
            places = (_after(builder, at, columns, dtype.itemsize, row) for row in range(LANES))
            rows = _transposed(builder, [reading.read(builder, place) for place in places])
            for number, row in enumerate(rows):
                take(first, number, reading.parts(builder, row))
        done = builder.mul(rounds, step)


def _after(builder: Any, address: Any, columns: Any, itemsize: int, rows: int) -> Any:
    """Returns the address so many rows later."""
    return builder.add(address, asm.times(builder, columns, itemsize * rows))


def _transposing(dtype: torch.dtype) -> asm.Emit:
    def emit(builder: Any, source: Any, columns: Any, target: Any, step: Any) -> None:
        step = asm.times(builder, step, 4)

        def take(first: Any, number: int, parts: asm.Parts) -> None:
            for which, part in enumerate(parts):
                column = asm.plus(builder, first, number * len(parts) + which)
                asm.write(builder, builder.add(target, builder.mul(column, step)), part, 4)

        _turn(builder, dtype, source, columns, take)

    return emit


transpose = asm.operation(
    "int " * 4 + "-> none", {dtype: _transposing(dtype) for dtype in asm.LOADS}
)
"""``transpose(source, columns, target, step)`` writes sixteen rows of ``columns`` numbers, one after
another, to float32 at the target, so that each column becomes sixteen floats one after another, ``step``
floats after the column before."""


def _scoring_few(ahead_size: int, dtype: torch.dtype, num_queries: int) -> asm.Emit:
    def emit(
        builder: Any, ahead: Any, keys: Any, dim: Any, queries: Any, out: Any, stride: Any
    ) -> None:
        tile = asm.Tile(builder, num_queries, LANES)
        sums, numbers = tile.sums(asm.constant(0.0)), asm.FLOAT32_NUMBERS

        def take(first: Any, number: int, parts: asm.Parts) -> None:
            line = builder.add(ahead, asm.times(builder, first, ahead_size))
            asm.fetch(builder, _after(builder, line, dim, ahead_size, number))
            for which, part in enumerate(parts):
                column = asm.plus(builder, first, number * len(parts) + which)
                at = builder.add(queries, asm.times(builder, column, 4 * QUERY_MULTIPLE))
                for query, (total,) in enumerate(sums):
                    row = numbers.row(builder, asm.plus(builder, at, 4 * query))
                    more = numbers.add(builder, builder.load(total), row, [part])
                    builder.store(more, total)

        _turn(builder, dtype, keys, dim, take)
        tile.write(sums, tile.rows(out, asm.times(builder, stride, 4)))

    return emit


score_few = _by_kinds(lambda stored, dtype: _of_few(partial(_scoring_few, stored.itemsize, dtype)))
"""``score_few(ahead, keys, dim, queries, target, stride, num_queries)`` writes up to four queries' scores
of sixteen keys, as ``score4`` does, of keys one after another, as they are stored, or float32; those at
``ahead`` are fetched meanwhile."""
