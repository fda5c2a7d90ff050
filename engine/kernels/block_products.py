"""Products of rows with a block of packed weights, group after group, by format.

Rows that were written as bytes have integer sums of each group; rows that keep their floats are
multiplied with weights that are made floats on the way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.kernels import amx_products as amx
from engine.kernels import instructions as asm
from engine.kernels import integers
from engine.kernels.byte_products import Halves, tile_of, weighed
from engine.kernels.formats import CHANNELS, FOURS, GROUP, Format, GroupReader, Places, Weighing
from engine.kernels.integers import HEADER_BYTES

_LINE = 64  # bytes of a line of a cache
MOST_ROWS = amx.MOST_ROWS
"""Rows of a tile, of any format."""


def most_rows(kind: Format) -> int:
    """Returns how many rows a tile has at most. Codes are unpacked once for all of them; those that need
    it least, of 8 bits, are too large to be read twice, for either half of a block's channels."""
    if _uses_amx(kind):
        return amx.MOST_ROWS
    is_narrow = kind.bits == 8 and kind.has_scales and kind.inputs == "int8"
    return asm.ROWS_AT_ONCE if is_narrow or not integers.is_wide() else 2 * asm.ROWS_AT_ONCE


def _uses_amx(kind: Format) -> bool:
    """Returns whether tiles of more rows than wait for memory anyway are multiplied by AMX."""
    return integers.has_amx() and amx.can_multiply(kind)


def _passes(kind: Format, num_rows: int) -> list[Halves]:
    """Returns which halves are multiplied at once: so many sums, and totals beside them, there are
    registers for."""
    fits = num_rows <= (asm.ROWS_AT_ONCE if integers.is_wide() else asm.WAITING_ROWS)
    if integers.is_wide() and not kind.has_scales:
        fits = True  # totals come after all sums
    return [(0, 1)] if fits else [(0,), (1,)]


class Walk:
    """The ``num_groups`` groups of a block, one after another: where the codes and scales of each are, as
    what is at ``places`` says. Meanwhile what is at ``ahead`` is fetched, or half of it."""

    def __init__(
        self, builder: Any, kind: Format, weights: Any, places: Any, ahead: Any, halving: Any
    ) -> None:
        self._builder, self._kind, self._weights = builder, kind, weights
        self._ahead, self._halving = ahead, halving
        (
            self.num_groups, self._first_group, self._group_stride,
            self._first_outer, self._outer_stride, self._outer_shift,
        ) = (
            asm.read(builder, asm.plus(builder, places, 8 * at), ir.IntType(64), 8)
            for at in range(len(Places._fields))
        )  # fmt: skip

    def group(self, index: Any) -> tuple[Any, GroupReader]:
        """Returns where its codes are, and what reads it."""
        builder = self._builder
        start = builder.add(self._first_group, builder.mul(index, self._group_stride))
        here = builder.add(self._weights, start)
        which = builder.lshr(index, self._outer_shift)
        outer = builder.add(self._first_outer, builder.mul(which, self._outer_stride))
        return here, GroupReader(builder, self._kind, here, builder.add(self._weights, outer))

    def codes(
        self, here: Any, reader: GroupReader, halves: Halves, four: int, is_first: bool = True
    ) -> list[Any]:
        """Returns a four's. ``is_first``: they are read for the first time, and as many bytes are fetched
        meanwhile."""
        if is_first:
            self.fetch(here, four, halves)
        return reader.codes(four)

    def fetch_all(self, here: Any) -> None:
        """Fetches as much as a group takes."""
        for four in range(FOURS):
            self.fetch(here, four, (0, 1))

    def fetch(self, here: Any, four: int, halves: Halves) -> None:
        """Fetches as much as a four of features takes here: every other line where this is the walk of
        one half of the channels."""
        builder = self._builder
        per_four = self._kind.code_bytes // FOURS
        starts = list(range(four * per_four, (four + 1) * per_four, _LINE))
        if four == FOURS - 1:
            starts.append(self._kind.code_bytes)
        for start in starts:
            if start // _LINE % 2 not in halves:
                continue
            at = asm.plus(builder, here, start)
            distance = builder.lshr(builder.sub(at, self._weights), self._halving)
            asm.fetch(builder, builder.add(self._ahead, distance))


