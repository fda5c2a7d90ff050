"""What ``float_product`` is made of: products of rows with 64 output channels, with sums in registers.

A channel has one sum, to which features are added one after another, from the first to the last: nothing
in it depends on how many rows are multiplied at once. Where there is AVX512_BF16, one instruction adds
the products of two bf16 features, with the roundings of that CPU; everywhere else every product is added
by one ``fma``, which gives the same bits on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, llvm_version_info
from numba import config, njit
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels.instructions import (
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INTS,
    fetch,
    fused,
    int_type,
    load_float16,
    load_float32,
    none_type,
    operation,
    plus,
    read,
    splatted,
    whole_numbers,
    write,
)

CHANNELS = 64
"""Output channels of a block of packed weights, of which each step's numbers lie together."""
_WIDTH = CHANNELS // LANES


def has_wide_registers() -> bool:
    """Whether numba compiles for a machine with AVX-512, which has registers for that many sums."""
    if config.CPU_FEATURES is not None:
        return "+avx512f" in config.CPU_FEATURES
    return _has("avx512f")


def has_pair_products() -> bool:
    """Whether it compiles for one that multiplies pairs of bf16, too (AVX512_BF16)."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return False  # for another machine than this one: LLVM would give up on what that lacks
    return _has("avx512bf16")


def _has(feature: str) -> bool:
    try:
        return bool(get_host_cpu_features().get(feature))
    except RuntimeError:  # LLVM does not know the machine
        return False


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIR_PRODUCT = "llvm.x86.avx512bf16.dpbf16ps.512"
# LLVM before 16 hands pairs over as whole numbers.
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES) if llvm_version_info >= (16,) else INTS

_WAITING_ROWS = 2

Parts = list[Any]


class _Numbers(NamedTuple):
    """How numbers of a type are multiplied. ``row_bytes``: of a row's features that one step takes;
    ``row``: what is at an address there, for all lanes; ``column``: what is at an address of sixteen
    channels' weights; ``add``: the sum with the products of both."""

    row_bytes: int
    row: Callable[[Any, Any], Parts]
    column: Callable[[Any, Any], Parts]
    add: Callable[[Any, Any, Parts, Parts], Any]


def _add_each(builder: Any, total: Any, row: Parts, column: Parts) -> Any:
    for these, those in zip(row, column, strict=True):
        total = fused(builder, these, those, total)
    return total


def _row32(builder: Any, address: Any) -> Parts:
    return [splatted(builder, read(builder, address, FLOAT, 4))]


def _row16(builder: Any, address: Any) -> Parts:
    halves = read(builder, address, INT16, 2)
    spread = splatted(builder, halves)
    return [builder.fpext(builder.bitcast(spread, ir.VectorType(ir.HalfType(), LANES)), FLOATS)]


def _both(builder: Any, pairs: Any) -> Parts:
    """Of sixteen pairs of bf16 the first ones and the second ones, as floats."""
    first = builder.shl(pairs, whole_numbers(16))
    second = builder.and_(pairs, whole_numbers(-(1 << 16)))
    return [builder.bitcast(each, FLOATS) for each in (first, second)]


def _row_pair(builder: Any, address: Any) -> Any:
    return splatted(builder, read(builder, address, INT32, 2))


def _column_pair(builder: Any, address: Any) -> Any:
    return read(builder, address, INTS, 4)


def _add_pairs(builder: Any, total: Any, row: Parts, column: Parts) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])
    function = cgutils.get_or_insert_function(builder.module, kind, _PAIR_PRODUCT)
    pairs = [builder.bitcast(each, _PAIRS) for each in (*row, *column)]
    return builder.call(function, [total, *pairs])


_FLOAT32 = _Numbers(4, _row32, lambda b, at: [load_float32(b, at)], _add_each)
_FLOAT16 = _Numbers(2, _row16, lambda b, at: [load_float16(b, at)], _add_each)
_BFLOAT16 = _Numbers(
    4, lambda b, at: _both(b, _row_pair(b, at)), lambda b, at: _both(b, _column_pair(b, at)), _add_each
)  # fmt: skip
_BFLOAT16_PAIRS = _Numbers(
    4, lambda b, at: [_row_pair(b, at)], lambda b, at: [_column_pair(b, at)], _add_pairs
)  # fmt: skip


def _dots(numbers: _Numbers, num_rows: int) -> Any:
    """(rows, bytes from one to the next, weights, how many steps, target, ahead): sums ``[num_rows, 64]``
    float32 at the target go on. A line is fetched a step of what is read next, from ``ahead`` on, in
    steps as long as those over the weights: all at once it would be in the way of what is read now. One
    row or two wait for memory anyway."""
    column_bytes = LANES * numbers.row_bytes

    def emit(
        builder: Any, rows: Any, stride: Any, weights: Any, count: Any, target: Any, ahead: Any
    ) -> None:
        places = [
            [plus(builder, target, 4 * (CHANNELS * row + LANES * at)) for at in range(_WIDTH)]
            for row in range(num_rows)
        ]
        sums = [
            [cgutils.alloca_once_value(builder, load_float32(builder, at)) for at in row]
            for row in places
        ]
        starts = [
            builder.add(rows, builder.mul(stride, stride.type(row))) for row in range(num_rows)
        ]
        with cgutils.for_range(builder, count) as loop:
            step = builder.mul(loop.index, count.type(_WIDTH * column_bytes))
            here = builder.add(weights, step)
            columns = [
                numbers.column(builder, plus(builder, here, column_bytes * at))
                for at in range(_WIDTH)
            ]
            if num_rows > _WAITING_ROWS:
                fetch(builder, builder.add(ahead, step))
            offset = builder.mul(loop.index, count.type(numbers.row_bytes))
            for start, mine in zip(starts, sums, strict=True):
                row = numbers.row(builder, builder.add(start, offset))
                for total, column in zip(mine, columns, strict=True):
                    added = numbers.add(builder, builder.load(total), row, column)
                    builder.store(added, total)
        for kept, mine in zip(places, sums, strict=True):
            for at, total in zip(kept, mine, strict=True):
                write(builder, at, builder.load(total), 4)

    return operation(emit, none_type, *[int_type] * 6)


ROWS_AT_ONCE = 6
"""Rows that there are registers for: 24 sums, four columns, and what is multiplied with them."""


def _dots_of(numbers: _Numbers) -> Any:
    """(how many rows, up to six, and what ``_dots`` takes)."""
    one, two, three, four, five, six = (
        _dots(numbers, count) for count in range(1, ROWS_AT_ONCE + 1)
    )

    @njit
    def dots(
        count: int, rows: int, stride: int, weights: int, steps: int, sums: int, ahead: int
    ) -> None:
        if count == 1:
            one(rows, stride, weights, steps, sums, ahead)
        elif count == 2:
            two(rows, stride, weights, steps, sums, ahead)
        elif count == 3:
            three(rows, stride, weights, steps, sums, ahead)
        elif count == 4:
            four(rows, stride, weights, steps, sums, ahead)
        elif count == 5:
            five(rows, stride, weights, steps, sums, ahead)
        else:
            six(rows, stride, weights, steps, sums, ahead)

    return dots


dots_float32, dots_float16, dots_bfloat16 = map(_dots_of, (_FLOAT32, _FLOAT16, _BFLOAT16))
# What the machine lacks is never called; it has to be compiled all the same.
dots_pairs = _dots_of(_BFLOAT16_PAIRS if has_pair_products() else _BFLOAT16)
