"""Operations of loops over 8 bits: bytes from floats, and sums of products of bytes.

A product of an unsigned by a signed byte is added to 32 bits, four at a time, by one instruction (VNNI):
``vpdpbusd``, of sixteen sums with AVX-512, of eight with AVX alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels import instructions as asm

CHANNELS = 2 * LANES
"""Output channels of a block of packed weights: of each so many are multiplied with a row at once."""
HEADER_BYTES = 8
"""The bytes of a group in a record before its values: its scale and its correction."""
WIDE, NARROW = "llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpbusd.256"
GROUP_STEP = 32
"""Features of a group are a multiple of it."""
_FOURS_AT_ONCE = GROUP_STEP // 4


def has_integer_products() -> bool:
    """Whether numba compiles for a machine with the instruction that they are made of."""
    return is_wide() or asm.has_feature("avxvnni")


def is_wide() -> bool:
    """Whether the instruction is that of sixteen sums."""
    return asm.has_feature("avx512vnni")


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


def _store_int8(builder: Any, address: Any, value: Any) -> None:
    whole = builder.fptosi(value, asm.INTS)
    asm.write(builder, address, builder.trunc(whole, ir.VectorType(asm.INT8, LANES)), 1)


larger_bits = asm.operation("lanes lanes -> lanes", _larger_bits)
"""The larger of two magnitudes, lane by lane, by their bits: infinity is larger than any number, and what
is no number larger still."""
largest_bits_of = asm.operation("lanes -> float", _largest_bits)
"""Returns the largest of sixteen magnitudes, likewise."""
to_whole = asm.operation(
    "lanes -> lanes", lambda b, x: asm.called(b, f"llvm.roundeven.v{LANES}f32", asm.FLOATS, x)
)
"""To the nearest whole number, ties to even."""
store_int8 = asm.operation("int lanes -> none", _store_int8)
"""Stores whole numbers from -128 to 127; others have no use."""


# --- sums of products ---


def _add_products(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    """``weights`` unsigned, ``row`` signed bytes, four to each sum."""
    if is_wide():
        return asm.called(builder, WIDE, asm.INTS, total, weights, row)
    half = ir.VectorType(asm.INT32, LANES // 2)
    parts = []
    for start in (0, LANES // 2):
        lanes = ir.Constant(half, list(range(start, start + LANES // 2)))
        values = (builder.shuffle_vector(each, each, lanes) for each in (total, weights, row))
        parts.append(asm.called(builder, NARROW, half, *values))
    return builder.shuffle_vector(*parts, ir.Constant(asm.INTS, list(range(LANES))))


class _IntegerTile(asm.Tile):
    """Sums of a group are integers; ``totals`` of all groups are floats."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        super().__init__(builder, num_rows, CHANNELS)
        self.totals = self.sums(asm.constant(0.0))
        self._whole = self.sums(ir.Constant(asm.INTS, None))

    def begin_group(self, headers: list[Any]) -> None:
        builder = self._builder
        for header, mine in zip(headers, self._whole, strict=True):
            correction = asm.read(builder, asm.plus(builder, header, 4), asm.INT32, 1)
            for total in mine:
                builder.store(asm.splatted(builder, correction), total)

    def add_four(self, rows: list[Any], weights: Any, offset: Any) -> None:
        """Adds four features of each row and channel; ``offset``: bytes from where a row's values are."""
        builder = self._builder
        columns = self.columns(weights, 4, lambda b, at: asm.read(b, at, asm.INTS, 1))
        for row, mine in zip(rows, self._whole, strict=True):
            four = asm.splatted(builder, asm.read(builder, builder.add(row, offset), asm.INT32, 1))
            for total, column in zip(mine, columns, strict=True):
                builder.store(_add_products(builder, builder.load(total), column, four), total)

    def end_group(self, headers: list[Any], scales: list[Any] | None) -> None:
        """Sums become floats, are multiplied with the channels' scales of this group, if there are such,
        then with the row's, and added to the totals, which rounds once."""
        builder = self._builder
        for header, sums, totals in zip(headers, self._whole, self.totals, strict=True):
            by = asm.splatted(builder, asm.read(builder, header, asm.FLOAT, 1))
            for index, (whole, total) in enumerate(zip(sums, totals, strict=True)):
                value = builder.sitofp(builder.load(whole), asm.FLOATS)
                if scales is not None:
                    value = builder.fmul(value, scales[index])
                builder.store(asm.fused(builder, value, by, builder.load(total)), total)


def _multiplying(has_scales: bool, num_rows: int) -> asm.Emit:
    def emit(
        builder: Any, rows: Any, stride: Any, weights: Any, num_groups: Any, group: Any,
        target: Any, ahead: Any,
    ) -> None:  # fmt: skip
        kind = rows.type
        tile = _IntegerTile(builder, num_rows)
        starts = tile.rows(rows, stride)
        weight_bytes = builder.mul(group, kind(CHANNELS))
        group_bytes = asm.plus(builder, weight_bytes, 2 * CHANNELS if has_scales else 0)
        with cgutils.for_range(builder, num_groups) as loop:
            offset = builder.mul(loop.index, asm.plus(builder, group, HEADER_BYTES))
            headers = [builder.add(start, offset) for start in starts]
            values = [asm.plus(builder, header, HEADER_BYTES) for header in headers]
            here = builder.add(weights, builder.mul(loop.index, group_bytes))
            tile.begin_group(headers)
            rounds = builder.udiv(group, kind(4 * _FOURS_AT_ONCE))
            with cgutils.for_range(builder, rounds) as inner:
                first = builder.mul(inner.index, kind(_FOURS_AT_ONCE))
                for which in range(_FOURS_AT_ONCE):
                    index = asm.plus(builder, first, which)
                    at = builder.add(here, builder.mul(index, kind(4 * CHANNELS)))
                    if num_rows > asm.WAITING_ROWS:
                        distance = builder.lshr(builder.sub(at, weights), kind(1))
                        asm.fetch(builder, builder.add(ahead, distance))
                    tile.add_four(values, at, builder.mul(index, kind(4)))
            scales = None
            if has_scales:
                scales = tile.columns(builder.add(here, weight_bytes), 2, asm.load_float16)
            tile.end_group(headers, scales)
        tile.write(tile.totals, tile.rows(target, kind(4 * CHANNELS)))

    return emit


def _multiplying_any(has_scales: bool) -> Any:
    def emit(builder: Any, num_rows: Any, *values: Any) -> None:
        asm.by_rows(partial(_multiplying, has_scales), builder, num_rows, *values)

    return asm.operation("int " * 8 + "-> none", emit)


multiply_by_group = _multiplying_any(True)
"""(number of rows, records, bytes from one to the next, weights, groups, features in a group, target,
ahead). Records as in ``int8_product``; weights ``[groups]`` of ``[fours of features, CHANNELS, 4]``
uint8, which are 128 too large, and ``[CHANNELS]`` float16 scales; target ``[rows, CHANNELS]`` float32.
Meanwhile half as many bytes as there are of weights are fetched from ``ahead`` on, a line at a time: all
at once they would be in the way of what is read now."""
multiply_by_channel = _multiplying_any(False)
"""The same where weights have no scales of their groups."""
