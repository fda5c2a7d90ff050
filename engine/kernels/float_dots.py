"""What ``float_product`` is made of: products of rows with 64 output channels, with sums in registers.

A channel has one sum, to which features are added one after another, from the first to the last: nothing
in it depends on how many rows are multiplied at once. Where there is AVX512_BF16, one instruction adds
the products of two bf16 features, with the roundings of that CPU; everywhere else every product is added
by one ``fma``, which gives the same bits on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels.tiling import WAITING_ROWS, Emit, Tile, by_rows, called, has_feature

CHANNELS = 64
"""Output channels of a block of packed weights, of which each step's numbers lie together."""


def has_pair_products() -> bool:
    """Whether numba compiles for a machine that multiplies pairs of bf16 (AVX512_BF16)."""
    return has_feature("avx512bf16")


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


# LLVM before 16 hands pairs over as whole numbers.
_PAIRS = ir.VectorType(_BFloat(), 2 * LANES) if llvm_version_info >= (16,) else asm.INTS

Parts = list[Any]


class _Numbers(NamedTuple):
    """How numbers of a type are multiplied. ``features``: of a row that one step takes; ``bytes``:
    theirs; ``row``: what is at an address there, for all lanes; ``column``: what is at an address of
    sixteen channels' weights; ``add``: the sum with the products of both."""

    features: int
    bytes: int
    row: Callable[[Any, Any], Parts]
    column: Callable[[Any, Any], Parts]
    add: Callable[[Any, Any, Parts, Parts], Any]


def _add_each(builder: Any, total: Any, row: Parts, column: Parts) -> Any:
    for these, those in zip(row, column, strict=True):
        total = asm.fused(builder, these, those, total)
    return total


def _row32(builder: Any, address: Any) -> Parts:
    return [asm.splatted(builder, asm.read(builder, address, asm.FLOAT, 4))]


def _row16(builder: Any, address: Any) -> Parts:
    spread = asm.splatted(builder, asm.read(builder, address, asm.INT16, 2))
    return [builder.fpext(builder.bitcast(spread, ir.VectorType(ir.HalfType(), LANES)), asm.FLOATS)]


def _both(builder: Any, pairs: Any) -> Parts:
    """Of sixteen pairs of bf16 the first ones and the second ones, as floats."""
    first = builder.shl(pairs, asm.whole_numbers(16))
    second = builder.and_(pairs, asm.whole_numbers(-(1 << 16)))
    return [builder.bitcast(each, asm.FLOATS) for each in (first, second)]


def _row_pair(builder: Any, address: Any) -> Any:
    return asm.splatted(builder, asm.read(builder, address, asm.INT32, 2))


def _column_pair(builder: Any, address: Any) -> Any:
    return asm.read(builder, address, asm.INTS, 4)


def _add_pairs(builder: Any, total: Any, row: Parts, column: Parts) -> Any:
    pairs = [builder.bitcast(each, _PAIRS) for each in (*row, *column)]
    return called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", asm.FLOATS, total, *pairs)


_FLOAT32 = _Numbers(1, 4, _row32, lambda b, at: [asm.load_float32(b, at)], _add_each)
_FLOAT16 = _Numbers(1, 2, _row16, lambda b, at: [asm.load_float16(b, at)], _add_each)
_BFLOAT16 = _Numbers(
    2, 4,
    lambda b, at: _both(b, _row_pair(b, at)), lambda b, at: _both(b, _column_pair(b, at)), _add_each,
)  # fmt: skip
_BFLOAT16_PAIRS = _Numbers(
    2, 4, lambda b, at: [_row_pair(b, at)], lambda b, at: [_column_pair(b, at)], _add_pairs
)  # fmt: skip


def _dots(numbers: _Numbers, num_rows: int) -> Emit:
    def emit(
        builder: Any, rows: Any, stride: Any, weights: Any, steps: Any, target: Any, ahead: Any
    ) -> None:
        tile = Tile(builder, num_rows, CHANNELS)
        sums = tile.sums(lambda row, at: asm.load_float32(builder, tile.place(target, row, at)))
        starts = tile.rows(rows, stride)
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, steps.type(CHANNELS * numbers.bytes))
            columns = tile.columns(builder.add(weights, step), numbers.bytes, numbers.column)
            if num_rows > WAITING_ROWS:
                asm.fetch(builder, builder.add(ahead, step))
            offset = builder.mul(loop.index, steps.type(numbers.bytes))
            for start, mine in zip(starts, sums, strict=True):
                row = numbers.row(builder, builder.add(start, offset))
                for total, column in zip(mine, columns, strict=True):
                    added = numbers.add(builder, builder.load(total), row, column)
                    builder.store(added, total)
        tile.write(sums, target)

    return emit


def _dots_of(numbers: _Numbers) -> Emit:
    def emit(
        builder: Any, rows: Any, num_rows: Any, stride: Any, features: Any, weights: Any,
        ahead: Any, target: Any,
    ) -> None:  # fmt: skip
        kind = features.type
        steps = builder.udiv(features, kind(numbers.features))
        stride = builder.mul(stride, kind(numbers.bytes // numbers.features))
        by_rows(
            partial(_dots, numbers), builder, num_rows, rows, stride, weights, steps, target, ahead
        )

    return emit


_SIGNATURE = "int " * 7 + "-> none"
add_dots = asm.operation(
    _SIGNATURE,
    {
        torch.float32: _dots_of(_FLOAT32),
        torch.float16: _dots_of(_FLOAT16),
        torch.bfloat16: _dots_of(_BFLOAT16),
    },
)
"""(rows, how many, features from one to the next, how many features, weights, ahead, target): products
are added to ``[rows, 64]`` float32 at the target. A line is fetched a step of what is read next, from
``ahead`` on, in steps as long as those over the weights: all at once it would be in the way of what is
read now."""


def _no_dots(*_values: Any) -> None:
    """Of a type that is not multiplied by pairs."""


# What the machine lacks is never called; it has to be compiled all the same.
_PAIRS_OR_NOT = _BFLOAT16_PAIRS if has_pair_products() else _BFLOAT16
add_pairs = asm.operation(
    _SIGNATURE,
    dict.fromkeys((torch.float32, torch.float16), _no_dots)
    | {torch.bfloat16: _dots_of(_PAIRS_OR_NOT)},
)
"""The same of bf16, by pairs."""
