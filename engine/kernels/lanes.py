"""Sixteen floats at a time: what the loops of this folder are written in, for numba to compile.

Every operation is one IEEE operation on each lane, in the order written: nothing is reassociated, and a
product is contracted with a sum by ``fma`` alone. So a kernel computes the same bits on every CPU,
however wide its vectors are, and what a row gets does not depend on how its neighbours are compiled.

Addresses are integers. ``kind`` is the type of floats in memory, by the numbers of ``STORED_KINDS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, njit, types
from numba.core import cgutils
from numba.core.datamodel import register_default
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic

from engine.kernels import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, LANES

_FLOAT, _INT8, _INT16, _INT32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT32, LANES)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


@register_default(_Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _FLOATS)


_lanes = _Lanes()
_float, _int, _none = types.float32, types.int64, types.void


def _operation(emit: Callable[..., Any], result: Any, *arguments: Any) -> Any:
    """What compiled code calls, and ``emit(builder, *values)`` writes the instructions of."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del signature
        found = emit(builder, *values)
        return context.get_dummy_value() if result is _none else found

    signature = result(*arguments)
    if len(arguments) == 1:
        return intrinsic(lambda typing, a: (signature, codegen))  # noqa: ARG005
    if len(arguments) == 2:
        return intrinsic(lambda typing, a, b: (signature, codegen))  # noqa: ARG005
    if len(arguments) == 3:
        return intrinsic(lambda typing, a, b, c: (signature, codegen))  # noqa: ARG005
    if len(arguments) == 4:
        return intrinsic(lambda typing, a, b, c, d: (signature, codegen))  # noqa: ARG005
    if len(arguments) == 5:
        return intrinsic(lambda typing, a, b, c, d, e: (signature, codegen))  # noqa: ARG005
    return intrinsic(lambda typing, a, b, c, d, e, f: (signature, codegen))  # noqa: ARG005


def _llvm(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kinds = [value.type for value in values]
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(result, kinds))
    return builder.call(function, values)


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _whole(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _whole(0))


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


# --- memory ---


def _read(builder: Any, address: Any, kind: Any, align: int) -> Any:
    loaded = builder.load(_pointer(builder, address, kind))
    loaded.align = align
    return loaded


def _write(builder: Any, address: Any, value: Any, align: int) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = align


def _load(builder: Any, address: Any) -> Any:
    return _read(builder, address, _FLOATS, 4)


def _load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(_read(builder, address, ir.VectorType(_INT16, LANES), 2), _INTS)
    return builder.bitcast(builder.shl(bits, _whole(16)), _FLOATS)


def _load_float16(builder: Any, address: Any) -> Any:
    return builder.fpext(_read(builder, address, ir.VectorType(ir.HalfType(), LANES), 2), _FLOATS)


def _bfloat16_bits(builder: Any, value: Any) -> Any:
    """The nearest, ties to even, as sixteen bits."""
    bits = builder.bitcast(value, _INTS)
    odd = builder.and_(builder.lshr(bits, _whole(16)), _whole(1))
    nearest = builder.lshr(builder.add(builder.add(bits, odd), _whole(0x7FFF)), _whole(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, _whole(0x7FC0), nearest)


def _store_bfloat16(builder: Any, address: Any, value: Any) -> None:
    bits = _bfloat16_bits(builder, value)
    _write(builder, address, builder.trunc(bits, ir.VectorType(_INT16, LANES)), 2)


def _round_bfloat16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.shl(_bfloat16_bits(builder, value), _whole(16)), _FLOATS)


def _round_float16(builder: Any, value: Any) -> Any:
    return builder.fpext(builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)


def _store_float16(builder: Any, address: Any, value: Any) -> None:
    _write(builder, address, builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), 2)


# 8 bits (e4m3fn): a sign, four bits of exponent, three of fraction; the last code is no number, none is
# infinite. With zeros after the fraction and one before the exponent they are a half, 2**8 times smaller.
_LARGEST_FLOAT8, _LEAST_NORMAL_FLOAT8 = 448.0, 2.0**-6
_HALVES = ir.VectorType(_INT16, LANES)


def _short(value: int) -> Any:
    return ir.Constant(_HALVES, [value] * LANES)


