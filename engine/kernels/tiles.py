"""Squares of floats: sums of their products that stay in registers, and how they are turned round."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils

from engine.kernels import BFLOAT16, FLOAT8, FLOAT16, LANES
from engine.kernels import instructions as asm
from engine.kernels.lanes import itemsize_of

# --- sums of products that stay in registers ---

_AT_ONCE = 2  # products of a sum in one round of a loop


def _accumulated(
    builder: Any,
    count: Any,
    sums: list[list[Any]],
    factors: tuple[list[Any], Any],
    vectors: tuple[Any, Any],
) -> list[list[Any]]:
    """To ``sums[row][column]``, ``count`` products one after another: of a row's factor, whose first is
    at ``factors[0][row]``, and a column's sixteen floats, which lie after those of the column before.
    ``factors[1]`` and ``vectors[1]``: bytes from one to the next. ``count`` is even."""
    kept = [[cgutils.alloca_once_value(builder, each) for each in row] for row in sums]
    starts, factor_step = factors
    start, vector_step = vectors
    with cgutils.for_range(builder, builder.udiv(count, count.type(_AT_ONCE))) as loop:
        for which in range(_AT_ONCE):
            index = asm.plus(builder, builder.mul(loop.index, count.type(_AT_ONCE)), which)
            at = builder.add(start, builder.mul(index, vector_step))
            columns = [
                asm.load_float32(builder, asm.plus(builder, at, 4 * LANES * c))
                for c in range(len(sums[0]))
            ]
            offset = builder.mul(index, factor_step)
            for first, mine in zip(starts, kept, strict=True):
                factor = asm.splatted(
                    builder, asm.read(builder, builder.add(first, offset), asm.FLOAT, 4)
                )
                for total, column in zip(mine, columns, strict=True):
                    builder.store(asm.fused(builder, factor, column, builder.load(total)), total)
    return [[builder.load(each) for each in row] for row in kept]


def _scoring(num_queries: int) -> Callable[..., None]:
    def emit(builder: Any, keys: Any, dim: Any, queries: Any, out: Any, stride: Any) -> None:
        kind, width = dim.type, 2
        fours = [
            builder.add(queries, builder.mul(dim, kind(16 * four)))
            for four in range(num_queries // 4)
        ]
        starts = [
            asm.plus(builder, fours[query // 4], 4 * (query % 4)) for query in range(num_queries)
        ]
        nothing = [[asm.constant(0.0)] * width for _ in range(num_queries)]
        sums = _accumulated(
            builder, dim, nothing, (starts, kind(16)), (keys, kind(4 * LANES * width))
        )
        for query, mine in enumerate(sums):
            to = builder.add(out, builder.mul(stride, kind(query)))
            for column, total in enumerate(mine):
                asm.write(builder, asm.plus(builder, to, 4 * LANES * column), total, 4)

    return emit


score8, score4 = (asm.operation("int " * 5 + "-> none", _scoring(count)) for count in (8, 4))
"""Eight queries' (or four's) products with twice sixteen keys: (keys, dimensions, queries, target, bytes
in it from query to query). Queries lie by fours, of which each dimension's are together; keys as
``transpose`` leaves them, twice sixteen of each dimension together. A sum over dimensions, in their
order."""


def _weighing(width: int) -> Callable[..., None]:
    def emit(
        builder: Any, values: Any, row: Any, weights: Any, stride: Any, count: Any, out: Any
    ) -> None:
        kind = count.type
        starts = [builder.add(weights, builder.mul(stride, kind(query))) for query in range(4)]
        places = [builder.add(out, builder.mul(row, kind(query))) for query in range(4)]
        before = [
            [
                asm.load_float32(builder, asm.plus(builder, place, 4 * LANES * column))
                for column in range(width)
            ]
            for place in places
        ]
        sums = _accumulated(builder, count, before, (starts, kind(4)), (values, row))
        for place, mine in zip(places, sums, strict=True):
            for column, total in enumerate(mine):
                asm.write(builder, asm.plus(builder, place, 4 * LANES * column), total, 4)

    return emit


weigh64, weigh16 = (asm.operation("int " * 6 + "-> none", _weighing(width)) for width in (4, 1))
"""Four queries' weighted values, 64 (or 16) dimensions of them, added to the target one key after
another: (values, bytes from one to the next and from query to query in the target, weights, bytes from
query to query in them, how many, target)."""


def _interleaved(builder: Any, source: Any, dim: Any, target: Any) -> None:
    """By pairs, and pairs of pairs."""
    pairs = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
    fours = [2 * (lane // 4) + lane % 2 + LANES * (lane // 2 % 2) for lane in range(LANES)]

    def halves(a: Any, b: Any, which: list[int], step: int) -> list[Any]:
        later = [lane + step for lane in which]
        return [
            builder.shuffle_vector(a, b, ir.Constant(asm.INTS, each)) for each in (which, later)
        ]

    with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
        at = builder.add(source, builder.mul(loop.index, dim.type(4 * LANES)))
        step = builder.mul(dim, dim.type(4))
        rows = [
            asm.load_float32(builder, builder.add(at, builder.mul(step, dim.type(row))))
            for row in range(4)
        ]
        these, those = halves(rows[0], rows[1], pairs, 8), halves(rows[2], rows[3], pairs, 8)
        to = builder.add(target, builder.mul(loop.index, dim.type(16 * LANES)))
        parts = [
            part for pair in zip(these, those, strict=True) for part in halves(*pair, fours, 8)
        ]
        for index, part in enumerate(parts):
            asm.write(builder, asm.plus(builder, to, 4 * LANES * index), part, 4)


interleave = asm.operation("int int int -> none", _interleaved)
"""Four rows of floats, one after another, as ``score8`` has them: (rows, dimensions, target)."""


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


def _rows_at(
    builder: Any, source: Any, stride: Any, ahead: Any, read: Callable[[Any, Any], Any]
) -> list[Any]:
    """Sixteen rows; between them, a line of each of the rows at ``ahead`` is fetched."""
    rows = []
    for index in range(LANES):
        step = builder.mul(stride, ir.Constant(stride.type, index))
        rows.append(read(builder, builder.add(source, step)))
        asm.fetch(builder, builder.add(ahead, step))
    return rows


def _transposing(read: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def emit(builder: Any, source: Any, stride: Any, ahead: Any, target: Any, step: Any) -> None:
        for row in _transposed(builder, _rows_at(builder, source, stride, ahead, read)):
            asm.write(builder, target, row, 4)
            target = builder.add(target, step)

    return emit


def _read_whole(builder: Any, address: Any) -> Any:
    return asm.read(builder, address, asm.INTS, 1)


def _transposing_parts(parts: Callable[[Any, Any], list[Any]]) -> Callable[..., None]:
    """Rows of floats of which several are in 32 bits are transposed before they are made floats:
    ``parts(builder, bits)`` makes them."""

    def emit(builder: Any, source: Any, stride: Any, ahead: Any, target: Any, step: Any) -> None:
        rows = _rows_at(builder, source, stride, ahead, _read_whole)
        for bits in _transposed(builder, rows):
            for part in parts(builder, bits):
                asm.write(builder, target, part, 4)
                target = builder.add(target, step)

    return emit


def _parts_bfloat16(builder: Any, bits: Any) -> list[Any]:
    pair = builder.shl(bits, asm.whole_numbers(16)), builder.and_(bits, asm.whole_numbers(-65536))
    return [builder.bitcast(each, asm.FLOATS) for each in pair]


def _parts_float16(builder: Any, bits: Any) -> list[Any]:
    kind = ir.VectorType(ir.HalfType(), LANES)
    pair = (
        builder.trunc(each, ir.VectorType(asm.INT16, LANES))
        for each in (bits, builder.lshr(bits, asm.whole_numbers(16)))
    )
    return [builder.fpext(builder.bitcast(each, kind), asm.FLOATS) for each in pair]


def _parts_float8(builder: Any, bits: Any) -> list[Any]:
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


_of_rows = partial(asm.operation, "int int int int int -> none")
_transpose_32 = _of_rows(_transposing(asm.load_float32))
_transpose_b16 = _of_rows(_transposing(asm.load_bfloat16))
_transpose_f16 = _of_rows(_transposing(asm.load_float16))
_transpose_f8 = _of_rows(_transposing(asm.load_float8))
_transpose_b16_pairs = _of_rows(_transposing_parts(_parts_bfloat16))
_transpose_f16_pairs = _of_rows(_transposing_parts(_parts_float16))
_transpose_f8_fours = _of_rows(_transposing_parts(_parts_float8))


@njit
def _transpose_16(kind: int, source: int, stride: int, ahead: int, target: int, step: int) -> None:
    if kind == BFLOAT16:
        _transpose_b16(source, stride, ahead, target, step)
    elif kind == FLOAT16:
        _transpose_f16(source, stride, ahead, target, step)
    elif kind == FLOAT8:
        _transpose_f8(source, stride, ahead, target, step)
    else:
        _transpose_32(source, stride, ahead, target, step)


@njit
def transpose(
    kind: int, source: int, stride: int, columns: int, ahead: int, target: int, step: int
) -> None:
    """Sixteen rows of ``columns`` floats, ``stride`` bytes apart, to float32 at ``target``, where each
    column becomes sixteen floats one after another, ``step`` bytes after the column before. Rows that lie
    at ``ahead`` as these do are fetched meanwhile."""
    done = 0
    while done < columns:
        offset, to = itemsize_of(kind) * done, target + step * done
        at, later = source + offset, ahead + offset
        if kind == BFLOAT16 and columns - done >= 2 * LANES:
            _transpose_b16_pairs(at, stride, later, to, step)
            done += 2 * LANES
        elif kind == FLOAT16 and columns - done >= 2 * LANES:
            _transpose_f16_pairs(at, stride, later, to, step)
            done += 2 * LANES
        elif kind == FLOAT8 and columns - done >= 4 * LANES:
            _transpose_f8_fours(at, stride, later, to, step)
            done += 4 * LANES
        else:
            _transpose_16(kind, at, stride, later, to, step)
            done += LANES
