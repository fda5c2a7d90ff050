"""How weights in few bits lie in memory for products with rows.

Output channels come in blocks of 32, features in groups of 32. In a block, group after group, lie the
codes of four features of each channel, then of the next four: what one instruction multiplies. Codes of 8
bits take a byte. Of others the lower four bits of channels 0 to 15 are the lower half of a byte and those
of channels 16 to 31 the upper one; what is above four bits follows in planes, in which a byte has the
bits of several fours.

Codes of 4 bits may stand for the numbers of a table.

Whole numbers that multiply a group's scale (``inner``) follow its codes. Scales are float16, and so are
minima; a zero point is a byte. Where each group has its own they follow the codes, else they lie before a
block's first group.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from llvmlite import ir

from engine.kernels import LANES
from engine.kernels import instructions as asm

CHANNELS = 2 * LANES
"""Output channels of a block: of each so many are multiplied with a row at once."""
GROUP = 32
"""Features of a group."""
FOURS = GROUP // 4
_VECTOR = 4 * LANES
"""Bytes of four features of sixteen channels."""

Offset = Literal["none", "minima", "zeros"]
Inputs = Literal["int8", "float32"]


class Format(NamedTuple):
    """A kind of packed weights, of which code is compiled for each. ``bits``: of a code; ``zero``:
    subtracted from each; ``inner``: features that share a whole number by which the scale is multiplied,
    16 or 32, or 0; ``offset``: what groups have beside a scale; ``has_scales``: channels alone have them
    if not, and a row's inputs are one group; ``inputs``: what rows are multiplied as; ``table``: what
    codes of 4 bits stand for, or nothing."""

    bits: int
    zero: int
    inner: int = 0
    offset: Offset = "none"
    has_scales: bool = True
    inputs: Inputs = "int8"
    table: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Weights are pointed to byte by byte."""
        return 1

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's codes."""
        return CHANNELS * GROUP * self.bits // 8

    @property
    def inner_bytes(self) -> int:
        """Bytes of a group's whole numbers."""
        if not self.inner:
            return 0
        return CHANNELS * (GROUP // self.inner + (self.offset == "minima"))

    @property
    def num_parts(self) -> int:
        """Parts of a group whose products are summed apart."""
        return 2 if self.inner == GROUP // 2 else 1

    def fours_of(self, part: int) -> range:
        """Returns the numbers of a part's fours of features."""
        each = FOURS // self.num_parts
        return range(part * each, (part + 1) * each)

    @property
    def outer_bytes(self) -> int:
        """Bytes of the scales, and minima or zero points, of 32 channels."""
        return CHANNELS * (2 + {"none": 0, "minima": 2, "zeros": 1}[self.offset]) * self.has_scales


class Places(NamedTuple):
    """Where groups and scales lie in a block, in bytes from its begin. Of a group with the number ``n``
    the scales are those with the number ``n >> outer_shift``."""

    num_groups: int
    first_group: int
    group_stride: int
    first_outer: int
    outer_stride: int
    outer_shift: int

    @property
    def block_bytes(self) -> int:
        return self.first_group + self.num_groups * self.group_stride


class Weighing(NamedTuple):
    """The factors of a group's sums of codes, for each sixteen channels: ``scales``, of each half of the
    group where they differ; ``minima`` (float32) or ``zeros`` (int32), or neither."""

    scales: list[list[Any]]
    minima: list[Any] | None
    zeros: list[Any] | None


def _looked_up(builder: Any, codes: Any, table: tuple[int, ...]) -> Any:
    """Returns what bytes below 16 stand for."""
    name, width = "llvm.x86.avx512.pshuf.b.512", 64
    if not asm.has_feature("avx512bw"):
        name, width = "llvm.x86.avx2.pshuf.b", 32
    kind = ir.VectorType(asm.INT8, width)
    values = ir.Constant(kind, list(table) * (width // len(table)))
    octets = builder.bitcast(codes, ir.VectorType(asm.INT8, _VECTOR))
    found = []
    for start in range(0, _VECTOR, width):
        lanes = ir.Constant(ir.VectorType(asm.INT32, width), list(range(start, start + width)))
        part = builder.shuffle_vector(octets, octets, lanes)
        found.append(asm.called(builder, name, kind, values, part))
    if len(found) == 2:
        lanes = ir.Constant(ir.VectorType(asm.INT32, _VECTOR), list(range(_VECTOR)))
        return builder.bitcast(builder.shuffle_vector(*found, lanes), asm.INTS)
    return builder.bitcast(found[0], asm.INTS)


class GroupReader:
    """Reads a group of a block: its codes are at ``here``, its scales at ``outer``."""

    def __init__(self, builder: Any, kind: Format, here: Any, outer: Any) -> None:
        self._builder, self._kind, self._here, self._outer = builder, kind, here, outer
        self._planes: dict[int, Any] = {}

    def codes(self, four: int) -> list[Any]:
        """Returns of sixteen channels each the codes of four features, a byte each in an int32."""
        builder = self._builder
        if self._kind.bits == 8:
            first = 2 * _VECTOR * four
            return [self._vector(first + _VECTOR * half) for half in range(2)]
        both = self._vector(_VECTOR * four)
        upper = builder.lshr(both, asm.whole_numbers(4))
        low = asm.whole_numbers(0x0F0F0F0F)
        halves = [builder.and_(each, low) for each in (both, upper)]
        if self._kind.table:
            return [_looked_up(builder, each, self._kind.table) for each in halves]
        if self._kind.bits == 4:
            return halves
        return [builder.or_(each, self._high(2 * four + at)) for at, each in enumerate(halves)]

    def _high(self, index: int) -> Any:
        """Returns what is above four bits of the codes with a number in the group, where it belongs."""
        builder, num_bits = self._builder, self._kind.bits - 4
        per_plane = 8 // num_bits
        plane, shift = index // per_plane, num_bits * (index % per_plane) - 4
        if plane not in self._planes:
            self._planes[plane] = self._vector(_VECTOR * (FOURS + plane))
        bits = self._planes[plane]
        if shift > 0:
            bits = builder.lshr(bits, asm.whole_numbers(shift))
        elif shift < 0:
            bits = builder.shl(bits, asm.whole_numbers(-shift))
        mask = ((1 << num_bits) - 1) << 4
        return builder.and_(bits, asm.whole_numbers(mask * 0x01010101))

    def weighing(self) -> Weighing:
        kind = self._kind
        scales = self._halves_of_channels(0)
        minima, zeros = None, None
        if kind.offset == "minima":
            minima = self._halves_of_channels(2 * CHANNELS)
        elif kind.offset == "zeros":
            zeros = self._bytes(self._outer, 2 * CHANNELS, signed=False)
        if not kind.inner:
            return Weighing([scales], minima, zeros)
        number = GROUP // kind.inner
        steps = []
        for part in range(number):
            whole = self._bytes(self._here, kind.code_bytes + CHANNELS * part, minima is None)
            steps.append(self._times(scales, whole))
        if minima is not None:
            whole = self._bytes(self._here, kind.code_bytes + CHANNELS * number, signed=False)
            minima = self._times(minima, whole)
        return Weighing(steps, minima, zeros)

    def _times(self, floats: list[Any], whole: list[Any]) -> list[Any]:
        """Products that are not rounded: float16 with a byte has 19 bits at most."""
        builder = self._builder
        return [
            builder.fmul(value, builder.sitofp(each, asm.FLOATS))
            for value, each in zip(floats, whole, strict=True)
        ]

    def _vector(self, offset: int) -> Any:
        return asm.read(self._builder, asm.plus(self._builder, self._here, offset), asm.INTS, 1)

    def _halves_of_channels(self, offset: int) -> list[Any]:
        return [
            asm.load_float16(
                self._builder, asm.plus(self._builder, self._outer, offset + 2 * LANES * half)
            )
            for half in range(2)
        ]

    def _bytes(self, start: Any, offset: int, signed: bool) -> list[Any]:
        builder, kind = self._builder, ir.VectorType(asm.INT8, LANES)
        found = (
            asm.read(builder, asm.plus(builder, start, offset + LANES * half), kind, 1)
            for half in range(2)
        )
        widen = builder.sext if signed else builder.zext
        return [widen(each, asm.INTS) for each in found]
