"""What loops over 8 bits are written in: bytes from floats, and sums of products of bytes.

A product of an unsigned by a signed byte is added to 32 bits, four at a time, by one instruction (VNNI):
``vpdpbusd``, of sixteen sums with AVX-512, of eight with AVX alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, njit
from numba.core import cgutils

from engine.kernels import LANES
from engine.kernels.instructions import (
    FLOAT,
    FLOATS,
    INT8,
    INT32,
    INTS,
    constant,
    fetch,
    float_type,
    fused,
    int_type,
    lanes_type,
    llvm,
    load_float16,
    none_type,
    operation,
    plus,
    read,
    splatted,
    write,
)

CHANNELS = 2 * LANES
"""Output channels of a block of packed weights: of each so many are multiplied with a row at once."""
MOST_ROWS = 6
"""Rows that are multiplied at once: their sums, in integers and in floats, fill the registers."""
_WIDE, _NARROW = "llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpbusd.256"
GROUP_STEP = 32
"""Features of a group are a multiple of it."""
_FOURS_AT_ONCE = GROUP_STEP // 4
_WAITING_ROWS = 2
"""So few wait for memory anyway, which reads ahead by itself."""


def _features() -> dict[str, bool]:
    if config.CPU_NAME or config.CPU_FEATURES:
        return {}  # for another machine than this one: LLVM would give up on what that lacks
    try:
        return dict(get_host_cpu_features())
    except RuntimeError:  # LLVM does not know the machine
        return {}


def has_integer_products() -> bool:
    """Whether numba compiles for a machine with the instruction that they are made of."""
    features = _features()
    return bool(features.get("avx512vnni") or features.get("avxvnni"))


def _is_wide() -> bool:
    return bool(_features().get("avx512vnni"))


# --- bytes from floats ---


def _as_ints(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, INTS)


def _larger_bits(builder: Any, x: Any, y: Any) -> Any:
    these, those = _as_ints(builder, x), _as_ints(builder, y)
    chosen = builder.select(builder.icmp_signed(">", these, those), these, those)
    return builder.bitcast(chosen, FLOATS)


def _largest_bits(builder: Any, value: Any) -> Any:
    reduce = builder.module.declare_intrinsic(
        f"llvm.vector.reduce.smax.v{LANES}i32", (), ir.FunctionType(INT32, [INTS])
    )
    return builder.bitcast(builder.call(reduce, [_as_ints(builder, value)]), FLOAT)


def _store_int8(builder: Any, address: Any, value: Any) -> None:
    whole = builder.fptosi(value, INTS)
    write(builder, address, builder.trunc(whole, ir.VectorType(INT8, LANES)), 1)


larger_bits = operation(_larger_bits, lanes_type, lanes_type, lanes_type)
"""The larger of two magnitudes, lane by lane, by their bits: infinity is larger than any number, and what
is no number larger still."""
largest_bits_of = operation(_largest_bits, float_type, lanes_type)
"""Of sixteen magnitudes, likewise."""
to_whole = operation(
    lambda b, x: llvm(b, f"llvm.roundeven.v{LANES}f32", FLOATS, x), lanes_type, lanes_type
)
"""To the nearest whole number, ties to even."""
store_int8 = operation(_store_int8, none_type, int_type, lanes_type)
"""Of whole numbers from -128 to 127; others have no use."""
write_int32 = operation(
    lambda b, at, value: write(b, at, b.trunc(value, INT32), 1), none_type, int_type, int_type
)


# --- sums of products ---


def _add_products(builder: Any, total: Any, weights: Any, row: Any) -> Any:
    """``weights`` unsigned, ``row`` signed bytes, four to each sum."""
    if _is_wide():
        return _call(builder, _WIDE, INTS, total, weights, row)
    half = ir.VectorType(INT32, LANES // 2)
    parts = []
    for start in (0, LANES // 2):
        lanes = ir.Constant(half, list(range(start, start + LANES // 2)))
        values = (builder.shuffle_vector(each, each, lanes) for each in (total, weights, row))
        parts.append(_call(builder, _NARROW, half, *values))
    return builder.shuffle_vector(*parts, ir.Constant(INTS, list(range(LANES))))


def _call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(values)), name
    )
    return builder.call(function, values)


class _Tile:
    """Sums of some rows' products with a block of channels, in registers."""

    def __init__(self, builder: Any, num_rows: int) -> None:
        self.builder = builder
        self.width = CHANNELS // LANES
        self.totals = self._places(num_rows, constant(0.0))
        self.sums = self._places(num_rows, ir.Constant(INTS, None))

    def _places(self, num_rows: int, value: Any) -> list[list[Any]]:
        return [
            [cgutils.alloca_once_value(self.builder, value) for _ in range(self.width)]
            for _ in range(num_rows)
        ]

    def columns(self, address: Any, size: int, load: Callable[[Any, Any], Any]) -> list[Any]:
        """``size``: bytes of what is loaded of each channel."""
        places = (plus(self.builder, address, size * LANES * at) for at in range(self.width))
        return [load(self.builder, place) for place in places]

    def begin_group(self, headers: list[Any]) -> None:
        builder = self.builder
        for header, mine in zip(headers, self.sums, strict=True):
            correction = read(builder, plus(builder, header, 4), INT32, 1)
            for total in mine:
                builder.store(splatted(builder, correction), total)

    def add_four(self, rows: list[Any], weights: Any, offset: Any) -> None:
        """Four features of each row and channel; ``offset``: bytes from where a row's values begin."""
        builder = self.builder
        columns = self.columns(weights, 4, lambda b, at: read(b, at, INTS, 1))
        for row, mine in zip(rows, self.sums, strict=True):
            four = splatted(builder, read(builder, builder.add(row, offset), INT32, 1))
            for total, column in zip(mine, columns, strict=True):
                builder.store(_add_products(builder, builder.load(total), column, four), total)

    def end_group(self, headers: list[Any], scales: list[Any] | None) -> None:
        """Sums become floats, are multiplied with the channels' scales of this group, if there are such,
        then with the row's, and added to the totals, which rounds once."""
        builder = self.builder
        for header, sums, totals in zip(headers, self.sums, self.totals, strict=True):
            by = splatted(builder, read(builder, header, FLOAT, 1))
            for index, (whole, total) in enumerate(zip(sums, totals, strict=True)):
                value = builder.sitofp(builder.load(whole), FLOATS)
                if scales is not None:
                    value = builder.fmul(value, scales[index])
                builder.store(fused(builder, value, by, builder.load(total)), total)

    def write(self, target: Any) -> None:
        for row, mine in enumerate(self.totals):
            for at, total in enumerate(mine):
                place = plus(self.builder, target, 4 * (CHANNELS * row + LANES * at))
                write(self.builder, place, self.builder.load(total), 4)


