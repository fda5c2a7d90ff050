"""The lowest layer of the loops of this folder: operations on sixteen floats as instructions of LLVM,
floats of every type in memory, and products with sums that stay in registers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from contextlib import suppress
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from llvmlite.binding import add_symbol, get_host_cpu_features
from numba import config, types
from numba.core import cgutils
from numba.core.datamodel import register_default
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic

from compiled.records import Int32s, Pointer, kind_of
from engine.kernels import LANES
from engine.kernels.records import elements

FLOAT, INT8, INT16, INT32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)


# A CPU without F16C calls functions that widen and narrow floats of 16 bits; LLVM does not find them by
# itself, and ends the process.
with suppress(OSError, AttributeError):
    _library = ctypes.CDLL("libgcc_s.so.1")
    for _name in ("__extendhfsf2", "__truncsfhf2"):
        add_symbol(_name, ctypes.cast(getattr(_library, _name), ctypes.c_void_p).value)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_default(_Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, FLOATS)


lanes_type = _Lanes()
_TYPES = {
    "lanes": lanes_type,
    "float": types.float32,
    "double": types.float64,
    "int": types.int64,
    "bool": types.boolean,
    "floats": elements(torch.float32),
    "ints": kind_of(Int32s),
    "none": types.void,
}


def operation(signature: str, emit: Any) -> Any:
    """Returns a function for compiled code, whose instructions ``emit(builder, *values)`` writes; of
    several, by types of elements, the first argument's says which, or the first two's. ``signature``
    names types of ``_TYPES``, as in "lanes lanes -> float". Pointers may be given where an int is
    declared."""
    given_types, _, result_type = signature.partition("->")
    arguments, result = [_TYPES[name] for name in given_types.split()], _TYPES[result_type.strip()]

    def typed(_typing: Any, *given: Any) -> Any:
        chosen = _chosen(emit, given) if isinstance(emit, dict) else emit

        def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            found = chosen(builder, *values)
            return context.get_dummy_value() if result is types.void else found

        pairs = zip(given, arguments, strict=True)
        return result(*[one if isinstance(one, Pointer) else kind for one, kind in pairs]), codegen

    # numba asks how many there are.
    names = ["typing", *(f"value{number}" for number in range(len(arguments)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typed)


def _chosen(emits: dict[Any, Emit], given: tuple[Any, ...]) -> Emit:
    both = tuple(each.element for each in given[:2] if isinstance(each, Pointer))
    return emits[both] if both in emits else emits[given[0].element]


def called(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Returns the result of LLVM's function ``name``."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def constant(value: float) -> Any:
    return ir.Constant(FLOATS, [value] * LANES)


def whole_numbers(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def splatted(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), whole_numbers(0))


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


# --- memory ---


def read(builder: Any, address: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(pointer(builder, address, kind))
    loaded.align = align
    return loaded


def write(builder: Any, address: Any, value: Any, align: int) -> None:
    builder.store(value, pointer(builder, address, value.type)).align = align


def fetch(builder: Any, address: Any) -> None:
    """Fetches a line for reading, into the second cache: the first is small, and in use."""
    how = INT32(0), INT32(2), INT32(1)
    called(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer(builder, address, INT8), *how)


def load_float32(builder: Any, address: Any) -> Any:
    return read(builder, address, FLOATS, 4)


def load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(read(builder, address, ir.VectorType(INT16, LANES), 2), INTS)
    return builder.bitcast(builder.shl(bits, whole_numbers(16)), FLOATS)


def read_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(read(builder, address, INT16, 2), INT32)
    return builder.bitcast(builder.shl(bits, INT32(16)), FLOAT)


def load_float16(builder: Any, address: Any) -> Any:
    return builder.fpext(read(builder, address, ir.VectorType(ir.HalfType(), LANES), 2), FLOATS)


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    """The nearest, ties to even, as sixteen bits."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, whole_numbers(16)), whole_numbers(1))
    nearest = builder.lshr(
        builder.add(builder.add(bits, odd), whole_numbers(0x7FFF)), whole_numbers(16)
    )
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, whole_numbers(0x7FC0), nearest)


def store_bfloat16(builder: Any, address: Any, value: Any) -> None:
    bits = _bfloat16_bits(builder, value)
    write(builder, address, builder.trunc(bits, ir.VectorType(INT16, LANES)), 2)