def _float8_floats(builder: Any, codes: Any) -> Any:
    """``codes``: in the upper bytes of sixteen bits each."""
    halves = builder.and_(builder.ashr(codes, _short(1)), _short(0xBF80))
    is_nan = builder.icmp_unsigned("==", builder.and_(halves, _short(0x3F80)), _short(0x3F80))
    halves = builder.select(is_nan, _short(0x7E00), halves)
    floats = builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)
    return builder.fmul(floats, _constant(256.0))


def _load_float8(builder: Any, address: Any) -> Any:
    codes = _read(builder, address, ir.VectorType(_INT8, LANES), 1)
    return _float8_floats(builder, builder.shl(builder.zext(codes, _HALVES), _short(8)))


def _store_float8(builder: Any, address: Any, value: Any) -> None:
    """The nearest, ties to even; beyond the largest, the largest."""
    bits = builder.bitcast(value, _INTS)
    size = builder.bitcast(builder.and_(bits, _whole(0x7FFFFFFF)), _FLOATS)
    is_large = builder.fcmp_ordered(">", size, _constant(_LARGEST_FLOAT8))
    size = builder.select(is_large, _constant(_LARGEST_FLOAT8), size)
    whole = builder.bitcast(size, _INTS)
    # The exponent's bias is 7 and not 127, and 20 bits of the fraction go.
    odd = builder.and_(builder.lshr(whole, _whole(20)), _whole(1))
    nearest = builder.add(builder.add(whole, odd), _whole(0x7FFFF - (120 << 23)))
    normal = builder.lshr(nearest, _whole(20))
    # The last bit of a sum with 2**14 is that of a number without an exponent.
    rounder = 2.0**14
    small = builder.bitcast(builder.fadd(size, _constant(rounder)), _INTS)
    small = builder.sub(small, builder.bitcast(_constant(rounder), _INTS))
    is_small = builder.fcmp_ordered("<", size, _constant(_LEAST_NORMAL_FLOAT8))
    code = builder.select(is_small, small, normal)
    code = builder.select(builder.fcmp_unordered("uno", value, value), _whole(0x7F), code)
    code = builder.or_(code, builder.lshr(builder.and_(bits, _whole(-(1 << 31))), _whole(24)))
    _write(builder, address, builder.trunc(code, ir.VectorType(_INT8, LANES)), 1)


def _store_uint8(builder: Any, address: Any, value: Any) -> None:
    whole = builder.fptosi(value, _INTS)
    _write(builder, address, builder.trunc(whole, ir.VectorType(_INT8, LANES)), 1)


def _prefetch(builder: Any, address: Any) -> None:
    """For reading, into the second cache: the first is small, and what is in it in use."""
    to = _INT8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [to, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [_pointer(builder, address, _INT8), _INT32(0), _INT32(2), _INT32(1)])


load32 = _operation(_load, _lanes, _int)
_load_b16 = _operation(_load_bfloat16, _lanes, _int)
_load_f16 = _operation(_load_float16, _lanes, _int)
_load_f8 = _operation(_load_float8, _lanes, _int)
store32 = _operation(lambda b, at, value: _write(b, at, value, 4), _none, _int, _lanes)
_store_b16 = _operation(_store_bfloat16, _none, _int, _lanes)
_store_f16 = _operation(_store_float16, _none, _int, _lanes)
_store_f8 = _operation(_store_float8, _none, _int, _lanes)
_round_b16 = _operation(_round_bfloat16, _lanes, _lanes)
_round_f16 = _operation(_round_float16, _lanes, _lanes)
store_uint8 = _operation(_store_uint8, _none, _int, _lanes)
"""Without the fraction; what is not 0 .. 255 has no use."""
read_int = _operation(lambda b, at: _read(b, at, ir.IntType(64), 8), _int, _int)
write_int = _operation(lambda b, at, value: _write(b, at, value, 8), _none, _int, _int)
read_float = _operation(lambda b, at: _read(b, at, _FLOAT, 4), _float, _int)
write_float = _operation(lambda b, at, value: _write(b, at, value, 4), _none, _int, _float)
fetch_add = _operation(
    lambda b, at, value: b.atomic_rmw(
        "add", _pointer(b, at, ir.IntType(64)), value, "acq_rel"
    ),
    _int, _int, _int,
)  # fmt: skip
prefetch = _operation(_prefetch, _none, _int)
"""What is wanted soon: the line of memory at an address."""
read_shared = _operation(
    lambda b, at: b.load_atomic(_pointer(b, at, ir.IntType(64)), "acquire", 8), _int, _int
)
"""What another thread may be writing."""


