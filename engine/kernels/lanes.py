"""Sixteen floats at a time: what the loops of this folder are written in, for numba to compile.

Every operation is one IEEE operation on each lane, in the order written: nothing is reassociated, and a
product is contracted with a sum by ``fma`` alone. So a kernel computes the same bits on every CPU,
however wide its vectors are, and what a row gets does not depend on how its neighbours are compiled.

Addresses are integers. ``kind`` is the type of floats in memory, by the numbers of ``STORED_KINDS``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, overload

from engine.kernels import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, LANES
from engine.kernels.instructions import (
    DOUBLE,
    FLOAT,
    FLOATS,
    INT32,
    INTS,
    constant,
    double_type,
    fetch,
    float_type,
    fused,
    int_type,
    lanes_type,
    llvm,
    load_bfloat16,
    load_float8,
    load_float16,
    load_float32,
    none_type,
    operation,
    pointer,
    read,
    round_bfloat16,
    round_float16,
    splatted,
    store_bfloat16,
    store_float8,
    store_float16,
    whole_numbers,
    widen_float8,
    widening,
    write,
)
from engine.kernels.records import Pointer

load32 = operation(load_float32, lanes_type, int_type)
_load_b16 = operation(load_bfloat16, lanes_type, int_type)
_load_f16 = operation(load_float16, lanes_type, int_type)
_load_f8 = operation(load_float8, lanes_type, int_type)
store32 = operation(lambda b, at, value: write(b, at, value, 4), none_type, int_type, lanes_type)
_store_b16 = operation(store_bfloat16, none_type, int_type, lanes_type)
_store_f16 = operation(store_float16, none_type, int_type, lanes_type)
_store_f8 = operation(store_float8, none_type, int_type, lanes_type)
_widen_f8 = operation(widen_float8, none_type, int_type, int_type)
_widen_b16 = operation(widening(load_bfloat16, 2), none_type, int_type, int_type)
_widen_f16 = operation(widening(load_float16, 2), none_type, int_type, int_type)
_widen_32 = operation(widening(load_float32, 4), none_type, int_type, int_type)
_round_b16 = operation(round_bfloat16, lanes_type, lanes_type)
_round_f16 = operation(round_float16, lanes_type, lanes_type)
read_int = operation(lambda b, at: read(b, at, ir.IntType(64), 8), int_type, int_type)
write_int = operation(lambda b, at, value: write(b, at, value, 8), none_type, int_type, int_type)
read_float = operation(lambda b, at: read(b, at, FLOAT, 4), float_type, int_type)
write_float = operation(
    lambda b, at, value: write(b, at, value, 4), none_type, int_type, float_type
)
read_int32 = operation(
    lambda b, at: b.sext(read(b, at, INT32, 4), ir.IntType(64)), int_type, int_type
)
read_double = operation(lambda b, at: read(b, at, DOUBLE, 8), double_type, int_type)
write_double = operation(
    lambda b, at, value: write(b, at, value, 8), none_type, int_type, double_type
)
bits_of = operation(lambda b, value: b.bitcast(value, ir.IntType(64)), int_type, double_type)
fetch_add = operation(
    lambda b, at, value: b.atomic_rmw(
        "add", pointer(b, at, ir.IntType(64)), value, "acq_rel"
    ),
    int_type, int_type, int_type,
)  # fmt: skip
prefetch = operation(fetch, none_type, int_type)
"""What is wanted soon: the line of memory at an address."""
read_shared = operation(
    lambda b, at: b.load_atomic(pointer(b, at, ir.IntType(64)), "acquire", 8), int_type, int_type
)
"""What another thread may be writing."""


def _call(builder: Any, function: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    builder.call(pointer(builder, function, kind), [value])


def _call_int(builder: Any, function: Any) -> Any:
    kind = ir.FunctionType(INT32, [])
    return builder.sext(builder.call(pointer(builder, function, kind), []), ir.IntType(64))


call = operation(_call, none_type, int_type, int_type)
"""A function that is at the first address, with the second."""
call_int = operation(_call_int, int_type, int_type)
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
def _load_kind(kind: int, address: int) -> Any:
    if kind == BFLOAT16:
        return _load_b16(address)
    if kind == FLOAT16:
        return _load_f16(address)
    if kind == FLOAT8:
        return _load_f8(address)
    return load32(address)


_LINE = 64  # bytes of a line of a cache


@njit
def fetch_all(at: int, num_bytes: int) -> None:
    """Every line of so many bytes is wanted soon."""
    for line in range(at, at + num_bytes, _LINE):
        prefetch(line)


@njit
def widen(kind: int, source: int, count: int, ahead: int, target: int) -> None:
    """So many floats, a multiple of 32, to float32; as many at ``ahead`` are fetched meanwhile."""
    itemsize = itemsize_of(kind)
    for at in range(0, count, 2 * LANES):
        fetch_all(ahead + itemsize * at, 2 * LANES * itemsize)
        if kind == BFLOAT16:
            _widen_b16(source + 2 * at, target + 4 * at)
        elif kind == FLOAT16:
            _widen_f16(source + 2 * at, target + 4 * at)
        elif kind == FLOAT8:
            _widen_f8(source + at, target + 4 * at)
        else:
            _widen_32(source + 4 * at, target + 4 * at)


@njit(inline="always")
def _store_kind(kind: int, address: int, value: Any) -> None:
    if kind == BFLOAT16:
        _store_b16(address, value)
    elif kind == FLOAT16:
        _store_f16(address, value)
    elif kind == FLOAT8:
        _store_f8(address, value)
    else:
        store32(address, value)


@njit(inline="always")
def _rounded_kind(kind: int, value: Any) -> Any:
    if kind == BFLOAT16:
        return _round_b16(value)
    if kind == FLOAT16:
        return _round_f16(value)
    return value


# --- sixteen floats of a pointer ---

_LOADS = {
    torch.float32: load_float32,
    torch.bfloat16: load_bfloat16,
    torch.float16: load_float16,
    torch.float8_e4m3fn: load_float8,
}
_STORES = {
    torch.float32: lambda b, at, value: write(b, at, value, 4),
    torch.bfloat16: store_bfloat16,
    torch.float16: store_float16,
    torch.float8_e4m3fn: store_float8,
}
_ROUNDINGS = {
    torch.float32: lambda _b, _floats, value: value,
    torch.bfloat16: lambda b, _floats, value: round_bfloat16(b, value),
    torch.float16: lambda b, _floats, value: round_float16(b, value),
}


def _indexed(emits: dict[torch.dtype, Any]) -> dict[torch.dtype, Any]:
    """The same of a pointer and a number of an element."""

    def indexed(element: torch.dtype) -> Any:
        def emit(builder: Any, floats: Any, at: Any, *values: Any) -> Any:
            place = builder.add(floats, builder.mul(at, at.type(element.itemsize)))
            return emits[element](builder, place, *values)

        return emit

    return {element: indexed(element) for element in emits}


_load_at = operation(_indexed(_LOADS), lanes_type, int_type, int_type)
_store_at = operation(_indexed(_STORES), none_type, int_type, int_type, lanes_type)
_rounded_as = operation(_ROUNDINGS, lanes_type, int_type, lanes_type)


def load(floats: Any, at: int) -> Any:
    """Returns sixteen floats, from the one with the number ``at`` on. (Of an int, which says what is at
    an address, likewise.)"""
    raise NotImplementedError


def store(floats: Any, at: int, value: Any) -> None:
    """Writes sixteen floats, rounded to the type of ``floats``, from the number ``at`` on."""
    raise NotImplementedError


def rounded(floats: Any, value: Any) -> Any:
    """Returns ``value`` as if it were stored to ``floats`` and loaded again."""
    raise NotImplementedError


overload(load, inline="always", strict=False)(
    lambda floats, at: (  # noqa: ARG005
        (lambda floats, at: _load_at(floats, at))
        if isinstance(floats, Pointer)
        else (lambda floats, at: _load_kind(floats, at))
    )
)
overload(store, inline="always", strict=False)(
    lambda floats, at, value: (  # noqa: ARG005
        (lambda floats, at, value: _store_at(floats, at, value))
        if isinstance(floats, Pointer)
        else (lambda floats, at, value: _store_kind(floats, at, value))
    )
)
overload(rounded, inline="always", strict=False)(
    lambda floats, value: (  # noqa: ARG005
        (lambda floats, value: _rounded_as(floats, value))
        if isinstance(floats, Pointer)
        else (lambda floats, value: _rounded_kind(floats, value))
    )
)
float32s, int32s = (
    operation(lambda _b, at: at, Pointer(element), int_type)
    for element in (torch.float32, torch.int32)
)
"""The same place, as numbers of that type."""


def room_for(count: int) -> Any:
    """Returns a function for compiled code that returns a place for so many float32, which is there until
    the function that calls it returns."""

    def emit(builder: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(FLOAT, count))
        room.align = _LINE
        return builder.ptrtoint(room, ir.IntType(64))

    return operation(emit, Pointer(torch.float32))


is_none = operation(lambda b, at: b.icmp_signed("==", at, at.type(0)), types.boolean, int_type)
"""Whether NOWHERE was given for a tensor."""
line_length = operation(
    {each: lambda _b, at, each=each: at.type(_LINE // each.itemsize) for each in _LOADS},
    int_type, int_type,
)  # fmt: skip
"""How many numbers of a pointer's a line of the cache has."""


