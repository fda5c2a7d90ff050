"""Products of rows with 64 output channels, with sums in registers: what ``float_product`` is made of.

A channel has one sum, to which features are added one after another, from the first to the last: nothing
in it depends on how many rows are multiplied at once. Where there is AVX512_BF16, one instruction adds
the products of two bf16 features, with the roundings of that CPU; everywhere else every product is added
by one ``fma``, which gives the same bits on every CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm

CHANNELS = 64
"""Output channels of a block of packed weights, of which each step's numbers lie together."""


def has_pair_products() -> bool:
    """Whether numba compiles for a machine that multiplies pairs of bf16 (AVX512_BF16)."""
    return asm.has_feature("avx512bf16")


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


def _add_pairs(builder: Any, total: Any, row: asm.Parts, column: asm.Parts) -> Any:
    pairs = [builder.bitcast(each, _PAIRS) for each in (*row, *column)]
    return asm.called(builder, "llvm.x86.avx512bf16.dpbf16ps.512", asm.FLOATS, total, *pairs)


_PAIR_NUMBERS = asm.Numbers(
    2, 4, lambda b, at: [asm.row_pair(b, at)], lambda b, at: [asm.column_pair(b, at)], _add_pairs
)  # fmt: skip


def _dots(numbers: asm.Numbers, num_rows: int) -> asm.Emit:
    def emit(
        builder: Any, rows: Any, stride: Any, weights: Any, steps: Any, target: Any, ahead: Any
    ) -> None:
        tile, kind = asm.Tile(builder, num_rows, CHANNELS), steps.type
        starts, targets = tile.rows(rows, stride), tile.rows(target, kind(4 * CHANNELS))
        sums, size = tile.sums_at(targets), kind(CHANNELS * numbers.bytes)
        with cgutils.for_range(builder, steps) as loop:
            if num_rows > asm.WAITING_ROWS:
                asm.fetch(builder, builder.add(ahead, builder.mul(loop.index, size)))
            tile.add(sums, loop.index, starts, kind(numbers.bytes), weights, size, numbers)
        tile.write(sums, targets)

    return emit


def _dots_of(numbers: asm.Numbers) -> asm.Emit:
    def emit(
        builder: Any, rows: Any, num_rows: Any, stride: Any, features: Any, weights: Any,
        ahead: Any, target: Any,
    ) -> None:  # fmt: skip
        steps = builder.udiv(features, features.type(numbers.features))
        stride = asm.times(builder, stride, numbers.bytes // numbers.features)
        told = rows, stride, weights, steps, target, ahead
        asm.by_rows(
            partial(_dots, numbers), range(1, asm.ROWS_AT_ONCE + 1), builder, num_rows, *told
        )

    return emit


_SIGNATURE = "int " * 7 + "-> none"
add_dots = asm.operation(
    _SIGNATURE,
    {
        torch.float32: _dots_of(asm.FLOAT32_NUMBERS),
        torch.float16: _dots_of(asm.FLOAT16_NUMBERS),
        torch.bfloat16: _dots_of(asm.BFLOAT16_NUMBERS),
    },
)
"""``add_dots(rows, num_rows, row, num_features, weights, ahead, target)`` adds products to ``[rows, 64]``
float32 at the target; ``row``: features from one row to the next. With each step a line of what is read
next is fetched, from ``ahead`` on: all at once it would be in the way of what is read now."""


def _no_dots(*_values: Any) -> None:
    """Stands for a type that is not multiplied by pairs."""


# What the machine lacks is never called; it has to be compiled all the same.
_PAIRS_OR_NOT = _PAIR_NUMBERS if has_pair_products() else asm.BFLOAT16_NUMBERS
add_pairs = asm.operation(
    _SIGNATURE,
    dict.fromkeys((torch.float32, torch.float16), _no_dots)
    | {torch.bfloat16: _dots_of(_PAIRS_OR_NOT)},
)
"""The same for bf16, by pairs."""
