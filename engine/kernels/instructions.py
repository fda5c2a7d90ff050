"""What the loops of this folder are made of: how an operation on sixteen floats becomes instructions of
LLVM, and floats of every type in memory."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import register_default
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic

from engine.kernels import LANES
from engine.kernels.records import Pointer

FLOAT, INT8, INT16, INT32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT32, LANES)


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
    "floats": Pointer(torch.float32),
    "ints": Pointer(torch.int32),
    "none": types.void,
}


def operation(signature: str, emit: Any) -> Any:
    """Returns a function for compiled code, whose instructions ``emit(builder, *values)`` writes; of
    several, one for each type of elements, the first argument's says which. ``signature`` names types of
    ``_TYPES``, as in "lanes lanes -> float". Pointers may be given where an int is declared."""
    given_types, _, result_type = signature.partition("->")
    arguments, result = [_TYPES[name] for name in given_types.split()], _TYPES[result_type.strip()]

    def typed(_typing: Any, *given: Any) -> Any:
        chosen = emit[given[0].element] if isinstance(emit, dict) else emit

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


def llvm(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kinds = [value.type for value in values]
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(result, kinds))
    return builder.call(function, values)


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
    """For reading, into the second cache: the first is small, and what is in it in use."""
    to = INT8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [to, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [pointer(builder, address, INT8), INT32(0), INT32(2), INT32(1)])


def load_float32(builder: Any, address: Any) -> Any:
    return read(builder, address, FLOATS, 4)


def load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.zext(read(builder, address, ir.VectorType(INT16, LANES), 2), INTS)
    return builder.bitcast(builder.shl(bits, whole_numbers(16)), FLOATS)


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
    """Twice sixteen: halves are made of as many at once as of sixteen."""
    halves = _read_float8(builder, source, 2 * LANES)
    for start in (0, LANES):
        which = ir.Constant(INTS, list(range(start, start + LANES)))
        mine = builder.shuffle_vector(halves, halves, which)
        write(builder, plus(builder, target, 4 * start), float8_floats(builder, mine), 4)


def widening(
    load_floats: Callable[[Any, Any], Any], itemsize: int
) -> Callable[[Any, Any, Any], None]:
    """The same of other types."""

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


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return llvm(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


def plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(address.type, offset))
