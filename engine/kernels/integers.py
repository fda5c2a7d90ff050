"""Operations of loops over weights in few bits: bytes from floats, and sums of products.

A product of an unsigned by a signed byte is added to 32 bits, four at a time, by one instruction (VNNI):
``vpdpbusd``, of sixteen sums with AVX-512, of eight with AVX alone. CPUs that have AVX2 without it add
pairs of products in 16 bits, as many as fit, and then to 32. Rows that keep their floats are multiplied
with weights that are made floats on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels.formats import CHANNELS, FOURS, GROUP, Format, GroupReader, Places, Weighing

HEADER_BYTES = 16
"""The bytes of a group in a record before its values: its scale and the sum of its values (float32), and
where sums of its products begin (int32): of all of it, or of either half."""
LIFT = 0x4B400000
"""Where sums of groups begin, but for what codes are too large by, times the inputs' sum. As bits of a
float they are 1.5 * 2**23 plus the sum, which is less than 2**22: no instruction has to convert them."""
WIDE, NARROW = "llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpbusd.256"
PAIRS, BYTE_PAIRS = "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw"
BYTE_SUMS = "llvm.x86.sse2.psad.bw"
_LINE = 64  # bytes of a line of a cache
_LIFTED = 1.5 * 2.0**23  # as a float


def can_multiply() -> bool:
    """Whether numba compiles for a machine that multiplies integers in vectors."""
    return is_wide() or asm.has_feature("avx2")


def has_integer_products() -> bool:
    """Whether it has an instruction that adds four products of bytes."""
    return is_wide() or asm.has_feature("avxvnni")


def is_wide() -> bool:
    """Whether the instruction is that of sixteen sums."""
    return asm.has_feature("avx512vnni")


MOST_ROWS = 2 * asm.ROWS_AT_ONCE
"""Rows of a tile, of any format."""


def most_rows(kind: Format) -> int:
    """Returns how many rows a tile has at most. Codes are unpacked once for all of them; those that need
    it least, of 8 bits, are too large to be read twice, for either half of a block's channels."""
    is_narrow = kind.bits == 8 and kind.has_scales and kind.inputs == "int8"
    return asm.ROWS_AT_ONCE if is_narrow or not is_wide() else MOST_ROWS


# --- bytes from floats ---


def _as_ints(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, asm.INTS)


def _larger_bits(builder: Any, x: Any, y: Any) -> Any:
    these, those = _as_ints(builder, x), _as_ints(builder, y)
    chosen = builder.select(builder.icmp_signed(">", these, those), these, those)
    return builder.bitcast(chosen, asm.FLOATS)


def _largest_bits(builder: Any, value: Any) -> Any:
    name = f"llvm.vector.reduce.smax.v{LANES}i32"
    return builder.bitcast(
        asm.called(builder, name, asm.INT32, _as_ints(builder, value)), asm.FLOAT
    )


def _store_int8(builder: Any, address: Any, value: Any) -> Any:
    # What is lifted is rounded; its last bits are the whole number, and one more bit makes it unsigned.
    lifted = _as_ints(builder, builder.fadd(value, asm.constant(_LIFTED)))
    octets = builder.trunc(lifted, ir.VectorType(asm.INT8, LANES))
    asm.write(builder, address, octets, 1)
    unsigned = builder.xor(octets, asm.like(octets, -128))
    none, sums = asm.like(octets, 0), ir.VectorType(ir.IntType(64), 2)
    found = asm.called(builder, BYTE_SUMS, sums, unsigned, none)
    parts = [builder.extract_element(found, asm.INT32(each)) for each in range(2)]
    return asm.plus(builder, builder.add(*parts), -128 * LANES)


larger_bits = asm.operation("lanes lanes -> lanes", _larger_bits)
"""The larger of two magnitudes, lane by lane, by their bits: infinity is larger than any number, and what
is no number larger still."""
largest_bits_of = asm.operation("lanes -> float", _largest_bits)
"""Returns the largest of sixteen magnitudes, likewise."""
store_int8 = asm.operation("int lanes -> int", _store_int8)
"""Stores sixteen numbers from -127 to 127, each as the nearest whole one, ties to even; others have no
use. Returns their sum."""
features_of_a_scale = asm.operation(
    "int int -> int",
    asm.ByFormat(lambda kind: lambda _b, _at, row: row.type(GROUP) if kind.has_scales else row),
)
"""``features_of_a_scale(weights, num_features)``: of a row, whose features are so many; where it does not
depend on the row, that is known when code is compiled."""
rows_of_a_tile = asm.operation(
    "int -> int", asm.ByFormat(lambda kind: lambda _b, at: at.type(most_rows(kind)))
)
"""``rows_of_a_tile(weights)``: at most."""
half_at = asm.operation(
    "int -> float", lambda b, at: b.fpext(asm.read(b, at, ir.HalfType(), 2), asm.FLOAT)
)
"""Reads a float16."""
multiply_add = asm.operation(
    "float float float -> float", lambda b, *each: asm.called(b, "llvm.fma.f32", asm.FLOAT, *each)
)
"""``multiply_add(a, b, c)`` returns a * b + c, rounded once."""


# --- sums of products ---


