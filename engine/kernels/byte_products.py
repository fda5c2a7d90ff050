"""Sums of products of bytes, a group of weights at a time, and what makes floats of them.

A product of an unsigned by a signed byte is added to 32 bits, four at a time, by one instruction (VNNI):
``vpdpbusd``, of sixteen sums with AVX-512, of eight with AVX alone. CPUs that have AVX2 without it add
pairs of products in 16 bits, as many as fit, and then to 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from engine.kernels import LANES, integers
from engine.kernels import instructions as asm
from engine.kernels.formats import CHANNELS, Format, GroupReader
from engine.kernels.integers import LIFTED

WIDE, NARROW = "llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpbusd.256"
PAIRS, BYTE_PAIRS = "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw"


def _parts(builder: Any, *values: Any) -> list[list[Any]]:
    """Returns the lower eight lanes of every value, and the upper eight."""
    count, found = LANES // 2, []
    for start in (0, count):
        lanes = ir.Constant(ir.VectorType(asm.INT32, count), list(range(start, start + count)))
        found.append([builder.shuffle_vector(each, each, lanes) for each in values])
    return found


def _joined(builder: Any, parts: list[Any]) -> Any:
    return builder.shuffle_vector(*parts, ir.Constant(asm.INTS, list(range(LANES))))


def _add_products(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    """``weights`` times ``row``: unsigned and signed bytes, four to each sum."""
    if integers.is_wide():
        return asm.called(builder, WIDE, asm.INTS, total, weights, row)
    half = ir.VectorType(asm.INT32, LANES // 2)
    parts = _parts(builder, total, weights, row)
    return _joined(builder, [asm.called(builder, NARROW, half, *each) for each in parts])


class _Plane(NamedTuple):
    """Some bits of every code: those of ``mask`` once codes are shifted down by ``shift``. ``num_fours``:
    the most fours of features whose products with a row may be added in 16 bits."""

    shift: int
    mask: int
    num_fours: int


def _fours_in_16_bits(largest: int) -> int:
    """Returns how many sums of two products fit, if no code is above ``largest``."""
    return ((1 << 15) - 1) // (2 * 127 * largest)


def _planes(kind: Format) -> list[_Plane]:
    """Returns whole codes if sums of two fours fit, else either half of their bits."""
    whole = _fours_in_16_bits(max(kind.table) if kind.table else (1 << kind.bits) - 1)
    if whole > 1:
        return [_Plane(0, 255, whole)]
    return [_Plane(shift, 15, _fours_in_16_bits(15)) for shift in (0, 4)]


def _bits_of(builder: Any, codes: Any, plane: _Plane) -> Any:
    if plane.shift:
        codes = builder.lshr(codes, asm.whole_numbers(plane.shift))
    return builder.and_(codes, asm.whole_numbers(plane.mask * 0x01010101))


def _add_bytes(builder: Any, sums: list[Any], weights: Any, row: Any) -> list[Any]:
    """Adds a four's products to ``sums``, which are empty before the first four. Returns the new sums, of
    16 bits, two for each channel: those of the lower eight channels, and of the upper eight."""
    words, octets = ir.VectorType(asm.INT16, LANES), ir.VectorType(asm.INT8, 2 * LANES)
    products = [
        asm.called(builder, BYTE_PAIRS, words, *(builder.bitcast(each, octets) for each in pair))
        for pair in _parts(builder, weights, row)
    ]
    if sums:
        products = [builder.add(*pair) for pair in zip(sums, products, strict=True)]
    return [_kept_here(builder, each) for each in products]


def _kept_here(builder: Any, value: Any) -> Any:
    """Returns the value through an empty piece of assembly, which LLVM leaves where it is. Without it all
    sums would move to the end of a group, and unpacked codes would wait for them in memory."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=x,0", [value], True)


def _add_pairs(builder: Any, total: Any, sums: list[Any], plane: _Plane) -> Any:
    """Returns ``total`` (int32) and what ``_add_bytes`` has added up."""
    factor, found = asm.like(sums[0], 1 << plane.shift), []
    for (part,), words in zip(_parts(builder, total), sums, strict=True):
        found.append(builder.add(part, asm.called(builder, PAIRS, part.type, words, factor)))
    return _joined(builder, found)


Halves = tuple[int, ...]
"""Halves of a block's channels, by number: sixteen channels each."""


class PartWeighing(NamedTuple):
    """The factors that make floats of a part's sums, for each sixteen channels: scales; the lift times
    the scales, negated; minima, or None."""

    scales: list[Any]
    drops: list[Any]
    minima: list[Any] | None


def weighed(builder: Any, reader: GroupReader, part: int) -> PartWeighing:
    """Returns the weighing of a part of a group. Zero points become minima, whose products with scales of
    float16 are not rounded."""
    weighing = reader.weighing()
    minima, scales = weighing.minima, weighing.scales[part]
    if weighing.zeros is not None:
        minima = [
            builder.fneg(builder.fmul(scale, builder.sitofp(zero, asm.FLOATS)))
            for scale, zero in zip(scales, weighing.zeros, strict=True)
        ]
    lift = asm.constant(-LIFTED)
    return PartWeighing(scales, [builder.fmul(scale, lift) for scale in scales], minima)


