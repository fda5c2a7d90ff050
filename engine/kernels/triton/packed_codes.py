"""How weights in few bits lie in a device's memory for ``code_programs``, and what makes them of others.

Codes have 4 or 8 bits; those of 5 and 6 bits, and what codes of a table stand for, have 8. They lie in
words of 16 bits: of each output channel sixteen words are a unit of 64 or 32 inputs, and a word with the
number ``w`` has, from the lowest bits, the codes of the inputs ``w``, ``16 + w`` and so on. Units lie one
after another, and the words of all channels within each. Every other number is held in the type that it
came in, a span of inputs after another. So several weights are joined channel by channel, nothing is
rounded, and what a tile reads lies together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.grouped_weight import GroupedWeight, UnpackableError

INPUTS = 16
"""That are multiplied at once, and words of a unit."""
_WORD_BYTES = 2
NUMBERS = (
    "scales", "minima", "zeros", "inner_scales", "inner_minima", "channel_scales",
)  # fmt: skip
"""A ``GroupedWeight`` has these beside its codes."""
_KINDS = {torch.uint8: "whole", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_INFINITE = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""The least codes of what is no number, but for their signs."""


class CodeFormat(NamedTuple):
    """A kind of packed weights, of which a program is compiled for each. ``kind``: what codes are: whole
    numbers, of which ``zero`` is subtracted, or floats. ``span``, ``inner_span``: inputs that share a
    scale, and a whole number by which it is multiplied; 0: all. ``numbers``: which there are, and their
    types."""

    kind: str
    in_features: int
    bits: int
    zero: int
    span: int
    inner_span: int
    numbers: tuple[tuple[str, torch.dtype], ...]

    @property
    def unit(self) -> int:
        """Inputs whose codes lie in one another's words."""
        return INPUTS * 8 * _WORD_BYTES // self.bits

    @property
    def tiles(self) -> int:
        """So many tiles of a unit share their scales."""
        return gcd(self.span // INPUTS, self.inner_span // INPUTS, self.unit // INPUTS)

    @property
    def is_full(self) -> bool:
        return self.in_features % self.unit == 0


class PackedCodes:
    """Weights ``[out_features, in_features]`` of a layer, or of several experts, one after another.
    ``tensors``, by their names: ``blocks`` ``[units, channels, 16]`` int16, numbers ``[spans,
    channels]``, and maybe ``bias`` ``[num_experts, out_features]``. The rest as ``packing.PackedGroups``
    has it."""

    rounds_inputs = False

    def __init__(
        self, kind: CodeFormat, tensors: dict[str, torch.Tensor], num_experts: int = 1
    ) -> None:
        self.format = self.form = kind
        self.tensors, self.blocks, self.bias = tensors, tensors["blocks"], tensors.get("bias")
        self.in_features, self.num_experts = kind.in_features, num_experts
        self.out_features = self.blocks.shape[1] // num_experts

    def weight_of(self, channels: torch.Tensor) -> GroupedWeight:
        """Returns the weights of some output ``channels`` ``[n]`` int64."""
        kind = self.format
        octets = (
            self.blocks.index_select(1, channels).transpose(0, 1).contiguous().view(torch.uint8)
        )
        octets = octets.view(*octets.shape[:2], INPUTS, _WORD_BYTES).transpose(2, 3)
        if kind.bits == 4:
            octets = torch.stack((octets & 15, octets >> 4), 3)
        codes = octets.flatten(1)[:, : self.in_features]
        if kind.kind != "whole":
            codes = codes.contiguous().view(_DTYPES[kind.kind])
        numbers = {name: self.tensors[name].index_select(1, channels).T for name, _ in kind.numbers}
        if "channel_scales" in numbers:
            numbers["channel_scales"] = numbers["channel_scales"][:, 0]
        span = kind.span or self.in_features
        more = {"scales": None, "inner_span": kind.inner_span, **numbers}
        return GroupedWeight(codes, kind.bits, kind.zero, span, **more)  # type: ignore[arg-type]


_DTYPES = {name: dtype for dtype, name in _KINDS.items()}


def pack(
    parts: Iterable[GroupedWeight],
    out_features: int,
    in_features: int,
    bias: torch.Tensor | None = None,
    num_experts: int = 1,
) -> PackedCodes:
    """``parts``: all output channels in their order, of one expert after another, of one scheme;
    ``bias``: ``[out_features]``, or of each expert. Raises UnpackableError."""
    packed: PackedCodes | None = None
    first, channels = 0, num_experts * out_features
    for part in parts:
        kind = format_of(part)
        numbers = _numbers(part)
        if packed is None:
            units = -(-in_features // kind.unit)
            empty = part.codes.new_empty
            tensors = {"blocks": empty(units, channels, INPUTS, dtype=torch.int16)}
            for name, each in numbers.items():
                tensors[name] = each.new_empty(len(each), channels)
            if bias is not None:
                tensors["bias"] = bias.detach().view(num_experts, out_features)
            packed = PackedCodes(kind, tensors, num_experts)
        elif kind != packed.format:
            raise UnpackableError("its parts are of several schemes")
        end = first + len(part.codes)
        packed.blocks[:, first:end] = _words(part, kind)
        for name, each in numbers.items():
            packed.tensors[name][:, first:end] = each
        first = end
    assert packed is not None, "a weight has channels"
    return packed


def join(packed: Sequence[PackedCodes]) -> PackedCodes:
    """Returns several, of the same format and inputs, side by side."""
    names = ("blocks", *dict(packed[0].format.numbers))
    tensors = {name: torch.cat([each.tensors[name] for each in packed], 1) for name in names}
    biases = [each.bias for each in packed if each.bias is not None]
    if biases:
        nothing = biases[0].new_zeros
        every = (
            nothing(1, each.out_features) if each.bias is None else each.bias for each in packed
        )
        tensors["bias"] = torch.cat([*every], 1)
    return PackedCodes(packed[0].format, tensors)


def can_join(packed: Sequence[PackedCodes]) -> bool:
    """Whether ``join`` takes them."""
    return len({each.form for each in packed}) == 1


def format_of(weight: GroupedWeight) -> CodeFormat:
    """Returns the format that weights are packed in. Raises UnpackableError."""
    in_features, dtype = weight.codes.shape[1], weight.codes.dtype
    span = 0 if weight.scales is None or weight.span >= in_features else weight.span
    for each in (span, weight.inner_span):
        if each % INPUTS:
            raise UnpackableError(f"groups of {each} features are no multiple of {INPUTS}")
    if dtype in _INFINITE:
        octets = weight.codes.contiguous().view(torch.uint8)
        if bool(((octets & 0x7F) >= _INFINITE[dtype]).any()):
            raise UnpackableError("its weights are not finite")
    numbers = ((name, each.dtype) for name, each in _numbers(weight).items())
    bits = 4 if weight.bits == 4 and not weight.table else 8
    form = (in_features, bits, weight.zero, span, weight.inner_span)
    return CodeFormat(_KINDS[dtype], *form, (*numbers,))


def _numbers(weight: GroupedWeight) -> dict[str, torch.Tensor]:
    """Returns what there is beside codes, ``[spans, out_features]``."""
    found = {name: getattr(weight, name) for name in NUMBERS}
    return {
        name: each.T if each.ndim == 2 else each[None]
        for name, each in found.items()
        if each is not None
    }


def _words(weight: GroupedWeight, kind: CodeFormat) -> torch.Tensor:
    """Returns ``[units, out_features, 16]``."""
    codes = weight.codes.contiguous().view(torch.uint8) if kind.kind != "whole" else weight.values
    missing = -codes.shape[1] % kind.unit
    # [out_features, units, octets of a word, codes of an octet, words]
    parts = F.pad(codes, (0, missing)).view(len(codes), -1, _WORD_BYTES, 8 // kind.bits, INPUTS)
    octets = parts[:, :, :, 0]
    if kind.bits == 4:
        octets = octets | (parts[:, :, :, 1] << 4)
    words = octets.permute(1, 0, 3, 2).contiguous().view(torch.int16)
    return words[..., 0]