def _call(builder: Any, function: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(_pointer(builder, function, kind), [value])


def _call_int(builder: Any, function: Any) -> Any:
    kind = ir.FunctionType(_INT32, [])
    return builder.sext(builder.call(_pointer(builder, function, kind), []), ir.IntType(64))


call = _operation(_call, _none, _int, _int)
"""A function that is at the first address, with the second."""
call_int = _operation(_call_int, _int, _int)
"""A function that takes nothing and returns a C int."""


@njit(inline="always")
def argument(arguments: int, number: int) -> int:
    """Of the array of int64 that a kernel is given."""
    return read_int(arguments + 8 * number)


@njit(inline="always")
def itemsize_of(kind: int) -> int:
    if kind == FLOAT8:
        return 1
    return 4 if kind == FLOAT32 else 2


@njit(inline="always")
def load(kind: int, address: int) -> Any:
    if kind == BFLOAT16:
        return _load_b16(address)
    if kind == FLOAT16:
        return _load_f16(address)
    if kind == FLOAT8:
        return _load_f8(address)
    return load32(address)


@njit(inline="always")
def store(kind: int, address: int, value: Any) -> None:
    if kind == BFLOAT16:
        _store_b16(address, value)
    elif kind == FLOAT16:
        _store_f16(address, value)
    elif kind == FLOAT8:
        _store_f8(address, value)
    else:
        store32(address, value)


@njit(inline="always")
def rounded(kind: int, value: Any) -> Any:
    """As if stored and loaded again."""
    if kind == BFLOAT16:
        return _round_b16(value)
    if kind == FLOAT16:
        return _round_f16(value)
    return value


# --- arithmetic ---


def _clean(builder: Any, value: Any, largest: Any) -> Any:
    """NaN and infinity become 0, and what is beyond ``largest`` becomes that."""
    most = _splat(builder, largest)
    rest = builder.fsub(value, value)
    is_finite = builder.fcmp_ordered("ord", rest, rest)
    value = builder.select(is_finite, value, _constant(0.0))
    value = builder.select(builder.fcmp_ordered(">", value, most), most, value)
    least = builder.fneg(most)
    return builder.select(builder.fcmp_ordered("<", value, least), least, value)


def _largest(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    """NaN where one of them is: llvm.maximum has no vectors of every width."""
    is_nan = builder.fcmp_unordered("uno", a, b)
    return builder.select(is_nan, builder.fadd(a, b), _largest(builder, a, b))


def _keep(builder: Any, value: Any, first: Any, end: Any) -> Any:
    """Minus infinity in lanes outside of ``first`` .. ``end - 1``."""
    lanes = ir.Constant(_INTS, list(range(LANES)))
    low = builder.icmp_signed(">=", lanes, _splat(builder, builder.trunc(first, _INT32)))
    high = builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(end, _INT32)))
    return builder.select(builder.and_(low, high), value, _constant(-math.inf))


_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
# 1 + x + x^2 times this, lowest power last: e^x for |x| < ln(2) / 2, as in Cephes' expf.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LEAST_EXP = -87.0
# A float of this size has no fraction; its last bits are a whole number, and what one more has as bits
# that many places up is a float's exponent.
_ROUNDER = 12582912.0 + 127.0


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _llvm(builder, f"llvm.fma.v{LANES}f32", _FLOATS, a, b, c)


def _exponential(builder: Any, value: Any) -> Any:
    """Of what is not above 0; below -87 it is 0."""
    power = _fused(builder, value, _constant(_float32(_LOG2E)), _constant(_ROUNDER))
    whole = builder.fsub(power, _constant(_ROUNDER))
    rest = _fused(builder, whole, _constant(_float32(-_LN2_HIGH)), value)
    rest = _fused(builder, whole, _constant(_float32(-_LN2_LOW)), rest)
    total = _constant(_float32(_EXP[0]))
    for factor in _EXP[1:]:
        total = _fused(builder, total, rest, _constant(_float32(factor)))
    total = _fused(builder, builder.fmul(rest, rest), total, rest)
    total = builder.fadd(total, _constant(1.0))
    scale = builder.bitcast(builder.shl(builder.bitcast(power, _INTS), _whole(23)), _FLOATS)
    is_small = builder.fcmp_ordered("<", value, _constant(_LEAST_EXP))
    return builder.select(is_small, _constant(0.0), builder.fmul(total, scale))