class IntegerTile(asm.Tile):
    """Sums of a group, or half of one, are integers; totals of all groups are floats."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        super().__init__(builder, num_rows, CHANNELS)
        self._whole = self.sums(ir.Constant(asm.INTS, None))

    def begin(self, headers: list[Any], part: int, halves: Halves) -> None:
        """Takes from the records where sums of a part of the group begin."""
        for header, mine in zip(headers, self._whole, strict=True):
            start = self.start(header, part)
            for half in halves:
                self._builder.store(start, mine[half])

    def start(self, header: Any, part: int) -> Any:
        """Returns where a row's sums of a part of the group begin."""
        place = asm.plus(self._builder, header, 8 + 4 * part)
        return asm.splatted(self._builder, asm.read(self._builder, place, asm.INT32, 4))

    def add_fours(
        self, rows: list[Any], fours: range, codes: Callable[..., list[Any]], halves: Halves
    ) -> None:
        """Adds fours of features of each row and channel; ``codes`` returns what ``Walk.codes`` does."""
        for four in fours:
            columns = codes(four)
            for row, mine in zip(rows, self._whole, strict=True):
                values = self._four(row, four)
                for half in halves:
                    total = self._builder.load(mine[half])
                    total = _add_products(self._builder, total, columns[half], values)
                    self._builder.store(total, mine[half])

    def _four(self, row: Any, four: int) -> Any:
        place = asm.plus(self._builder, row, 4 * four)
        return asm.splatted(self._builder, asm.read(self._builder, place, asm.INT32, 1))

    def end(
        self, headers: list[Any], by: PartWeighing | None, totals: list[list[Any]], halves: Halves
    ) -> None:
        """Sums become floats, are multiplied with the channels' scales of this group, if there are such,
        get the minima times the inputs' sum, then are multiplied with the row's scale and added to the
        totals. Each step is rounded once."""
        # Half after half: with the numbers of both there would not be registers for all sums.
        for index in halves:
            for header, sums, mine in zip(headers, self._whole, totals, strict=True):
                self.add_whole(header, self._builder.load(sums[index]), index, by, mine[index])

    def add_whole(
        self, header: Any, whole: Any, half: int, by: PartWeighing | None, total: Any
    ) -> None:
        """Adds a row's sums for sixteen channels to their total, as ``end`` says."""
        builder = self._builder
        count = None if by is None or by.minima is None else self._number(header, 4)
        value = self._value(whole, half, by, count)
        scale = self._number(header, 0)
        builder.store(asm.fused(builder, value, scale, builder.load(total)), total)

    def _value(self, whole: Any, index: int, by: PartWeighing | None, count: Any) -> Any:
        builder = self._builder
        if by is None:
            return builder.sitofp(whole, asm.FLOATS)
        # What is lifted times the scale, less the lift times the scale, which is exact: as if the sum
        # were made a float and multiplied, since both round what the exact product is.
        lifted = builder.bitcast(whole, asm.FLOATS)
        value = asm.fused(builder, lifted, by.scales[index], by.drops[index])
        if by.minima is not None:
            value = asm.fused(builder, by.minima[index], count, value)
        return value

    def _number(self, header: Any, offset: int) -> Any:
        builder = self._builder
        place = asm.plus(builder, header, offset)
        return asm.splatted(builder, asm.read(builder, place, asm.FLOAT, 4))


class _PairsTile(IntegerTile):
    """The same with AVX2 alone: sums of 16 bits take the registers, and are added to those in between."""

    def __init__(self, builder: Any, kind: Format, num_rows: int) -> None:
        super().__init__(builder, num_rows)
        self._planes = _planes(kind)

    def add_fours(
        self, rows: list[Any], fours: range, codes: Callable[..., list[Any]], halves: Halves
    ) -> None:
        for plane in self._planes:
            for first in range(fours.start, fours.stop, plane.num_fours):
                run = range(first, min(first + plane.num_fours, fours.stop))
                self._add_run(rows, run, codes, halves, plane)

    def _add_run(
        self, rows: list[Any], fours: range, codes: Callable[..., list[Any]], halves: Halves,
        plane: _Plane,
    ) -> None:  # fmt: skip
        builder = self._builder
        sums: list[list[list[Any]]] = [[[], []] for _ in rows]
        for four in fours:
            columns = [
                _bits_of(builder, each, plane) for each in codes(four, is_first=not plane.shift)
            ]
            for row, mine in zip(rows, sums, strict=True):
                values = self._four(row, four)
                for half in halves:
                    mine[half] = _add_bytes(builder, mine[half], columns[half], values)
        for whole, mine in zip(self._whole, sums, strict=True):
            for half in halves:
                total = _add_pairs(builder, builder.load(whole[half]), mine[half], plane)
                builder.store(total, whole[half])


def tile_of(builder: Any, kind: Format, num_rows: int) -> IntegerTile:
    """Returns the tile for the instructions that there are."""
    if integers.has_integer_products():
        return IntegerTile(builder, num_rows)
    return _PairsTile(builder, kind, num_rows)
