"""Sixteen floats at a time: what the loops of this folder are written in, for numba to compile.

Every operation is one IEEE operation on each lane, in the order written: nothing is reassociated, and a
product is contracted with a sum by ``fma`` alone. So a kernel computes the same bits on every CPU,
however wide its vectors are, and what a row gets does not depend on how its neighbours are compiled.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llvmlite import ir
from numba import njit
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, overload

from engine.kernels import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, LANES
from engine.kernels import instructions as asm
from engine.kernels.instructions import lanes_type, operation
from engine.kernels.records import Pointer

_INT64 = ir.IntType(64)
_LINE = 64  # bytes of a line of a cache

# --- memory ---

_LOADS = {
    torch.float32: asm.load_float32,
    torch.bfloat16: asm.load_bfloat16,
    torch.float16: asm.load_float16,
    torch.float8_e4m3fn: asm.load_float8,
}
_STORES = {
    torch.float32: lambda b, at, value: asm.write(b, at, value, 4),
    torch.bfloat16: asm.store_bfloat16,
    torch.float16: asm.store_float16,
    torch.float8_e4m3fn: asm.store_float8,
}
_ROUNDINGS = {
    torch.float32: lambda _b, _floats, value: value,
    torch.bfloat16: lambda b, _floats, value: asm.round_bfloat16(b, value),
    torch.float16: lambda b, _floats, value: asm.round_float16(b, value),
}


def _indexed(emits: dict[torch.dtype, Any]) -> dict[torch.dtype, Any]:
    """The same of a pointer and a number of an element."""

    def indexed(element: torch.dtype) -> Any:
        def emit(builder: Any, floats: Any, at: Any, *values: Any) -> Any:
            place = builder.add(floats, builder.mul(at, at.type(element.itemsize)))
            return emits[element](builder, place, *values)

        return emit

    return {element: indexed(element) for element in emits}


_load_at = operation("int int -> lanes", _indexed(_LOADS))
_store_at = operation("int int lanes -> none", _indexed(_STORES))


def load(floats: Any, at: int) -> Any:
    """Returns sixteen floats, from the one with the number ``at`` on."""
    raise NotImplementedError


def store(floats: Any, at: int, value: Any) -> None:
    """Writes sixteen floats, rounded to the type of ``floats``, from the number ``at`` on."""
    raise NotImplementedError


rounded = operation("int lanes -> lanes", _ROUNDINGS)
"""The second, as if it were stored to the first and loaded again."""
float32s = operation("int -> floats", lambda _b, at: at)
int32s = operation("int -> ints", lambda _b, at: at)
"""The same place, as numbers of that type."""
is_none = operation("int -> bool", lambda b, at: b.icmp_signed("==", at, _INT64(0)))
"""Whether NOWHERE was given for a tensor."""
line_length = operation(
    "int -> int",
    {each: lambda _b, _at, each=each: _INT64(_LINE // each.itemsize) for each in _LOADS},
)
"""How many numbers of a pointer's a line of the cache has."""
bits_of = operation("double -> int", lambda b, value: b.bitcast(value, _INT64))


def room_for(count: int) -> Any:
    """Returns a function for compiled code that returns a place for so many float32, which is there until
    the function that calls it returns."""

    def emit(builder: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(asm.FLOAT, count))
        room.align = _LINE
        return builder.ptrtoint(room, _INT64)

    return operation("-> floats", emit)


# --- what threads share ---

fetch_add = operation(
    "int int -> int",
    lambda b, at, value: b.atomic_rmw("add", asm.pointer(b, at, _INT64), value, "acq_rel"),
)
read_shared = operation(
    "int -> int", lambda b, at: b.load_atomic(asm.pointer(b, at, _INT64), "acquire", 8)
)
"""What another thread may be writing."""


@njit
def shared(counter: Any, count: int) -> Any:
    """Yields the numbers below ``count`` that no other thread takes; ``counter`` begins at 0."""
    item = fetch_add(counter, 1)
    while item < count:
        yield item
        item = fetch_add(counter, 1)


def _call(builder: Any, function: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_INT64])
    builder.call(asm.pointer(builder, function, kind), [value])


def _call_int(builder: Any, function: Any) -> Any:
    kind = ir.FunctionType(asm.INT32, [])
    return builder.sext(builder.call(asm.pointer(builder, function, kind), []), _INT64)