def _hyperbolic_tangent(builder: Any, value: Any) -> Any:
    is_low = builder.fcmp_ordered("<", value, _constant(0.0))
    down = builder.select(is_low, value, builder.fneg(value))
    decay = _exponential(builder, builder.fadd(down, down))
    one = _constant(1.0)
    size = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
    return builder.select(is_low, builder.fneg(size), size)


def _logistic(builder: Any, value: Any) -> Any:
    """1 / (1 + e^-x)."""
    is_low = builder.fcmp_ordered("<", value, _constant(0.0))
    decay = _exponential(builder, builder.select(is_low, value, builder.fneg(value)))
    one = _constant(1.0)
    return builder.fdiv(builder.select(is_low, decay, one), builder.fadd(one, decay))


def _silu(builder: Any, value: Any) -> Any:
    return builder.fmul(value, _logistic(builder, value))


_GELU_SHARE, _GELU_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi)


def _gelu_tanh(builder: Any, value: Any) -> Any:
    """torch's gelu, approximate="tanh"."""
    cube = builder.fmul(builder.fmul(value, value), value)
    inner = _fused(builder, cube, _constant(_float32(_GELU_CUBE)), value)
    bent = _hyperbolic_tangent(builder, builder.fmul(inner, _constant(_float32(_GELU_SHARE))))
    half = builder.fmul(value, _constant(0.5))
    return builder.fmul(half, builder.fadd(_constant(1.0), bent))


def _halved(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes in one, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                value,
                ir.Constant(value.type, ir.Undefined),
                ir.Constant(ir.VectorType(_INT32, width), list(range(start, start + width))),
            )
            for start in (0, width)
        )
        value = combine(low, high)
    return builder.extract_element(value, _INT32(0))


fma = _operation(_fused, _lanes, _lanes, _lanes, _lanes)
add = _operation(lambda b, x, y: b.fadd(x, y), _lanes, _lanes, _lanes)
sub = _operation(lambda b, x, y: b.fsub(x, y), _lanes, _lanes, _lanes)
mul = _operation(lambda b, x, y: b.fmul(x, y), _lanes, _lanes, _lanes)
div = _operation(lambda b, x, y: b.fdiv(x, y), _lanes, _lanes, _lanes)
larger = _operation(_largest, _lanes, _lanes, _lanes)
"""The second of a pair where one is no number."""
larger_or_nan = _operation(lambda b, x, y: _maximum(b, x, y), _lanes, _lanes, _lanes)
magnitude = _operation(lambda b, x: _llvm(b, f"llvm.fabs.v{LANES}f32", _FLOATS, x), _lanes, _lanes)
splat = _operation(_splat, _lanes, _float)
clean = _operation(_clean, _lanes, _lanes, _float)
keep = _operation(_keep, _lanes, _lanes, _int, _int)
exp = _operation(_exponential, _lanes, _lanes)
tanh = _operation(_hyperbolic_tangent, _lanes, _lanes)
silu = _operation(_silu, _lanes, _lanes)
gelu_tanh = _operation(_gelu_tanh, _lanes, _lanes)
sum_of = _operation(lambda b, x: _halved(b, x, b.fadd), _float, _lanes)
largest_of = _operation(
    lambda b, x: _halved(b, x, lambda low, high: _largest(b, low, high)), _float, _lanes
)
largest_or_nan_of = _operation(
    lambda b, x: _halved(b, x, lambda low, high: _maximum(b, low, high)), _float, _lanes
)
first_of = _operation(lambda b, x: b.extract_element(x, _INT32(0)), _float, _lanes)


# --- products in integers ---

_VNNI = "llvm.x86.avx512.vpdpbusd.512"