def round_bfloat16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.shl(_bfloat16_bits(builder, value), whole_numbers(16)), FLOATS)


def round_float16(builder: Any, value: Any) -> Any:
    return builder.fpext(builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def store_float16(builder: Any, address: Any, value: Any) -> None:
    write(builder, address, builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), 2)


# 8 bits (e4m3fn): a sign, four bits of exponent, three of fraction; the last code is no number, none is
# infinite. With zeros after the fraction and one before the exponent they are a half, 2**8 times smaller.
_LARGEST_FLOAT8, _LEAST_NORMAL_FLOAT8 = 448.0, 2.0**-6


def like(value: Any, number: int) -> Any:
    return ir.Constant(value.type, [number] * value.type.count)


def float8_halves(builder: Any, codes: Any) -> Any:
    """``codes``: in the upper bytes of sixteen bits each; what is in the lower ones has no use."""
    halves = builder.and_(builder.ashr(codes, like(codes, 1)), like(codes, -0x4080))
    last = like(codes, 0x3F80)
    is_nan = builder.icmp_unsigned("==", builder.and_(halves, last), last)
    return builder.select(is_nan, like(codes, 0x7E00), halves)


def float8_floats(builder: Any, halves: Any) -> Any:
    kind = ir.VectorType(ir.HalfType(), LANES)
    return builder.fmul(builder.fpext(builder.bitcast(halves, kind), FLOATS), constant(256.0))


def _read_float8(builder: Any, address: Any, count: int) -> Any:
    codes = read(builder, address, ir.VectorType(INT8, count), 1)
    wide = builder.zext(codes, ir.VectorType(INT16, count))
    return float8_halves(builder, builder.shl(wide, like(wide, 8)))


def load_float8(builder: Any, address: Any) -> Any:
    return float8_floats(builder, _read_float8(builder, address, LANES))


def widen_float8(builder: Any, source: Any, target: Any) -> None:
    """Writes twice sixteen as float32: halves are made of as many at once as of sixteen."""
    halves = _read_float8(builder, source, 2 * LANES)
    for start in (0, LANES):
        which = ir.Constant(INTS, list(range(start, start + LANES)))
        mine = builder.shuffle_vector(halves, halves, which)
        write(builder, plus(builder, target, 4 * start), float8_floats(builder, mine), 4)


def widening(load_floats: Callable[[Any, Any], Any], itemsize: int) -> Emit:
    """Returns the same for other types."""

    def emit(builder: Any, source: Any, target: Any) -> None:
        for start in (0, LANES):
            value = load_floats(builder, plus(builder, source, itemsize * start))
            write(builder, plus(builder, target, 4 * start), value, 4)

    return emit


def store_float8(builder: Any, address: Any, value: Any) -> None:
    """The nearest, ties to even; beyond the largest, the largest."""
    bits = builder.bitcast(value, INTS)
    size = builder.bitcast(builder.and_(bits, whole_numbers(0x7FFFFFFF)), FLOATS)
    is_large = builder.fcmp_ordered(">", size, constant(_LARGEST_FLOAT8))
    size = builder.select(is_large, constant(_LARGEST_FLOAT8), size)
    whole = builder.bitcast(size, INTS)
    # The exponent's bias is 7 and not 127, and 20 bits of the fraction go.
    odd = builder.and_(builder.lshr(whole, whole_numbers(20)), whole_numbers(1))
    nearest = builder.add(builder.add(whole, odd), whole_numbers(0x7FFFF - (120 << 23)))
    normal = builder.lshr(nearest, whole_numbers(20))
    # The last bit of a sum with 2**14 is that of a number without an exponent.
    rounder = 2.0**14
    small = builder.bitcast(builder.fadd(size, constant(rounder)), INTS)
    small = builder.sub(small, builder.bitcast(constant(rounder), INTS))
    is_small = builder.fcmp_ordered("<", size, constant(_LEAST_NORMAL_FLOAT8))
    code = builder.select(is_small, small, normal)
    code = builder.select(builder.fcmp_unordered("uno", value, value), whole_numbers(0x7F), code)
    code = builder.or_(
        code, builder.lshr(builder.and_(bits, whole_numbers(-(1 << 31))), whole_numbers(24))
    )
    write(builder, address, builder.trunc(code, ir.VectorType(INT8, LANES)), 1)