def _parts(builder: Any, count: int, *values: Any) -> list[list[Any]]:
    """Returns each part of ``count`` of the sixteen lanes, of every value."""
    found = []
    for start in range(0, LANES, count):
        lanes = ir.Constant(ir.VectorType(asm.INT32, count), list(range(start, start + count)))
        found.append([builder.shuffle_vector(each, each, lanes) for each in values])
    return found


def _joined(builder: Any, parts: list[Any]) -> Any:
    return builder.shuffle_vector(*parts, ir.Constant(asm.INTS, list(range(LANES))))


def _add_products(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    """``weights`` times ``row``: unsigned and signed bytes, four to each sum."""
    if is_wide():
        return asm.called(builder, WIDE, asm.INTS, total, weights, row)
    half = ir.VectorType(asm.INT32, LANES // 2)
    parts = _parts(builder, LANES // 2, total, weights, row)
    return _joined(builder, [asm.called(builder, NARROW, half, *each) for each in parts])


class _Plane(NamedTuple):
    """The bits of each byte of ``mask``, ``shift`` further up in codes. Of so many fours, ``num_fours``,
    products with a row's values have sums of 16 bits."""

    shift: int
    mask: int
    num_fours: int


def _fours_in_16_bits(largest: int) -> int:
    """Returns of how many fours pairs may be added; ``largest``: of the codes."""
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
    """Returns sums of 16 bits, two for each channel, eight channels at a time, or none yet, with a four's
    products."""
    words, octets = ir.VectorType(asm.INT16, LANES), ir.VectorType(asm.INT8, 2 * LANES)
    products = [
        asm.called(builder, BYTE_PAIRS, words, *(builder.bitcast(each, octets) for each in pair))
        for pair in _parts(builder, LANES // 2, weights, row)
    ]
    if sums:
        products = [builder.add(*pair) for pair in zip(sums, products, strict=True)]
    return [_kept_here(builder, each) for each in products]


def _kept_here(builder: Any, value: Any) -> Any:
    """Returns it through no instruction, which LLVM does not know: it would move all sums to the end of a
    group, and keep unpacked codes in memory until then."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=x,0", [value], True)


def _add_pairs(builder: Any, total: Any, sums: list[Any], plane: _Plane) -> Any:
    """Returns the total with sums of 16 bits."""
    factor, found = asm.like(sums[0], 1 << plane.shift), []
    for (part,), words in zip(_parts(builder, LANES // 2, total), sums, strict=True):
        found.append(builder.add(part, asm.called(builder, PAIRS, part.type, words, factor)))
    return _joined(builder, found)


Halves = tuple[int, ...]
"""Halves of a block's channels, by number: sixteen channels each."""


def _passes(kind: Format, num_rows: int) -> list[Halves]:
    """Returns which halves are multiplied at once: so many sums, and totals beside them, there are
    registers for."""
    fits = num_rows <= (asm.ROWS_AT_ONCE if is_wide() else asm.WAITING_ROWS)
    if is_wide() and not kind.has_scales:
        fits = True  # totals come after all sums
    return [(0, 1)] if fits else [(0,), (1,)]


class IntegerTile(asm.Tile):
    """Sums of a group, or half of one, are integers; totals of all groups are floats."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        super().__init__(builder, num_rows, CHANNELS)
        self._whole = self.sums(ir.Constant(asm.INTS, None))

    def begin(self, headers: list[Any], part: int, halves: Halves) -> None:
        """Takes from the records where sums of a part of the group begin."""
        builder = self._builder
        for header, mine in zip(headers, self._whole, strict=True):
            start = asm.read(builder, asm.plus(builder, header, 8 + 4 * part), asm.INT32, 4)
            for half in halves:
                builder.store(asm.splatted(builder, start), mine[half])

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
        builder = self._builder
        # Half after half: with the numbers of both there would not be registers for all sums.
        for index in halves:
            for header, sums, mine in zip(headers, self._whole, totals, strict=True):
                count = None if by is None or by.minima is None else self._number(header, 4)
                value = self._value(builder.load(sums[index]), index, by, count)
                scale = self._number(header, 0)
                total = asm.fused(builder, value, scale, builder.load(mine[index]))
                builder.store(total, mine[index])

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


def _tile(builder: Any, kind: Format, num_rows: int) -> IntegerTile:
    if has_integer_products():
        return IntegerTile(builder, num_rows)
    return _PairsTile(builder, kind, num_rows)


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
        """Returns a four's. As many bytes as they take are fetched, if they are read first."""
        if is_first:
            self._fetch(here, four, halves)
        return reader.codes(four)

    def _fetch(self, here: Any, four: int, halves: Halves) -> None:
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
    lift = asm.constant(-_LIFTED)
    return PartWeighing(scales, [builder.fmul(scale, lift) for scale in scales], minima)


def _multiply_integers(kind: Format, num_rows: int) -> asm.Emit:
    def emit(
        builder: Any, weights: Any, places: Any, rows: Any, stride: Any, target: Any, *fetched: Any
    ) -> None:
        walk = Walk(builder, kind, weights, places, *fetched)
        tile = _tile(builder, kind, num_rows)
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
``grouped_product`` has it, or float32; ``target`` ``[num_rows, CHANNELS]`` float32. Meanwhile as many
bytes as there are of weights, or with a ``halving`` of 1 half as many, are fetched from ``ahead`` on, a
line at a time: all at once they would be in the way of what is read now."""
