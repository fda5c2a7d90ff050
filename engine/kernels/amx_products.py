"""Sums of products of bytes by AMX: of up to sixteen rows with sixteen channels by one instruction, which
takes as long for one row.

The sums are whole numbers and become floats by the steps of ``byte_products``, so the bits are the same.
Those of a group leave AMX's registers through memory, and codes of few bits come through it. A load of
what was just stored waits for all stores before it, so a few groups are unpacked, then multiplied, then
weighed; interleaved it was slower, since floats lose one of their two ports where AMX is in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.kernels import instructions as asm
from engine.kernels.byte_products import IntegerTile, weighed
from engine.kernels.formats import CHANNELS, FOURS, GROUP, Format
from engine.kernels.integers import HEADER_BYTES

MOST_ROWS = 32
_SQUARE = 16
"""Lines of a register."""
_LINE = 64
"""Bytes of a line of a register, and of a cache."""
_INPUTS, _CODES, _SUMS = (0, 1), (2, 3), ((4, 5), (6, 7))
"""Registers: of the rows' squares, of the channels' halves, and of both."""
_HALVES = (0, 1)
_TURN = 4
"""Groups that are unpacked, multiplied and weighed at once: for many more the first cache is small."""
_ROWS_AT_ONCE = 8
"""Rows for whose totals there are registers."""
ROOM = _LINE // 4 * (1 + _TURN * (2 * FOURS + 2 * MOST_ROWS))
"""Floats behind the results of ``MOST_ROWS`` rows, for codes and sums of a turn."""
_RECORD = HEADER_BYTES + GROUP
_INT = ir.IntType(64)


def can_multiply(kind: Format) -> bool:
    """Whether such weights are multiplied here: sums of half a group, or unpacking for sums of whole
    rows, would take longer than they spare."""
    fits = kind.num_parts == 1 if kind.has_scales else kind.bits == 8
    return fits and kind.inputs == "int8"


def multiply_groups(
    builder: Any, num_rows: int, walk: Any, rows: Any, kind: Format, target: Any
) -> None:
    """Does what ``multiply_tile`` does (``block_products``), with weights whose groups have scales."""
    tile = _AmxTile(builder, num_rows)
    room = asm.plus(builder, target, 4 * CHANNELS * MOST_ROWS)
    work = _Groups(builder, kind, tile, walk, rows, room)
    outs, count = tile.rows(target, _INT(4 * CHANNELS)), walk.num_groups
    tile.write(tile.sums(asm.constant(0.0)), outs)
    tile.configure(FOURS)
    with cgutils.for_range_slice(builder, _INT(0), count, _INT(_TURN), _INT) as (first, _):
        left = builder.sub(count, first)
        few = builder.icmp_signed("<", left, _INT(_TURN))
        groups = first, builder.select(few, left, _INT(_TURN))
        work.each(groups, work.unpack)
        work.each(groups, work.multiply)
        for run in _shares(num_rows, _ROWS_AT_ONCE):
            work.weigh(groups, run, outs)
    tile.release()


def multiply_rows(
    builder: Any, num_rows: int, walk: Any, rows: Any, stride: Any, target: Any
) -> None:
    """The same with weights of 8 bits whose channels alone have scales: sums of whole rows stay in AMX's
    registers."""
    tile, count = _AmxTile(builder, num_rows), walk.num_groups
    outs = tile.rows(target, _INT(4 * CHANNELS))

    def multiply(num_groups: int) -> None:
        """Multiplies so many groups at once."""
        tile.configure(FOURS * num_groups)  # which clears the registers
        groups = cgutils.for_range_slice(builder, _INT(0), count, _INT(num_groups), _INT)
        with groups as (first, _):
            for at in range(num_groups):
                walk.fetch_all(walk.group(asm.plus(builder, first, at))[0])
            values = asm.plus(builder, asm.times(builder, first, GROUP), HEADER_BYTES)
            tile.multiply(builder.add(rows, values), stride, walk.group(first)[0])
        tile.store(outs, 4 * CHANNELS, _LINE)
        tile.release()

    is_odd = builder.trunc(count, ir.IntType(1))
    with builder.if_else(is_odd) as (odd, even):
        with odd:
            multiply(1)
        with even:
            multiply(2)
    totals = tile.sums(asm.constant(0.0))
    for header, out, own in zip(tile.rows(rows, stride), outs, totals, strict=True):
        for half in _HALVES:
            found = asm.read(builder, asm.plus(builder, out, _LINE * half), asm.INTS, 4)
            whole = builder.add(tile.start(header, 0), found)
            tile.add_whole(header, whole, half, None, own[half])
    tile.write(totals, outs)


def _shares(num: int, most: int) -> list[range]:
    """Returns about equal parts of so many, none of which has more than ``most``."""
    num_parts = (num + most - 1) // most
    ends = [num * part // num_parts for part in range(num_parts + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:], strict=False)]


class _AmxTile(IntegerTile):
    """Products of up to ``MOST_ROWS`` rows with a block's channels, in AMX's registers."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        super().__init__(builder, num_rows)
        self._squares = _shares(num_rows, _SQUARE)

    def configure(self, num_fours: int) -> None:
        """Says how many lines registers have, and bytes in each, for so many fours of features."""
        shapes = dict.fromkeys(_CODES, (num_fours, _LINE))
        for square, rows in enumerate(self._squares):
            shapes[_INPUTS[square]] = len(rows), 4 * num_fours
            shapes |= dict.fromkeys(_SUMS[square], (len(rows), _LINE))
        told = bytearray(_LINE)
        told[0] = 1
        for register, (num_lines, width) in shapes.items():
            told[48 + register], told[16 + 2 * register] = num_lines, width
        builder = self._builder
        shape = ir.Constant(ir.ArrayType(asm.INT8, _LINE), told)
        name = builder.module.get_unique_name("amx_shapes")
        place = cgutils.global_constant(builder, name, shape)
        self._do("ldtilecfg", builder.bitcast(place, asm.INT8.as_pointer()))

    def release(self) -> None:
        """Others find registers without shapes, and threads are switched faster."""
        self._do("tilerelease")

    def clear(self) -> None:
        for square in range(len(self._squares)):
            for register in _SUMS[square]:
                self._do("tilezero", register)

    def multiply(self, values: Any, stride: Any, codes: Any) -> None:
        """Adds the products of a group, or two. ``values``: where the first row's are, and ``stride``
        bytes further the next one's; ``codes``: where those of the block are."""
        builder = self._builder
        for half, register in enumerate(_CODES):
            mine = asm.plus(builder, codes, _LINE * half)
            self._move("tileloadd64", register, mine, _INT(2 * _LINE))
        for square, rows in enumerate(self._squares):
            first = builder.add(values, builder.mul(stride, _INT(rows.start)))
            self._move("tileloadd64", _INPUTS[square], first, stride)
            for codes_of_half, sums in zip(_CODES, _SUMS[square], strict=True):
                self._do("tdpbsud", sums, _INPUTS[square], codes_of_half)

    def store(self, rows: list[Any], stride: int, half_stride: int) -> None:
        """Stores the sums of each row where it says, those of the other half ``half_stride`` bytes
        further. ``stride``: bytes from row to row."""
        for square, mine in enumerate(self._squares):
            for half, register in enumerate(_SUMS[square]):
                first = asm.plus(self._builder, rows[mine.start], half_stride * half)
                self._move("tilestored64", register, first, _INT(stride))

    def _move(self, name: str, register: int, address: Any, stride: Any) -> None:
        self._do(name, register, asm.pointer(self._builder, address, asm.INT8), stride)

    def _do(self, name: str, *values: Any) -> None:
        told = [asm.INT8(each) if isinstance(each, int) else each for each in values]
        asm.called(self._builder, f"llvm.x86.{name}", ir.VoidType(), *told)