def has_integer_products() -> bool:
    """Whether numba compiles for a machine with the instruction that they are made of (AVX-512 VNNI)."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return False  # for another machine than this one: LLVM would give up on what that lacks
    try:
        return bool(get_host_cpu_features().get("avx512vnni"))
    except RuntimeError:  # LLVM does not know the machine
        return False


def _dots(num_rows: int) -> Callable[..., None]:
    """Products of ``num_rows`` rows of uint8, ``stride`` bytes apart, with 64 rows of int8, which lie by
    fours: four of each row, then the next four of each. ``count`` fours, added to ``target``
    ``[num_rows, 64]`` int32. What is signed and what is not is as the instruction has it."""

    def emit(builder: Any, rows: Any, stride: Any, weights: Any, count: Any, target: Any) -> None:
        width = 64 // LANES

        def plus(address: Any, offset: int) -> Any:
            return builder.add(address, ir.Constant(address.type, offset))

        places = [
            [plus(target, 4 * (64 * row + LANES * at)) for at in range(width)]
            for row in range(num_rows)
        ]
        sums = [
            [cgutils.alloca_once_value(builder, _read(builder, at, _INTS, 4)) for at in row]
            for row in places
        ]
        product = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_INTS, [_INTS] * 3), _VNNI
        )
        starts = [
            builder.add(rows, builder.mul(stride, stride.type(row))) for row in range(num_rows)
        ]
        with cgutils.for_range(builder, count) as loop:
            here = builder.add(weights, builder.mul(loop.index, loop.index.type(4 * 64)))
            columns = [_read(builder, plus(here, 64 * at), _INTS, 1) for at in range(width)]
            for start, mine in zip(starts, sums, strict=True):
                four = builder.add(start, builder.mul(loop.index, loop.index.type(4)))
                row = _splat(builder, _read(builder, four, _INT32, 1))
                for total, column in zip(mine, columns, strict=True):
                    builder.store(builder.call(product, [builder.load(total), row, column]), total)
        for row, mine in zip(places, sums, strict=True):
            for at, total in zip(row, mine, strict=True):
                _write(builder, at, builder.load(total), 4)

    return emit


dots1, dots2, dots3, dots4 = (
    _operation(_dots(count), _none, _int, _int, _int, _int, _int) for count in (1, 2, 3, 4)
)
store_zeros = _operation(lambda b, at: _write(b, at, _whole(0), 4), _none, _int)


def _load_ints(builder: Any, address: Any) -> Any:
    return builder.sitofp(_read(builder, address, _INTS, 4), _FLOATS)


def _sums(builder: Any, these: Any, those: Any) -> Any:
    parts = (_read(builder, address, _INTS, 4) for address in (these, those))
    return builder.sitofp(builder.add(*parts), _FLOATS)


load_ints = _operation(_load_ints, _lanes, _int)
"""Sixteen int32 as floats."""
int_sums = _operation(_sums, _lanes, _int, _int)
"""Sixteen int32 and sixteen more, added, as floats."""


# --- sums of products that stay in registers ---

_AT_ONCE = 2  # products of a sum in one round of a loop


def _plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(address.type, offset))


def _accumulated(
    builder: Any,
    count: Any,
    sums: list[list[Any]],
    factors: tuple[list[Any], Any],
    vectors: tuple[Any, Any],
) -> list[list[Any]]:
    """To ``sums[row][column]``, ``count`` products one after another: of a row's factor, whose first is
    at ``factors[0][row]``, and a column's sixteen floats, which lie after those of the column before.
    ``factors[1]`` and ``vectors[1]``: bytes from one to the next. ``count`` is even."""
    kept = [[cgutils.alloca_once_value(builder, each) for each in row] for row in sums]
    starts, factor_step = factors
    start, vector_step = vectors
    with cgutils.for_range(builder, builder.udiv(count, count.type(_AT_ONCE))) as loop:
        for which in range(_AT_ONCE):
            index = _plus(builder, builder.mul(loop.index, count.type(_AT_ONCE)), which)
            at = builder.add(start, builder.mul(index, vector_step))
            columns = [
                _load(builder, _plus(builder, at, 4 * LANES * c)) for c in range(len(sums[0]))
            ]
            offset = builder.mul(index, factor_step)
            for first, mine in zip(starts, kept, strict=True):
                factor = _splat(builder, _read(builder, builder.add(first, offset), _FLOAT, 4))
                for total, column in zip(mine, columns, strict=True):
                    builder.store(_fused(builder, factor, column, builder.load(total)), total)
    return [[builder.load(each) for each in row] for row in kept]


def _scoring(num_queries: int) -> Callable[..., None]:
    def emit(builder: Any, keys: Any, dim: Any, queries: Any, out: Any, stride: Any) -> None:
        kind, width = dim.type, 2
        fours = [
            builder.add(queries, builder.mul(dim, kind(16 * four)))
            for four in range(num_queries // 4)
        ]
        starts = [
            _plus(builder, fours[query // 4], 4 * (query % 4)) for query in range(num_queries)
        ]
        nothing = [[_constant(0.0)] * width for _ in range(num_queries)]
        sums = _accumulated(
            builder, dim, nothing, (starts, kind(16)), (keys, kind(4 * LANES * width))
        )
        for query, mine in enumerate(sums):
            to = builder.add(out, builder.mul(stride, kind(query)))
            for column, total in enumerate(mine):
                _write(builder, _plus(builder, to, 4 * LANES * column), total, 4)

    return emit


score8, score4 = (_operation(_scoring(count), _none, *[_int] * 5) for count in (8, 4))
"""Eight queries' (or four's) products with twice sixteen keys: (keys, dimensions, queries, target, bytes
in it from query to query). Queries lie by fours, of which each dimension's are together; keys as
``transpose`` leaves them, twice sixteen of each dimension together. A sum over dimensions, in their
order."""


def _weighing(width: int) -> Callable[..., None]:
    def emit(
        builder: Any, values: Any, row: Any, weights: Any, stride: Any, count: Any, out: Any
    ) -> None:
        kind = count.type
        starts = [builder.add(weights, builder.mul(stride, kind(query))) for query in range(4)]
        places = [builder.add(out, builder.mul(row, kind(query))) for query in range(4)]
        before = [
            [_load(builder, _plus(builder, place, 4 * LANES * column)) for column in range(width)]
            for place in places
        ]
        sums = _accumulated(builder, count, before, (starts, kind(4)), (values, row))
        for place, mine in zip(places, sums, strict=True):
            for column, total in enumerate(mine):
                _write(builder, _plus(builder, place, 4 * LANES * column), total, 4)

    return emit


weigh64, weigh16 = (_operation(_weighing(width), _none, *[_int] * 6) for width in (4, 1))
"""Four queries' weighted values, 64 (or 16) dimensions of them, added to the target one key after
another: (values, bytes from one to the next and from query to query in the target, weights, bytes from
query to query in them, how many, target)."""


def _interleaved(builder: Any, source: Any, dim: Any, target: Any) -> None:
    """By pairs, and pairs of pairs."""
    pairs = [lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
    fours = [2 * (lane // 4) + lane % 2 + LANES * (lane // 2 % 2) for lane in range(LANES)]

    def halves(a: Any, b: Any, which: list[int], step: int) -> list[Any]:
        later = [lane + step for lane in which]
        return [builder.shuffle_vector(a, b, ir.Constant(_INTS, each)) for each in (which, later)]

    with cgutils.for_range(builder, builder.udiv(dim, dim.type(LANES))) as loop:
        at = builder.add(source, builder.mul(loop.index, dim.type(4 * LANES)))
        step = builder.mul(dim, dim.type(4))
        rows = [
            _load(builder, builder.add(at, builder.mul(step, dim.type(row)))) for row in range(4)
        ]
        these, those = halves(rows[0], rows[1], pairs, 8), halves(rows[2], rows[3], pairs, 8)
        to = builder.add(target, builder.mul(loop.index, dim.type(16 * LANES)))
        parts = [
            part for pair in zip(these, those, strict=True) for part in halves(*pair, fours, 8)
        ]
        for index, part in enumerate(parts):
            _write(builder, _plus(builder, to, 4 * LANES * index), part, 4)


interleave = _operation(_interleaved, _none, _int, _int, _int)
"""Four rows of floats, one after another, as ``score8`` has them: (rows, dimensions, target)."""


# --- transposition ---


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """``rows[i]`` lane j becomes ``rows[j]`` lane i, by exchanging ever larger squares."""
    width = 1
    while width < LANES:
        low = [lane + (LANES - width if lane & width else 0) for lane in range(LANES)]
        high = [lane + (LANES if lane & width else width) for lane in range(LANES)]
        for index in range(LANES):
            if not index & width:
                pair = rows[index], rows[index + width]
                rows[index], rows[index + width] = (
                    builder.shuffle_vector(*pair, ir.Constant(_INTS, which))
                    for which in (low, high)
                )
        width *= 2
    return rows


def _rows_at(builder: Any, source: Any, stride: Any, read: Callable[[Any, Any], Any]) -> list[Any]:
    steps = (builder.mul(stride, ir.Constant(stride.type, index)) for index in range(LANES))
    return [read(builder, builder.add(source, step)) for step in steps]


def _transposing(read: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def emit(builder: Any, source: Any, stride: Any, target: Any, step: Any) -> None:
        for row in _transposed(builder, _rows_at(builder, source, stride, read)):
            _write(builder, target, row, 4)
            target = builder.add(target, step)

    return emit


def _read_whole(builder: Any, address: Any) -> Any:
    return _read(builder, address, _INTS, 1)


def _transposing_parts(count: int, part: Callable[[Any, Any, int], Any]) -> Callable[..., None]:
    """Sixteen rows of ``count`` times sixteen floats, ``count`` of which are in 32 bits, are transposed
    before they are made floats: ``part(builder, bits, which)`` makes them."""

    def emit(builder: Any, source: Any, stride: Any, target: Any, step: Any) -> None:
        for bits in _transposed(builder, _rows_at(builder, source, stride, _read_whole)):
            for which in range(count):
                _write(builder, target, part(builder, bits, which), 4)
                target = builder.add(target, step)

    return emit


def _part_bfloat16(builder: Any, bits: Any, which: int) -> Any:
    mine = builder.and_(bits, _whole(-65536)) if which else builder.shl(bits, _whole(16))
    return builder.bitcast(mine, _FLOATS)


def _part_float16(builder: Any, bits: Any, which: int) -> Any:
    mine = builder.lshr(bits, _whole(16)) if which else bits
    halves = builder.trunc(mine, ir.VectorType(_INT16, LANES))
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)


def _part_float8(builder: Any, bits: Any, which: int) -> Any:
    mine = builder.lshr(builder.shl(bits, _whole(24 - 8 * which)), _whole(16))
    return _float8_floats(builder, builder.trunc(mine, _HALVES))


_transpose_32 = _operation(_transposing(_load), _none, *[_int] * 4)
_transpose_b16 = _operation(_transposing(_load_bfloat16), _none, *[_int] * 4)
_transpose_f16 = _operation(_transposing(_load_float16), _none, *[_int] * 4)
_transpose_f8 = _operation(_transposing(_load_float8), _none, *[_int] * 4)
_transpose_b16_pairs = _operation(_transposing_parts(2, _part_bfloat16), _none, *[_int] * 4)
_transpose_f16_pairs = _operation(_transposing_parts(2, _part_float16), _none, *[_int] * 4)
_transpose_f8_fours = _operation(_transposing_parts(4, _part_float8), _none, *[_int] * 4)


@njit
def _transpose_16(kind: int, source: int, stride: int, target: int, step: int) -> None:
    if kind == BFLOAT16:
        _transpose_b16(source, stride, target, step)
    elif kind == FLOAT16:
        _transpose_f16(source, stride, target, step)
    elif kind == FLOAT8:
        _transpose_f8(source, stride, target, step)
    else:
        _transpose_32(source, stride, target, step)


@njit
def transpose(kind: int, source: int, stride: int, columns: int, target: int, step: int) -> None:
    """Sixteen rows of ``columns`` floats, ``stride`` bytes apart, to float32 at ``target``, where each
    column becomes sixteen floats one after another, ``step`` bytes after the column before."""
    done = 0
    while done < columns:
        at, to = source + itemsize_of(kind) * done, target + step * done
        if kind == BFLOAT16 and columns - done >= 2 * LANES:
            _transpose_b16_pairs(at, stride, to, step)
            done += 2 * LANES
        elif kind == FLOAT16 and columns - done >= 2 * LANES:
            _transpose_f16_pairs(at, stride, to, step)
            done += 2 * LANES
        elif kind == FLOAT8 and columns - done >= 4 * LANES:
            _transpose_f8_fours(at, stride, to, step)
            done += 4 * LANES
        else:
            _transpose_16(kind, at, stride, to, step)
            done += LANES
