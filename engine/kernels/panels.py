"""Blocks of weights below 8 bits, unpacked for many rows: what shifts, masks and conversions cost is paid
once for all of them. Codes of 8 bits lie so anyway.

Of a group lie first the codes of four features of sixteen channels, a byte each, of the other sixteen,
then of the next four; then what sums become floats by (``integers.PartWeighing``), float32: of each part
of the group scales and drops, and of the whole of it minima, where there are such.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels.formats import CHANNELS, FOURS, GROUP, Format
from engine.kernels.integers import HEADER_BYTES, IntegerTile, PartWeighing, Walk, weighed

_CODE_BYTES = CHANNELS * GROUP
_VECTOR = 4 * LANES
PANEL_GROUPS = 24
"""Groups of a panel at most: so many stay in the nearest cache."""
PANEL_FLOATS = PANEL_GROUPS * (CHANNELS * GROUP // 4 + 4 * CHANNELS)
"""Room for them in the format that takes most."""
LEAST_ROWS = 4
"""Fewer rows at once are not multiplied: many are divided into tiles of about as many as there are
registers for."""


def group_bytes(kind: Format) -> int:
    """Returns the bytes of a group unpacked."""
    number = 2 * kind.num_parts + (kind.offset != "none")
    return _CODE_BYTES + 2 * number * _VECTOR


class _Group:
    """A group unpacked, ``here``."""

    def __init__(self, builder: Any, kind: Format, here: Any) -> None:
        self._builder, self._kind, self._here = builder, kind, here

    def codes(self, four: int) -> list[Any]:
        """As ``GroupReader`` returns them."""
        return [self._read(2 * _VECTOR * four + _VECTOR * half, asm.INTS) for half in range(2)]

    def weighing(self, part: int) -> PartWeighing:
        minima = None
        if self._kind.offset != "none":
            minima = self._floats(2 * self._kind.num_parts)
        return PartWeighing(self._floats(2 * part), self._floats(2 * part + 1), minima)

    def write(self, reader: Any, parts: list[PartWeighing]) -> None:
        """Unpacks what ``reader`` reads."""
        for four in range(FOURS):
            for half, codes in enumerate(reader.codes(four)):
                self._write(2 * _VECTOR * four + _VECTOR * half, codes)
        vectors = [each for part in parts for both in part[:2] for each in both]
        for index, each in enumerate([*vectors, *(parts[0].minima or [])]):
            self._write(_CODE_BYTES + _VECTOR * index, each)

    def _floats(self, index: int) -> list[Any]:
        first = _CODE_BYTES + 2 * _VECTOR * index
        return [self._read(first + _VECTOR * half, asm.FLOATS) for half in range(2)]

    def _read(self, offset: int, kind: Any) -> Any:
        return asm.read(self._builder, asm.plus(self._builder, self._here, offset), kind, _VECTOR)

    def _write(self, offset: int, value: Any) -> None:
        asm.write(self._builder, asm.plus(self._builder, self._here, offset), value, _VECTOR)


def _unpacking(kind: Format) -> asm.Emit:
    def emit(builder: Any, weights: Any, panel: Any, first: Any, end: Any, *places: Any) -> None:
        walk = Walk(builder, kind, weights, places)
        with cgutils.for_range(builder, builder.sub(end, first)) as loop:
            _, reader = walk.group(builder.add(first, loop.index))
            here = builder.add(panel, asm.times(builder, loop.index, group_bytes(kind)))
            parts = weighed(builder, reader.weighing(), kind)
            _Group(builder, kind, here).write(reader, parts)

    return emit


def _multiplying(kind: Format, num_rows: int) -> asm.Emit:
    def emit(builder: Any, panel: Any, rows: Any, num_groups: Any, target: Any) -> None:
        tile = IntegerTile(builder, num_rows)
        targets = tile.rows(target, rows.type(4 * CHANNELS))
        totals = tile.sums_at(targets)
        with cgutils.for_range(builder, num_groups) as loop:
            headers = tile.group(rows, loop.index, HEADER_BYTES + GROUP)
            inputs = [asm.plus(builder, header, HEADER_BYTES) for header in headers]
            here = builder.add(panel, asm.times(builder, loop.index, group_bytes(kind)))
            group = _Group(builder, kind, here)
            for part in range(kind.num_parts):
                tile.begin(headers, part)
                for four in kind.fours_of(part):
                    tile.add_four(inputs, group.codes(four), 4 * four)
                tile.end(headers, group.weighing(part), totals)
        tile.write(totals, targets)

    return emit


def _multiplying_of(kind: Format) -> asm.Emit:
    def emit(builder: Any, _weights: Any, num_rows: Any, *values: Any) -> None:
        counts = range(LEAST_ROWS, asm.ROWS_AT_ONCE + 1)
        asm.by_rows(
            lambda count: _multiplying(kind, count), builder, num_rows, *values, counts=counts
        )

    return emit


unpack = asm.operation("int " * 9 + "-> none", asm.ByFormat(_unpacking))
"""``unpack(weights, panel, first, end, ..)`` unpacks groups ``first`` .. ``end - 1`` of a block; the last
five are those of ``packing.Places`` but for the number of groups."""
multiply_panel = asm.operation("int " * 6 + "-> none", asm.ByFormat(_multiplying_of))
"""``multiply_panel(weights, num_rows, panel, rows, num_groups, target)`` adds the products of
``LEAST_ROWS`` to ``ROWS_AT_ONCE`` rows, records of a tile as in ``grouped_product``, with the groups of a
panel to the target, ``[rows, CHANNELS]`` float32. ``weights`` say the format."""