call = operation("int int -> none", _call)
"""A function that is at the first address, with the second."""
call_int = operation("int -> int", _call_int)
"""A function that takes nothing and returns a C int."""

# --- addresses and kinds: what ``paged_attention`` is still written in ---

load32 = operation("int -> lanes", asm.load_float32)
_load_b16 = operation("int -> lanes", asm.load_bfloat16)
_load_f16 = operation("int -> lanes", asm.load_float16)
_load_f8 = operation("int -> lanes", asm.load_float8)
store32 = operation("int lanes -> none", lambda b, at, value: asm.write(b, at, value, 4))
_store_b16 = operation("int lanes -> none", asm.store_bfloat16)
_store_f16 = operation("int lanes -> none", asm.store_float16)
_store_f8 = operation("int lanes -> none", asm.store_float8)
_widen_f8 = operation("int int -> none", asm.widen_float8)
_widen_b16 = operation("int int -> none", asm.widening(asm.load_bfloat16, 2))
_widen_f16 = operation("int int -> none", asm.widening(asm.load_float16, 2))
_widen_32 = operation("int int -> none", asm.widening(asm.load_float32, 4))
read_int = operation("int -> int", lambda b, at: asm.read(b, at, _INT64, 8))
read_float = operation("int -> float", lambda b, at: asm.read(b, at, asm.FLOAT, 4))
write_float = operation("int float -> none", lambda b, at, value: asm.write(b, at, value, 4))
prefetch = operation("int -> none", asm.fetch)
"""What is wanted soon: the line of memory at an address."""


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


@overload(load, inline="always", strict=False)
def _load(floats: Any, _at: Any) -> Any:
    if isinstance(floats, Pointer):
        return lambda floats, at: _load_at(floats, at)
    return lambda floats, at: _load_kind(floats, at)


@overload(store, inline="always", strict=False)
def _store(floats: Any, _at: Any, _value: Any) -> Any:
    if isinstance(floats, Pointer):
        return lambda floats, at, value: _store_at(floats, at, value)
    return lambda floats, at, value: _store_kind(floats, at, value)


# --- arithmetic ---


def _clean(builder: Any, value: Any, largest: Any) -> Any:
    """NaN and infinity become 0, and what is beyond ``largest`` becomes that."""
    most = asm.splatted(builder, largest)
    rest = builder.fsub(value, value)
    is_finite = builder.fcmp_ordered("ord", rest, rest)
    value = builder.select(is_finite, value, asm.constant(0.0))
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
    lanes = ir.Constant(asm.INTS, list(range(LANES)))
    low = builder.icmp_signed(">=", lanes, asm.splatted(builder, builder.trunc(first, asm.INT32)))
    high = builder.icmp_signed("<", lanes, asm.splatted(builder, builder.trunc(end, asm.INT32)))
    return builder.select(builder.and_(low, high), value, asm.constant(-math.inf))


def _only(condition: str, builder: Any, limit: Any, x: Any, y: Any) -> Any:
    is_kept = builder.fcmp_ordered(condition, x, limit)
    return builder.select(is_kept, y, asm.constant(0.0))


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
    power = asm.fused(builder, value, asm.constant(_float32(_LOG2E)), asm.constant(_ROUNDER))
    whole = builder.fsub(power, asm.constant(_ROUNDER))
    rest = asm.fused(builder, whole, asm.constant(_float32(-_LN2_HIGH)), value)
    rest = asm.fused(builder, whole, asm.constant(_float32(-_LN2_LOW)), rest)
    total = asm.constant(_float32(_EXP[0]))
    for factor in _EXP[1:]:
        total = asm.fused(builder, total, rest, asm.constant(_float32(factor)))
    total = asm.fused(builder, builder.fmul(rest, rest), total, rest)
    total = builder.fadd(total, asm.constant(1.0))
    scale = builder.bitcast(
        builder.shl(builder.bitcast(power, asm.INTS), asm.whole_numbers(23)), asm.FLOATS
    )
    is_small = builder.fcmp_ordered("<", value, asm.constant(_LEAST_EXP))
    return builder.select(is_small, asm.constant(0.0), builder.fmul(total, scale))


