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
from numba.extending import intrinsic, lower_builtin

from compiled.records import is_nowhere
from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels.instructions import lanes_type, operation

_INT64 = ir.IntType(64)
_LINE = 64  # bytes of a line of a cache

# --- memory ---

_ROUNDINGS = {
    torch.float32: lambda _b, _floats, value: value,
    torch.bfloat16: lambda b, _floats, value: asm.round_bfloat16(b, value),
    torch.float16: lambda b, _floats, value: asm.round_float16(b, value),
}


def _indexed(emits: dict[torch.dtype, Any]) -> dict[torch.dtype, Any]:
    """Returns the same for a pointer and a number of an element."""

    def indexed(element: torch.dtype) -> Any:
        def emit(builder: Any, floats: Any, at: Any, *values: Any) -> Any:
            place = builder.add(floats, asm.times(builder, at, element.itemsize))
            return emits[element](builder, place, *values)

        return emit

    return {element: indexed(element) for element in emits}


def _room(builder: Any, element: torch.dtype) -> tuple[Any, Any]:
    """Returns a place for sixteen, as a pointer to bytes and as an address."""
    room = cgutils.alloca_once(builder, ir.ArrayType(asm.INT8, LANES * element.itemsize))
    return builder.bitcast(room, asm.INT8.as_pointer()), builder.ptrtoint(room, _INT64)


def _load_some(element: torch.dtype) -> Any:
    def emit(builder: Any, floats: Any, count: Any) -> Any:
        room, address = _room(builder, element)
        cgutils.memset(builder, room, _INT64(LANES * element.itemsize), 0)
        source = asm.pointer(builder, floats, asm.INT8)
        cgutils.raw_memcpy(builder, room, source, count, element.itemsize)
        return asm.LOADS[element](builder, address)

    return emit


def _store_some(element: torch.dtype) -> Any:
    def emit(builder: Any, floats: Any, value: Any, count: Any) -> None:
        room, address = _room(builder, element)
        asm.STORES[element](builder, address, value)
        target = asm.pointer(builder, floats, asm.INT8)
        cgutils.raw_memcpy(builder, target, room, count, element.itemsize)

    return emit


