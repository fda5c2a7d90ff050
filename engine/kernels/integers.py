"""Rows as bytes, for products with weights in few bits, and which instructions there are for them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from llvmlite import ir

from engine.kernels import LANES
from engine.kernels import instructions as asm
from engine.kernels.formats import GROUP

HEADER_BYTES = 16
"""The bytes of a group in a record before its values: its scale and the sum of its values (float32), and
where sums of its products begin (int32): of all of it, or of either half."""
LIFT = 0x4B400000
"""Where sums of groups begin, but for what codes are too large by, times the inputs' sum. As bits of a
float they are 1.5 * 2**23 plus the sum, which is less than 2**22: no instruction has to convert them."""
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`` of Linux on x86-64."""
BYTE_SUMS = "llvm.x86.sse2.psad.bw"
LIFTED = 1.5 * 2.0**23
"""The same as a float."""


def can_multiply() -> bool:
    """Whether numba compiles for a machine that multiplies integers in vectors."""
    return is_wide() or asm.has_feature("avx2")


def has_integer_products() -> bool:
    """Whether it has an instruction that adds four products of bytes."""
    return is_wide() or asm.has_feature("avxvnni")


def is_wide() -> bool:
    """Whether the instruction is that of sixteen sums."""
    return asm.has_feature("avx512vnni")


@cache
def has_amx() -> bool:
    """Whether it has AMX for bytes, and Linux lets this process use it."""
    return asm.has_feature("amx-int8") and is_wide() and _may_use_amx()


def _may_use_amx() -> bool:
    """Asks for the registers, which a process has to do once."""
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0
    except (OSError, AttributeError):
        return False


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
    lifted = _as_ints(builder, builder.fadd(value, asm.constant(LIFTED)))
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
half_at = asm.operation(
    "int -> float", lambda b, at: b.fpext(asm.read(b, at, ir.HalfType(), 2), asm.FLOAT)
)
"""Reads a float16."""
multiply_add = asm.operation(
    "float float float -> float", lambda b, *each: asm.called(b, "llvm.fma.f32", asm.FLOAT, *each)
)
"""``multiply_add(a, b, c)`` returns a * b + c, rounded once."""