def _hyperbolic_tangent(builder: Any, value: Any) -> Any:
    is_low = builder.fcmp_ordered("<", value, asm.constant(0.0))
    down = builder.select(is_low, value, builder.fneg(value))
    decay = _exponential(builder, builder.fadd(down, down))
    one = asm.constant(1.0)
    size = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
    return builder.select(is_low, builder.fneg(size), size)


def _logistic(builder: Any, value: Any) -> Any:
    """1 / (1 + e^-x)."""
    is_low = builder.fcmp_ordered("<", value, asm.constant(0.0))
    decay = _exponential(builder, builder.select(is_low, value, builder.fneg(value)))
    one = asm.constant(1.0)
    return builder.fdiv(builder.select(is_low, decay, one), builder.fadd(one, decay))


def _silu(builder: Any, value: Any) -> Any:
    return builder.fmul(value, _logistic(builder, value))


_GELU_SHARE, _GELU_CUBE = 0.7978845608028654, 0.044715  # sqrt(2 / pi)


def _gelu_tanh(builder: Any, value: Any) -> Any:
    """torch's gelu, approximate="tanh"."""
    cube = builder.fmul(builder.fmul(value, value), value)
    inner = asm.fused(builder, cube, asm.constant(_float32(_GELU_CUBE)), value)
    bent = _hyperbolic_tangent(builder, builder.fmul(inner, asm.constant(_float32(_GELU_SHARE))))
    half = builder.fmul(value, asm.constant(0.5))
    return builder.fmul(half, builder.fadd(asm.constant(1.0), bent))


def _halved(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes in one, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (
            builder.shuffle_vector(
                value,
                ir.Constant(value.type, ir.Undefined),
                ir.Constant(ir.VectorType(asm.INT32, width), list(range(start, start + width))),
            )
            for start in (0, width)
        )
        value = combine(low, high)
    return builder.extract_element(value, asm.INT32(0))


fma = operation("lanes lanes lanes -> lanes", asm.fused)
add = operation("lanes lanes -> lanes", lambda b, x, y: b.fadd(x, y))
sub = operation("lanes lanes -> lanes", lambda b, x, y: b.fsub(x, y))
mul = operation("lanes lanes -> lanes", lambda b, x, y: b.fmul(x, y))
div = operation("lanes lanes -> lanes", lambda b, x, y: b.fdiv(x, y))
larger = operation("lanes lanes -> lanes", _largest)
"""The second of a pair where one is no number."""
larger_or_nan = operation("lanes lanes -> lanes", _maximum)
magnitude = operation(
    "lanes -> lanes", lambda b, x: asm.llvm(b, f"llvm.fabs.v{LANES}f32", asm.FLOATS, x)
)
splat = operation("float -> lanes", asm.splatted)
clean = operation("lanes float -> lanes", _clean)
keep = operation("lanes int int -> lanes", _keep)
exp = operation("lanes -> lanes", _exponential)
tanh = operation("lanes -> lanes", _hyperbolic_tangent)
silu = operation("lanes -> lanes", _silu)
gelu_tanh = operation("lanes -> lanes", _gelu_tanh)
sum_of = operation("lanes -> float", lambda b, x: _halved(b, x, b.fadd))
largest_of = operation("lanes -> float", lambda b, x: _halved(b, x, partial(_largest, b)))
largest_or_nan_of = operation("lanes -> float", lambda b, x: _halved(b, x, partial(_maximum, b)))
only_above = operation("lanes lanes lanes -> lanes", partial(_only, ">"))
"""``only_above(limit, x, y)``: y where x is above the limit, else 0."""
only_from = operation("lanes lanes lanes -> lanes", partial(_only, ">="))
"""The same where x is not below it."""
whole_sum = operation(
    "lanes -> int", lambda b, x: _halved(b, b.fptosi(x, ir.VectorType(_INT64, LANES)), b.add)
)
"""Of all lanes without their fractions, in 64 bits."""
first_of = operation("lanes -> float", lambda b, x: b.extract_element(x, asm.INT32(0)))

for _symbol, _instruction in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")
):  # fmt: skip

    @infer_global(_symbol)
    class _OfLanes(ConcreteTemplate):
        cases = (signature(lanes_type, lanes_type, lanes_type),)

    @lower_builtin(_symbol, lanes_type, lanes_type)
    def _emitted(_c: Any, builder: Any, _s: Any, values: Any, name: str = _instruction) -> Any:
        return getattr(builder, name)(*values)