# --- work shared out among threads ---


@njit
def shared(counter: Any, count: int) -> Any:
    """Yields the numbers below ``count`` that no other thread takes; ``counter`` begins at 0."""
    item = fetch_add(counter, 1)
    while item < count:
        yield item
        item = fetch_add(counter, 1)


# --- arithmetic ---


def _clean(builder: Any, value: Any, largest: Any) -> Any:
    """NaN and infinity become 0, and what is beyond ``largest`` becomes that."""
    most = splatted(builder, largest)
    rest = builder.fsub(value, value)
    is_finite = builder.fcmp_ordered("ord", rest, rest)
    value = builder.select(is_finite, value, constant(0.0))
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
    lanes = ir.Constant(INTS, list(range(LANES)))
    low = builder.icmp_signed(">=", lanes, splatted(builder, builder.trunc(first, INT32)))
    high = builder.icmp_signed("<", lanes, splatted(builder, builder.trunc(end, INT32)))
    return builder.select(builder.and_(low, high), value, constant(-math.inf))


_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
# 1 + x + x^2 times this, lowest power last: e^x for |x| < ln(2) / 2, as in Cephes' expf.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LEAST_EXP = -87.0
# A float of this size has no fraction; its last bits are a whole number, and what one more has as bits
# that many places up is a float's exponent.
_ROUNDER = 12582912.0 + 127.0


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _exponential(builder: Any, value: Any) -> Any:
    """Of what is not above 0; below -87 it is 0."""
    power = fused(builder, value, constant(_float32(_LOG2E)), constant(_ROUNDER))
    whole = builder.fsub(power, constant(_ROUNDER))
    rest = fused(builder, whole, constant(_float32(-_LN2_HIGH)), value)
    rest = fused(builder, whole, constant(_float32(-_LN2_LOW)), rest)
    total = constant(_float32(_EXP[0]))
    for factor in _EXP[1:]:
        total = fused(builder, total, rest, constant(_float32(factor)))
    total = fused(builder, builder.fmul(rest, rest), total, rest)
    total = builder.fadd(total, constant(1.0))
    scale = builder.bitcast(builder.shl(builder.bitcast(power, INTS), whole_numbers(23)), FLOATS)
    is_small = builder.fcmp_ordered("<", value, constant(_LEAST_EXP))
    return builder.select(is_small, constant(0.0), builder.fmul(total, scale))