load = operation("int int -> lanes", _indexed(asm.LOADS))
"""``load(floats, at)`` returns sixteen floats, from the one with the number ``at`` on."""
store = operation("int int lanes -> none", _indexed(asm.STORES))
"""``store(floats, at, value)`` writes them, rounded to the type of ``floats``."""
one_of = operation("int int -> float", _indexed(asm.READS))
"""``one_of(floats, at)`` returns the float with that number."""
load_some = operation("int int -> lanes", {each: _load_some(each) for each in asm.LOADS})
"""``load_some(floats, count)`` reads no more than so many of sixteen; the others are 0."""
store_some = operation("int lanes int -> none", {each: _store_some(each) for each in asm.STORES})
"""``store_some(floats, value, count)`` writes no more than so many of sixteen."""
rounded = operation("int lanes -> lanes", _ROUNDINGS)
"""The second, as if it were stored to the first and loaded again."""
float32s = operation("int -> floats", lambda _b, at: at)
int32s = operation("int -> ints", lambda _b, at: at)
"""The same place, as numbers of that type."""
is_none = is_nowhere
"""Whether NOWHERE was given for a tensor."""
line_length = operation(
    "int -> int",
    {each: lambda _b, _at, each=each: _INT64(_LINE // each.itemsize) for each in asm.LOADS},
)
"""How many numbers of a pointer's a line of the cache has."""
_fetch_line = operation("int -> none", asm.fetch)
_widen_some = operation("int int -> none", asm.WIDENINGS)


@njit
def fetch(floats: Any, count: int) -> None:
    """Fetches every line of so many numbers, which are wanted soon."""
    for at in range(0, count, line_length(floats)):
        _fetch_line(floats + at)


@njit
def widen(floats: Any, count: int, target: Any) -> None:
    """Writes so many floats, a multiple of 32, as float32."""
    for at in range(0, count, 2 * LANES):
        _widen_some(floats + at, target + at)


bits_of = operation("double -> int", lambda b, value: b.bitcast(value, _INT64))
float_bits = operation("float -> int", lambda b, value: b.sext(b.bitcast(value, asm.INT32), _INT64))
"""A float's 32 bits, as an integer with a sign."""


def room_for(count: int) -> Any:
    """Returns a function for compiled code that returns a place for so many float32, which is there until
    the function that calls it returns. Nothing is in it yet: zeros written at once would be taken apart,
    one by one, which takes LLVM seconds."""

    def emit(builder: Any) -> Any:
        with builder.goto_entry_block():
            room = builder.alloca(asm.FLOAT, size=ir.Constant(_INT64, count))
        room.align = _LINE
        return builder.ptrtoint(room, _INT64)

    return operation("-> floats", emit)


@intrinsic
def as_elements_of(_context: Any, floats: Any, place: Any) -> Any:
    """The second pointer, as one to numbers of the type that the first points to."""
    return floats(floats, place), lambda _context, _builder, _signature, values: values[1]


# --- what threads share ---

fetch_add = operation(
    "int int -> int",
    lambda b, at, value: b.atomic_rmw("add", asm.pointer(b, at, _INT64), value, "acq_rel"),
)
read_shared = operation(
    "int -> int", lambda b, at: b.load_atomic(asm.pointer(b, at, _INT64), "acquire", 8)
)
"""Reads what another thread may be writing."""


@njit
def shared(counter: Any, count: int, size: int = 1) -> Any:
    """Yields the numbers below ``count`` that no other thread takes, ``size`` of them at a time.
    ``counter`` begins at 0."""
    item = fetch_add(counter, size)
    end = item + size
    while item < count:
        yield item
        item += 1
        if item == end:
            item = fetch_add(counter, size)
            end = item + size


@njit
def take_run(counter: Any, count: int, num_threads: int) -> tuple[int, int]:
    """Returns the beginning and end of a run of numbers below ``count`` that no other thread takes: long
    ones come first and short ones last; both are ``count`` where none is left. ``counter`` begins at 0.
    Memory is read faster in long runs, and short ones end at one time (guided self-scheduling,
    Polychronopoulos and Kuck 1987)."""
    taken, first = fetch_add(counter, 1), 0
    while first < count:
        size = max((count - first) * 3 // (4 * num_threads), 1)
        if taken < num_threads:
            begin = min(first + taken * size, count)
            return begin, min(begin + size, count)
        taken -= num_threads
        first += num_threads * size
    return count, count


@njit
def shared_runs(counter: Any, count: int, num_threads: int) -> Any:
    """Yields such runs until none is left."""
    begin, end = take_run(counter, count, num_threads)
    while begin < end:
        yield begin, end
        begin, end = take_run(counter, count, num_threads)


def _call(builder: Any, function: Any, value: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_INT64])
    builder.call(asm.pointer(builder, function, kind), [value])


def _call_int(builder: Any, function: Any) -> Any:
    kind = ir.FunctionType(asm.INT32, [])
    return builder.sext(builder.call(asm.pointer(builder, function, kind), []), _INT64)


call = operation("int int -> none", _call)
"""Calls the function that is at the first address with the second."""
call_int = operation("int -> int", _call_int)
"""Calls a function that takes nothing and returns a C int."""
_SPINS = 1 << 14
"""A thread that has waited for so long lets others run: somebody may want its core."""


@njit
def wait_until(counter: Any, least: int, release: int) -> None:
    """Returns when what ``counter`` points to has reached ``least``. ``release``: where the function is
    that lets other threads run, or 0."""
    spins = 0
    while read_shared(counter) < least:
        spins += 1
        if spins >= _SPINS and release != 0:
            call_int(release)


@njit
def share_of(count: int, num_parts: int, part: int) -> tuple[int, int]:
    """Returns where a part of ``count`` begins and ends, of parts that are about equal."""
    return count * part // num_parts, count * (part + 1) // num_parts


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
    """Returns e to the power of lanes that are not above 0; below -87 it is 0."""
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


def _exponential_of_any(builder: Any, value: Any) -> Any:
    """Returns e to the power of lanes; above 87 it is infinite."""
    is_low = builder.fcmp_ordered("<", value, asm.constant(0.0))
    decay = _exponential(builder, builder.select(is_low, value, builder.fneg(value)))
    return builder.select(is_low, decay, builder.fdiv(asm.constant(1.0), decay))


def _softplus(builder: Any, value: Any) -> Any:
    """log(1 + e^x), which is the larger of x and 0, and log(1 + e^-|x|)."""
    is_low = builder.fcmp_ordered("<", value, asm.constant(0.0))
    decay = _exponential(builder, builder.select(is_low, value, builder.fneg(value)))
    # log(1 + d) is twice the area tangent of d / (d + 2), which is at most a third.
    ratio = builder.fdiv(decay, builder.fadd(decay, asm.constant(2.0)))
    square = builder.fmul(ratio, ratio)
    total = asm.constant(_float32(2 / _AREA_TERMS))
    for power in range(_AREA_TERMS - 2, 0, -2):
        total = asm.fused(builder, total, square, asm.constant(_float32(2 / power)))
    high = builder.select(is_low, asm.constant(0.0), value)
    return asm.fused(builder, total, ratio, high)


def _inverse_root(builder: Any, value: Any) -> Any:
    root = asm.called(builder, f"llvm.sqrt.v{LANES}f32", asm.FLOATS, value)
    return builder.fdiv(asm.constant(1.0), root)


_AREA_TERMS = 15
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


def fma_of_tensors(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Returns the same of tensors, for the plain loops that kernels are checked against. A product of two
    float32 is a float64; their sum with a third is rounded to odd there, so that the second rounding is
    as if it were the only one (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
    2008)."""
    product, added = a.double() * b.double(), c.double()
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    is_even = total.view(torch.int64) % 2 == 0
    away = torch.where(error > 0, torch.inf, -torch.inf).double()
    odd = torch.where((error != 0) & is_even, torch.nextafter(total, away), total)
    return odd.float()


add = operation("lanes lanes -> lanes", lambda b, x, y: b.fadd(x, y))
sub = operation("lanes lanes -> lanes", lambda b, x, y: b.fsub(x, y))
mul = operation("lanes lanes -> lanes", lambda b, x, y: b.fmul(x, y))
div = operation("lanes lanes -> lanes", lambda b, x, y: b.fdiv(x, y))
larger = operation("lanes lanes -> lanes", _largest)
"""The second of a pair where one is no number."""
larger_or_nan = operation("lanes lanes -> lanes", _maximum)
magnitude = operation(
    "lanes -> lanes", lambda b, x: asm.called(b, f"llvm.fabs.v{LANES}f32", asm.FLOATS, x)
)
splat = operation("float -> lanes", asm.splatted)
clean = operation("lanes float -> lanes", _clean)
keep = operation("lanes int int -> lanes", _keep)
exp = operation("lanes -> lanes", _exponential)
exp_of_any = operation("lanes -> lanes", _exponential_of_any)
tanh = operation("lanes -> lanes", _hyperbolic_tangent)
logistic = operation("lanes -> lanes", _logistic)
softplus = operation("lanes -> lanes", _softplus)
inverse_root = operation("lanes -> lanes", _inverse_root)
negative = operation("lanes -> lanes", lambda b, x: b.fneg(x))
silu = operation("lanes -> lanes", _silu)
gelu_tanh = operation("lanes -> lanes", _gelu_tanh)
SILU, GELU_TANH = 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


@njit
def activated(activation: int, value: Any) -> Any:
    """Returns an activation of ``ACTIVATIONS`` of each lane."""
    return silu(value) if activation == SILU else gelu_tanh(value)


sum_of = operation("lanes -> float", lambda b, x: _halved(b, x, b.fadd))
largest_of = operation("lanes -> float", lambda b, x: _halved(b, x, partial(_largest, b)))
largest_or_nan_of = operation("lanes -> float", lambda b, x: _halved(b, x, partial(_maximum, b)))
only_above = operation("lanes lanes lanes -> lanes", partial(_only, ">"))
"""``only_above(limit, x, y)``: y where x is above the limit, else 0."""
only_from = operation("lanes lanes lanes -> lanes", partial(_only, ">="))
"""The same where x is not below it."""
where = operation(
    "lanes lanes lanes -> lanes",
    lambda b, c, x, y: b.select(b.fcmp_unordered("!=", c, asm.constant(0.0)), x, y),
)
"""``where(c, x, y)``: x where c is not 0, else y."""
whole_sum = operation(
    "lanes -> int", lambda b, x: _halved(b, b.fptosi(x, ir.VectorType(_INT64, LANES)), b.add)
)
"""Returns the sum of all lanes without their fractions, in 64 bits."""
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