def load_bool(builder: Any, address: Any) -> Any:
    """1 where it is true, else 0."""
    return builder.uitofp(read(builder, address, ir.VectorType(INT8, LANES), 1), FLOATS)


def store_bool(builder: Any, address: Any, value: Any) -> None:
    """Whether it is not 0."""
    is_true = builder.fcmp_unordered("!=", value, constant(0.0))
    write(builder, address, builder.zext(is_true, ir.VectorType(INT8, LANES)), 1)


LOADS = {
    torch.float32: load_float32,
    torch.bfloat16: load_bfloat16,
    torch.float16: load_float16,
    torch.float8_e4m3fn: load_float8,
    torch.bool: load_bool,
}
READS = {
    torch.float32: lambda b, at: read(b, at, FLOAT, 4),
    torch.bfloat16: read_bfloat16,
    torch.float16: lambda b, at: b.fpext(read(b, at, ir.HalfType(), 2), FLOAT),
    torch.bool: lambda b, at: b.uitofp(read(b, at, INT8, 1), FLOAT),
}
"""One float each."""
STORES = {
    torch.float32: lambda b, at, value: write(b, at, value, 4),
    torch.bfloat16: store_bfloat16,
    torch.float16: store_float16,
    torch.float8_e4m3fn: store_float8,
    torch.bool: store_bool,
}
WIDENINGS = {dtype: widening(load, dtype.itemsize) for dtype, load in LOADS.items()}
WIDENINGS[torch.float8_e4m3fn] = widen_float8


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Returns a * b + c, rounded once."""
    return called(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


def plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(address.type, offset))


def times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(value.type, factor))


# --- sums that stay in registers ---

ROWS_AT_ONCE = 6
"""Rows of a product with weights: so many there are registers for."""
WAITING_ROWS = 2
"""So few wait for memory anyway, which reads ahead by itself; for more, what is read next is fetched."""

Emit = Callable[..., None]
Parts = list[Any]


class Numbers(NamedTuple):
    """How numbers of a type are multiplied. ``features``: of a row that one step takes; ``bytes``:
    theirs; ``row``: what is at an address there, for all lanes; ``column``: what is at an address of
    sixteen columns; ``add``: the sum with the products of both."""

    features: int
    bytes: int
    row: Callable[[Any, Any], Parts]
    column: Callable[[Any, Any], Parts]
    add: Callable[[Any, Any, Parts, Parts], Any]


def _add_each(builder: Any, total: Any, row: Parts, column: Parts) -> Any:
    for these, those in zip(row, column, strict=True):
        total = fused(builder, these, those, total)
    return total


def _row32(builder: Any, address: Any) -> Parts:
    return [splatted(builder, read(builder, address, FLOAT, 4))]


def _row16(builder: Any, address: Any) -> Parts:
    spread = splatted(builder, read(builder, address, INT16, 2))
    return [builder.fpext(builder.bitcast(spread, ir.VectorType(ir.HalfType(), LANES)), FLOATS)]


def both_bfloat16(builder: Any, pairs: Any) -> Parts:
    """Returns of sixteen pairs of bf16 the first ones and the second ones, as floats."""
    first = builder.shl(pairs, whole_numbers(16))
    second = builder.and_(pairs, whole_numbers(-(1 << 16)))
    return [builder.bitcast(each, FLOATS) for each in (first, second)]


def row_pair(builder: Any, address: Any) -> Any:
    return splatted(builder, read(builder, address, INT32, 2))


def column_pair(builder: Any, address: Any) -> Any:
    return read(builder, address, INTS, 4)


FLOAT32_NUMBERS = Numbers(1, 4, _row32, lambda b, at: [load_float32(b, at)], _add_each)
FLOAT16_NUMBERS = Numbers(1, 2, _row16, lambda b, at: [load_float16(b, at)], _add_each)
BFLOAT16_NUMBERS = Numbers(
    2, 4, lambda b, at: both_bfloat16(b, row_pair(b, at)),
    lambda b, at: both_bfloat16(b, column_pair(b, at)), _add_each,
)  # fmt: skip


class Tile:
    """Sums of ``num_rows`` rows with ``num_columns`` columns: ``sums[row][at]`` has sixteen of them."""

    def __init__(self, builder: Any, num_rows: int, num_columns: int) -> None:
        self._builder = builder
        self._num_rows, self._width = num_rows, num_columns // LANES

    def sums(self, value: Any) -> list[list[Any]]:
        """Returns registers that begin with ``value``."""
        return [
            [cgutils.alloca_once_value(self._builder, value) for _ in range(self._width)]
            for _ in range(self._num_rows)
        ]

    def sums_at(self, rows: list[Any]) -> list[list[Any]]:
        """Returns registers that begin with the float32 at ``rows``."""
        builder = self._builder
        return [
            [
                cgutils.alloca_once_value(builder, each)
                for each in self.columns(row, 4, load_float32)
            ]
            for row in rows
        ]

    def rows(self, first: Any, stride: Any) -> list[Any]:
        """Returns where rows begin that are ``stride`` bytes apart."""
        return [
            self._builder.add(first, times(self._builder, stride, row))
            for row in range(self._num_rows)
        ]

    def group(self, rows: Any, index: Any, size: int) -> list[Any]:
        """Returns where each row's part of a group is: of every group ``size`` bytes of each row lie one
        after another. Known distances need no registers, and no instructions."""
        builder = self._builder
        first = builder.add(rows, times(builder, index, size * self._num_rows))
        return [plus(builder, first, size * row) for row in range(self._num_rows)]

    def columns(self, address: Any, size: int, load: Callable[[Any, Any], Any]) -> list[Any]:
        """Returns what ``load`` loads of each sixteen columns; ``size``: bytes of each column."""
        places = (plus(self._builder, address, size * LANES * at) for at in range(self._width))
        return [load(self._builder, place) for place in places]

    def add(
        self, sums: list[list[Any]], index: Any, rows: list[Any], row_step: Any,
        columns: Any, column_step: Any, numbers: Numbers,
    ) -> None:  # fmt: skip
        """Adds the products of step ``index``: rows and columns go on by so many bytes with each."""
        builder = self._builder
        at = builder.add(columns, builder.mul(index, column_step))
        loaded = self.columns(at, numbers.bytes, numbers.column)
        offset = builder.mul(index, row_step)
        for start, mine in zip(rows, sums, strict=True):
            row = numbers.row(builder, builder.add(start, offset))
            for total, column in zip(mine, loaded, strict=True):
                builder.store(numbers.add(builder, builder.load(total), row, column), total)

    def write(self, sums: list[list[Any]], rows: list[Any]) -> None:
        """Writes float32 to where ``rows`` begin."""
        for row, mine in zip(rows, sums, strict=True):
            for at, total in enumerate(mine):
                place = plus(self._builder, row, 4 * LANES * at)
                write(self._builder, place, self._builder.load(total), 4)


def by_rows(
    emit_for: Callable[[int], Emit], counts: range, builder: Any, num_rows: Any, *values: Any
) -> None:
    """Writes ``emit_for(n)(builder, *values)`` for each ``n`` of ``counts`` that ``num_rows`` may be."""
    done = builder.append_basic_block("rows_done")
    switch = builder.switch(num_rows, done)
    for count in counts:
        block = builder.append_basic_block(f"rows_{count}")
        switch.add_case(count, block)
        with builder.goto_block(block):
            emit_for(count)(builder, *values)
            builder.branch(done)
    builder.position_at_end(done)


class ByFormat(dict[Hashable, Emit]):
    """The code of an operation by format, made by ``emit_for`` when it is first wanted."""

    def __init__(self, emit_for: Callable[[Any], Emit]) -> None:
        super().__init__()
        self._emit_for = emit_for

    def __missing__(self, kind: Hashable) -> Emit:
        emit = self[kind] = self._emit_for(kind)
        return emit


# --- which instructions there are ---


def has_feature(name: str) -> bool:
    """Whether this machine has a feature by LLVM's name, and numba compiles for it: for another machine,
    LLVM would give up on what that one lacks."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return f"+{name}" in (config.CPU_FEATURES or "").split(",") and _has(name)
    return _has(name)


def has_wide_registers() -> bool:
    """Whether numba compiles for a machine with AVX-512."""
    if config.CPU_FEATURES is not None:
        return "+avx512f" in config.CPU_FEATURES
    return _has("avx512f")


def _has(name: str) -> bool:
    try:
        return bool(get_host_cpu_features().get(name))
    except RuntimeError:  # LLVM does not know the machine
        return False