def _multiplying(num_rows: int, has_scales: bool) -> Callable[..., None]:
    def emit(
        builder: Any,
        rows: Any,
        stride: Any,
        weights: Any,
        num_groups: Any,
        fours: Any,
        target: Any,
        ahead: Any,
    ) -> None:
        kind = rows.type
        tile = _Tile(builder, num_rows)
        starts = [builder.add(rows, builder.mul(stride, kind(row))) for row in range(num_rows)]
        values_bytes = builder.mul(fours, kind(4))
        weight_bytes = builder.mul(fours, kind(4 * CHANNELS))
        group_bytes = plus(builder, weight_bytes, 2 * CHANNELS if has_scales else 0)
        record_bytes = plus(builder, values_bytes, 8)
        with cgutils.for_range(builder, num_groups) as group:
            offset = builder.mul(group.index, record_bytes)
            headers = [builder.add(start, offset) for start in starts]
            values = [plus(builder, header, 8) for header in headers]
            here = builder.add(weights, builder.mul(group.index, group_bytes))
            tile.begin_group(headers)
            rounds = builder.udiv(fours, kind(_FOURS_AT_ONCE))
            with cgutils.for_range(builder, rounds) as loop:
                first = builder.mul(loop.index, kind(_FOURS_AT_ONCE))
                for which in range(_FOURS_AT_ONCE):
                    index = plus(builder, first, which)
                    at = builder.add(here, builder.mul(index, kind(4 * CHANNELS)))
                    if num_rows > _WAITING_ROWS:
                        distance = builder.lshr(builder.sub(at, weights), kind(1))
                        fetch(builder, builder.add(ahead, distance))
                    tile.add_four(values, at, builder.mul(index, kind(4)))
            scales = None
            if has_scales:
                scales = tile.columns(builder.add(here, weight_bytes), 2, load_float16)
            tile.end_group(headers, scales)
        tile.write(target)

    return emit


def _multiplying_any(has_scales: bool) -> Any:
    one, two, three, four, five, six = (
        operation(_multiplying(count, has_scales), none_type, *[int_type] * 7)
        for count in range(1, MOST_ROWS + 1)
    )

    @njit
    def multiply(
        count: int,
        rows: int,
        stride: int,
        weights: int,
        groups: int,
        fours: int,
        target: int,
        ahead: int,
    ) -> None:
        if count == 1:
            one(rows, stride, weights, groups, fours, target, ahead)
        elif count == 2:
            two(rows, stride, weights, groups, fours, target, ahead)
        elif count == 3:
            three(rows, stride, weights, groups, fours, target, ahead)
        elif count == 4:
            four(rows, stride, weights, groups, fours, target, ahead)
        elif count == 5:
            five(rows, stride, weights, groups, fours, target, ahead)
        else:
            six(rows, stride, weights, groups, fours, target, ahead)

    return multiply


multiply_by_group = _multiplying_any(True)
"""(number of rows, records, bytes from one to the next, weights, groups, fours of features in a group,
target, ahead). Records as in ``int8_rows``; weights ``[groups]`` of ``[fours, CHANNELS, 4]`` uint8,
which are 128 too large, and ``[CHANNELS]`` float16 scales; target ``[rows, CHANNELS]`` float32.
Meanwhile half as many bytes as there are of weights are fetched from ``ahead`` on, a line at a time: all
at once they would be in the way of what is read now."""
multiply_by_channel = _multiplying_any(False)
"""The same where weights have no scales of their groups."""