def _multiply_integers(kind: Format, num_rows: int) -> asm.Emit:
    def emit(
        builder: Any, weights: Any, places: Any, rows: Any, stride: Any, target: Any, *fetched: Any
    ) -> None:
        walk = Walk(builder, kind, weights, places, *fetched)
        if num_rows > asm.ROWS_AT_ONCE and _uses_amx(kind):
            told = (builder, num_rows, walk, rows)
            if kind.has_scales:
                amx.multiply_groups(*told, kind, target)
            else:
                amx.multiply_rows(*told, stride, target)
            return
        tile = tile_of(builder, kind, num_rows)
        starts, totals = tile.rows(rows, stride), tile.sums(asm.constant(0.0))
        if not kind.has_scales:
            tile.begin(starts, 0, (0, 1))
        for halves in _passes(kind, num_rows):
            with cgutils.for_range(builder, walk.num_groups) as loop:
                here, reader = walk.group(loop.index)
                if kind.has_scales:
                    headers = tile.group(rows, loop.index, HEADER_BYTES + GROUP)
                else:
                    offset = asm.times(builder, loop.index, GROUP)
                    headers = [builder.add(start, offset) for start in starts]
                inputs = [asm.plus(builder, header, HEADER_BYTES) for header in headers]
                for part in range(kind.num_parts):
                    if kind.has_scales:
                        tile.begin(headers, part, halves)
                    codes = partial(walk.codes, here, reader, halves)
                    tile.add_fours(inputs, kind.fours_of(part), codes, halves)
                    if kind.has_scales:
                        tile.end(headers, weighed(builder, reader, part), totals, halves)
        if not kind.has_scales:
            tile.end(starts, None, totals, (0, 1))
        tile.write(totals, tile.rows(target, rows.type(4 * CHANNELS)))

    return emit


class _FloatTile(asm.Tile):
    """Sums of products of floats, one feature after another."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        super().__init__(builder, num_rows, CHANNELS)
        self.totals = self.sums(asm.constant(0.0))

    def add_feature(self, rows: list[Any], weights: list[Any], offset: int) -> None:
        """Adds a feature; ``offset``: bytes from where ``rows`` are."""
        builder = self._builder
        for row, mine in zip(rows, self.totals, strict=True):
            value = asm.read(builder, asm.plus(builder, row, offset), asm.FLOAT, 4)
            spread = asm.splatted(builder, value)
            for total, weight in zip(mine, weights, strict=True):
                builder.store(asm.fused(builder, weight, spread, builder.load(total)), total)


def _float_weight(
    builder: Any, kind: Format, code: Any, half: int, scale: Any, weighing: Weighing
) -> Any:
    """Returns the weights that sixteen codes (int32) mean, rounded once where a minimum is added."""
    if kind.zero:
        code = builder.sub(code, asm.whole_numbers(kind.zero))
    if weighing.zeros is not None:
        code = builder.sub(code, weighing.zeros[half])
    value = builder.sitofp(code, asm.FLOATS)
    if weighing.minima is not None:
        return asm.fused(builder, value, scale, weighing.minima[half])
    return builder.fmul(value, scale) if kind.has_scales else value


def _multiply_floats(kind: Format, num_rows: int) -> asm.Emit:
    def emit(
        builder: Any, weights: Any, places: Any, rows: Any, stride: Any, target: Any, *fetched: Any
    ) -> None:
        del stride  # groups have a stride of their own
        walk = Walk(builder, kind, weights, places, *fetched)
        tile = _FloatTile(builder, num_rows)
        none = [[asm.constant(1.0)] * 2]
        with cgutils.for_range(builder, walk.num_groups) as loop:
            here, reader = walk.group(loop.index)
            inputs = tile.group(rows, loop.index, 4 * GROUP)
            weighing = reader.weighing() if kind.has_scales else Weighing(none, None, None)
            for four in range(FOURS):
                columns = walk.codes(here, reader, (0, 1), four)
                scales = weighing.scales[four * len(weighing.scales) // FOURS]
                for which in range(4):
                    found = []
                    for half, column in enumerate(columns):
                        code = builder.lshr(column, asm.whole_numbers(8 * which))
                        code = builder.and_(code, asm.whole_numbers(255))
                        found.append(
                            _float_weight(builder, kind, code, half, scales[half], weighing)
                        )
                    tile.add_feature(inputs, found, 16 * four + 4 * which)
        tile.write(tile.totals, tile.rows(target, rows.type(4 * CHANNELS)))

    return emit


def _multiplying_of(kind: Format) -> asm.Emit:
    emit_for = _multiply_integers if kind.inputs == "int8" else _multiply_floats

    def emit(builder: Any, weights: Any, places: Any, num_rows: Any, *values: Any) -> None:
        told, counts = (num_rows, weights, places, *values), range(1, most_rows(kind) + 1)
        asm.by_rows(partial(emit_for, kind), counts, builder, *told)

    return emit


multiply_tile = asm.operation("int " * 8 + "-> none", asm.ByFormat(_multiplying_of))
"""``multiply_tile(weights, places, num_rows, rows, stride, target, ahead, halving)`` multiplies a block
of packed weights, which lie in it as ``places`` say, with rows ``stride`` bytes apart: written as
``row_records`` has it, or float32; ``target`` ``[num_rows, CHANNELS]`` float32. Meanwhile as many
bytes as there are of weights, or with a ``halving`` of 1 half as many, are fetched from ``ahead`` on, a
line at a time: all at once they would be in the way of what is read now."""
rows_of_a_tile = asm.operation(
    "int -> int", asm.ByFormat(lambda kind: lambda _b, at: at.type(most_rows(kind)))
)
"""``rows_of_a_tile(weights)``: at most."""
