"""A step of some values of a recurrent state: what a key has in it, and the state behind an entry.

Every sum runs over keys in one order, even ones and odd ones apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm

SLICE, WIDE = 2 * LANES, 8 * LANES
"""Values of a state that are taken at once."""


def _for_both(
    builder: Any, dim: Any, even: list[Any], odd: list[Any], add: Callable[[list[Any], Any], None]
) -> None:
    """Adds up even and odd keys, then both."""
    with cgutils.for_range(builder, builder.udiv(dim, dim.type(2))) as loop:
        index = asm.times(builder, loop.index, 2)
        add(even, index)
        add(odd, asm.plus(builder, index, 1))
    with builder.if_then(builder.trunc(dim, ir.IntType(1))):
        add(even, asm.plus(builder, dim, -1))
    for these, those in zip(even, odd, strict=True):
        builder.store(builder.fadd(builder.load(these), builder.load(those)), these)


def _adding(num_values: int) -> asm.Emit:
    def emit(builder: Any, key: Any, dim: Any, state: Any, row: Any, target: Any) -> None:
        tile, row = asm.Tile(builder, 1, num_values), asm.times(builder, row, 4)
        even, odd = (tile.sums(asm.constant(0.0))[0] for _ in range(2))

        def add(sums: list[Any], index: Any) -> None:
            tile.add([sums], index, [key], dim.type(4), state, row, asm.FLOAT32_NUMBERS)

        _for_both(builder, dim, even, odd, add)
        tile.write([even], [target])

    return emit


add_slice, add_wide = (
    asm.operation("int " * 5 + "-> none", _adding(num_values)) for num_values in (SLICE, WIDE)
)
"""``add_slice(key, dim, state, row, target)`` writes the products of a key with a slice, or with
``WIDE`` values, whose keys are ``row`` floats apart."""


def _moving(num_values: int) -> asm.Emit:
    def emit(
        builder: Any, dim: Any, key: Any, decay: Any, query: Any, before: Any, before_row: Any,
        behind: Any, behind_row: Any, sums: Any,
    ) -> None:  # fmt: skip
        tile = asm.Tile(builder, 1, num_values)
        values = tile.columns(sums, 4, asm.load_float32)
        even, odd = (tile.sums(asm.constant(0.0))[0] for _ in range(2))

        def move(totals: list[Any], index: Any) -> None:
            at = asm.times(builder, index, 4)
            k, d, q = (
                asm.splatted(builder, asm.read(builder, builder.add(each, at), asm.FLOAT, 4))
                for each in (key, decay, query)
            )
            source = builder.add(before, builder.mul(at, before_row))
            target = builder.add(behind, builder.mul(at, behind_row))
            states = tile.columns(source, 4, asm.load_float32)
            for column, (state, value) in enumerate(zip(states, values, strict=True)):
                state = asm.fused(builder, k, value, builder.fmul(d, state))
                asm.write(builder, asm.plus(builder, target, 4 * LANES * column), state, 4)
                total = totals[column]
                builder.store(asm.fused(builder, q, state, builder.load(total)), total)

        _for_both(builder, dim, even, odd, move)
        tile.write([even], [sums])

    return emit


move_slice, move_wide = (
    asm.operation("int " * 9 + "-> none", _moving(num_values)) for num_values in (SLICE, WIDE)
)
"""``move_slice(dim, key, decay, query, before, before_row, behind, behind_row, sums)`` writes a slice of
the state behind an entry, whose values are at ``sums``, and what the row reads over those."""