def _hyperbolic_tangent(builder: Any, value: Any) -> Any:
    is_low = builder.fcmp_ordered("<", value, constant(0.0))
    down = builder.select(is_low, value, builder.fneg(value))
    decay = _exponential(builder, builder.fadd(down, down))
    one = constant(1.0)
    size = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
    return builder.select(is_low, builder.fneg(size), size)


def _logistic(builder: Any, value: Any) -> Any:
    """1 / (1 + e^-x)."""
    is_low = builder.fcmp_ordered("<", value, constant(0.0))
    decay = _exponential(builder, builder.select(is_low, value, builder.fneg(value)))
    one = constant(1.0)
    return builder.fdiv(builder.select(is_low, decay, one), builder.fadd(one, decay))


def _silu(builder: Any, value: Any) -> Any:
    return builder.fmul(value, _logistic(builder, value))


_GELU_SHARE, _GELU_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi)


def _gelu_tanh(builder: Any, value: Any) -> Any:
    """torch's gelu, approximate="tanh"."""
    cube = builder.fmul(builder.fmul(value, value), value)
    inner = fused(builder, cube, constant(_float32(_GELU_CUBE)), value)
    bent = _hyperbolic_tangent(builder, builder.fmul(inner, constant(_float32(_GELU_SHARE))))
    half = builder.fmul(value, constant(0.5))
    return builder.fmul(half, builder.fadd(constant(1.0), bent))