class _Groups:
    """A turn's groups, which are told by their numbers, and by those in the turn. ``rows``: where the
    records are; ``room``: where codes and sums are left."""

    def __init__(
        self, builder: Any, kind: Format, tile: _AmxTile, walk: Any, rows: Any, room: Any
    ) -> None:
        self._builder, self._kind, self._tile, self._walk = builder, kind, tile, walk
        self._rows = rows
        self._unpacked = builder.and_(asm.plus(builder, room, _LINE - 1), _INT(-_LINE))
        self._found = asm.plus(builder, self._unpacked, _LINE * _TURN * 2 * FOURS)

    def each(self, groups: tuple[Any, Any], do: Callable[[Any, Any], None]) -> None:
        first, num = groups
        with cgutils.for_range(self._builder, num) as loop:
            do(self._builder.add(first, loop.index), loop.index)

    def unpack(self, group: Any, at: Any) -> None:
        here, reader = self._walk.group(group)
        self._fetch(here, 0)
        for four in range(FOURS):
            for half, codes in enumerate(reader.codes(four)):
                if self._kind.bits != 8:
                    line = asm.plus(self._builder, self._codes(at), _LINE * (2 * four + half))
                    asm.write(self._builder, line, codes, _LINE)

    def _codes(self, at: Any) -> Any:
        return self._builder.add(self._unpacked, asm.times(self._builder, at, _LINE * 2 * FOURS))

    def multiply(self, group: Any, at: Any) -> None:
        here, _ = self._walk.group(group)
        self._fetch(here, 1)
        record = self._tile.group(self._rows, group, _RECORD)[0]
        values = asm.plus(self._builder, record, HEADER_BYTES)
        self._tile.clear()
        self._tile.multiply(
            values, _INT(_RECORD), here if self._kind.bits == 8 else self._codes(at)
        )
        self._tile.store(self._sums(at), 2 * _LINE, _LINE)

    def _sums(self, at: Any) -> list[Any]:
        """Returns where each row's are, of either half one after the other."""
        return self._tile.group(self._found, at, 2 * _LINE)

    def weigh(self, groups: tuple[Any, Any], run: range, outs: list[Any]) -> None:
        """Adds a turn's groups to the totals of some rows, in the order of the groups."""
        builder, tile, mine = self._builder, self._tile, slice(run.start, run.stop)
        some = asm.Tile(builder, len(run), CHANNELS)
        totals = some.sums_at(outs[mine])

        def add(group: Any, at: Any) -> None:
            here, reader = self._walk.group(group)
            if run.start == 0:
                self._fetch(here, 2)
            if run.stop == len(outs):
                self._fetch(here, 3)
            headers = tile.group(self._rows, group, _RECORD)[mine]
            by = weighed(builder, reader, 0)
            for header, place, own in zip(headers, self._sums(at)[mine], totals, strict=True):
                start = tile.start(header, 0)
                for half in _HALVES:
                    found = asm.read(
                        builder, asm.plus(builder, place, _LINE * half), asm.INTS, _LINE
                    )
                    tile.add_whole(header, builder.add(start, found), half, by, own[half])

        self.each(groups, add)
        some.write(totals, outs[mine])

    def _fetch(self, here: Any, quarter: int) -> None:
        """Fetches a quarter of what is read next: all at once would be waited for."""
        for four in range(FOURS * quarter // 4, FOURS * (quarter + 1) // 4):
            self._walk.fetch(here, four, _HALVES)