def _halved(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes in one, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                value,
                ir.Constant(value.type, ir.Undefined),
                ir.Constant(ir.VectorType(INT32, width), list(range(start, start + width))),
            )
            for start in (0, width)
        )
        value = combine(low, high)
    return builder.extract_element(value, INT32(0))


store_zeros = operation(lambda b, at: write(b, at, whole_numbers(0), 4), none_type, int_type)
"""Sixteen of 32 bits."""
fma = operation(fused, lanes_type, lanes_type, lanes_type, lanes_type)
add = operation(lambda b, x, y: b.fadd(x, y), lanes_type, lanes_type, lanes_type)
sub = operation(lambda b, x, y: b.fsub(x, y), lanes_type, lanes_type, lanes_type)
mul = operation(lambda b, x, y: b.fmul(x, y), lanes_type, lanes_type, lanes_type)
div = operation(lambda b, x, y: b.fdiv(x, y), lanes_type, lanes_type, lanes_type)
larger = operation(_largest, lanes_type, lanes_type, lanes_type)
"""The second of a pair where one is no number."""
larger_or_nan = operation(lambda b, x, y: _maximum(b, x, y), lanes_type, lanes_type, lanes_type)
magnitude = operation(
    lambda b, x: llvm(b, f"llvm.fabs.v{LANES}f32", FLOATS, x), lanes_type, lanes_type
)
splat = operation(splatted, lanes_type, float_type)
clean = operation(_clean, lanes_type, lanes_type, float_type)
keep = operation(_keep, lanes_type, lanes_type, int_type, int_type)
exp = operation(_exponential, lanes_type, lanes_type)
tanh = operation(_hyperbolic_tangent, lanes_type, lanes_type)
silu = operation(_silu, lanes_type, lanes_type)
gelu_tanh = operation(_gelu_tanh, lanes_type, lanes_type)
sum_of = operation(lambda b, x: _halved(b, x, b.fadd), float_type, lanes_type)
largest_of = operation(
    lambda b, x: _halved(b, x, lambda low, high: _largest(b, low, high)), float_type, lanes_type
)
largest_or_nan_of = operation(
    lambda b, x: _halved(b, x, lambda low, high: _maximum(b, low, high)), float_type, lanes_type
)
only_above = operation(
    lambda b, limit, x, y: b.select(b.fcmp_ordered(">", x, limit), y, constant(0.0)),
    lanes_type, lanes_type, lanes_type, lanes_type,
)  # fmt: skip
"""``only_above(limit, x, y)``: y where x is above the limit, else 0."""
only_from = operation(
    lambda b, limit, x, y: b.select(b.fcmp_ordered(">=", x, limit), y, constant(0.0)),
    lanes_type, lanes_type, lanes_type, lanes_type,
)  # fmt: skip
"""The same where x is not below it."""
whole_sum = operation(
    lambda b, x: _halved(b, b.fptosi(x, ir.VectorType(ir.IntType(64), LANES)), b.add),
    int_type, lanes_type,
)  # fmt: skip
"""Of all lanes without their fractions, in 64 bits."""


for _symbol, _instruction in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")
):  # fmt: skip

    @infer_global(_symbol)
    class _OfLanes(ConcreteTemplate):  # type: ignore[misc]
        cases = (signature(lanes_type, lanes_type, lanes_type),)

    @lower_builtin(_symbol, lanes_type, lanes_type)
    def _emitted(_c: Any, builder: Any, _s: Any, values: Any, name: str = _instruction) -> Any:
        return getattr(builder, name)(*values)


first_of = operation(lambda b, x: b.extract_element(x, INT32(0)), float_type, lanes_type)
