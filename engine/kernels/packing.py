"""Packs weights in few bits as ``formats`` says, in slices, which bounds the memory that takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels import LANES
from engine.kernels.formats import CHANNELS, FOURS, GROUP, Format, Offset, Places
from engine.kernels.grouped_weight import GroupedWeight, UnpackableError
from engine.kernels.records import NOWHERE, Float32s, Formatted

_FORMATS_BITS = (4, 5, 6, 8)
_LARGEST_EXPONENT = 14
"""Scales are made float16 by a power of two for each channel, which leaves the largest below 2**15."""
_MOST_SHIFT = 62
_NUMBERS = {"minima": torch.uint8, "none": torch.int8}
"""Types of the whole numbers that multiply scales, with and without minima."""


class Weights(NamedTuple):
    """The ``blocks``, of ``block_bytes`` each, ``scales`` and ``bias`` (or NOWHERE) of ``PackedGroups``.
    Those of experts are ``num_blocks`` for each, one after another."""

    blocks: Formatted
    scales: Float32s
    bias: Float32s
    num_blocks: int
    block_bytes: int


class PackedGroups:
    """Weights ``[out_features, in_features]`` packed for CPUs, of one matrix or of each of
    ``num_experts``. ``blocks``: ``[num_blocks, bytes]`` uint8, an expert's together; ``scales``: of
    channels, float32, and ``bias`` likewise, or None: both ``[num_blocks * 32]``. ``weights``: the same
    as kernels are told it."""

    rounds_inputs = True
    """Whether inputs may be rounded to 8 bits."""

    def __init__(
        self,
        kind: Format,
        places: Places,
        sizes: tuple[int, int],
        blocks: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        num_experts: int = 1,
    ) -> None:
        self.format, self.places, self.num_experts = kind, places, num_experts
        self.out_features, self.in_features = sizes
        self.blocks, self.scales, self.bias = blocks, scales, bias
        own_blocks = len(blocks) // num_experts
        told_bias = NOWHERE if bias is None else bias
        self.weights = Weights(blocks, scales, told_bias, own_blocks, blocks.shape[1])

    @property
    def form(self) -> tuple[object, ...]:
        """Those that are joined have the same."""
        return self.format, self.places, self.in_features

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is held, by names."""
        bias = {} if self.bias is None else {"bias": self.bias}
        return {"blocks": self.blocks, "scales": self.scales} | bias


def pack(
    parts: Iterable[GroupedWeight],
    out_features: int,
    in_features: int,
    bias: torch.Tensor | None = None,
    num_experts: int = 1,
) -> PackedGroups:
    """``parts``: all output channels in their order, of one scheme; all but the last of an expert have a
    multiple of 32. ``bias``: ``[out_features]``, or ``[num_experts, out_features]``. Raises
    UnpackableError."""
    own_blocks = -(-out_features // CHANNELS)
    num_blocks = own_blocks * num_experts
    packed: PackedGroups | None = None
    first = 0
    for part in parts:
        part = normalized(part)
        if packed is None:
            packed = PackedGroups(
                format_of(part),
                _places(part, in_features),
                (out_features, in_features),
                torch.empty(num_blocks, _places(part, in_features).block_bytes, dtype=torch.uint8),
                torch.zeros(num_blocks * CHANNELS),
                None if bias is None else _filled_bias(bias, num_experts, own_blocks * CHANNELS),
                num_experts,
            )
        elif (format_of(part), _places(part, in_features)) != (packed.format, packed.places):
            raise UnpackableError("its parts are of several schemes")
        end = first + -(-len(part.codes) // CHANNELS)
        factors = _write(part, packed.places, packed.format, packed.blocks[first:end])
        packed.scales[first * CHANNELS :][: len(factors)] = factors
        first = end
    assert packed is not None, "a weight has channels"
    return packed


def join(packed: Sequence[PackedGroups]) -> PackedGroups:
    """Returns several, of the same format and features, side by side. All but the last have a multiple of
    32 channels."""
    first = packed[0]
    biases = None
    if any(each.bias is not None for each in packed):
        biases = torch.cat(
            [torch.zeros_like(each.scales) if each.bias is None else each.bias for each in packed]
        )
    return PackedGroups(
        first.format,
        first.places,
        (sum(each.out_features for each in packed), first.in_features),
        torch.cat([each.blocks for each in packed]),
        torch.cat([each.scales for each in packed]),
        biases,
    )


def can_join(packed: Sequence[PackedGroups]) -> bool:
    """Whether ``join`` takes them."""
    whole = all(each.out_features % CHANNELS == 0 for each in packed[:-1])
    return whole and len({each.form for each in packed}) == 1


def format_of(weight: GroupedWeight) -> Format:
    """Returns the format that weights are packed in. Raises UnpackableError."""
    offset: Offset = "none"
    if weight.minima is not None:
        offset = "minima"
    elif weight.zeros is not None:
        offset = "zeros"
    inner = weight.inner_span if weight.inner_scales is not None else 0
    has_scales = weight.scales is not None
    kind = Format(weight.bits, weight.zero, inner, offset, has_scales, table=weight.table)
    is_known = (
        weight.codes.dtype == torch.uint8
        and weight.bits in _FORMATS_BITS
        and inner in {"minima": (0, 32), "none": (0, 16, 32), "zeros": (0,)}[offset]
        and (weight.minima is None or (weight.inner_minima is not None) == bool(inner))
        and (weight.inner_scales is None or weight.inner_scales.dtype == _NUMBERS[offset])
        and (not weight.table or weight.bits == 4)
    )
    if not is_known:
        raise UnpackableError(f"no kernel multiplies weights of {kind}")
    return kind


def normalized(weight: GroupedWeight) -> GroupedWeight:
    """Returns weights as they are packed: scales are for a power of two of groups, or for whole channels,
    whose factors they become where nothing else is in their way. Raises UnpackableError."""
    in_features = weight.codes.shape[1]
    if weight.scales is None or weight.inner_span:
        return weight
    if weight.span >= in_features:
        if weight.minima is None and weight.channel_scales is None:
            scales = weight.scales[:, 0].float()
            return weight._replace(
                span=in_features,
                scales=torch.ones(len(scales), 1, dtype=torch.float16),
                channel_scales=scales,
            )
        return weight._replace(span=in_features)
    if weight.span % GROUP:
        raise UnpackableError(f"groups of {weight.span} features are no multiple of {GROUP}")
    groups = weight.span // GROUP
    times = groups // (groups & -groups)

    def spread(numbers: torch.Tensor | None) -> torch.Tensor | None:
        if numbers is None or times == 1:
            return numbers
        return numbers.repeat_interleave(times, 1)[:, : -(-in_features * times // weight.span)]

    return weight._replace(
        span=weight.span // times,
        scales=spread(weight.scales),
        zeros=spread(weight.zeros),
        minima=spread(weight.minima),
    )


def _places(weight: GroupedWeight, in_features: int) -> Places:
    kind = format_of(weight)
    num_groups = -(-in_features // GROUP)
    own = kind.code_bytes + kind.inner_bytes
    if weight.scales is None:
        return Places(num_groups, 0, own, 0, 0, _MOST_SHIFT)
    if weight.span == GROUP:
        stride = own + kind.outer_bytes
        return Places(num_groups, 0, stride, own, stride, 0)
    if weight.span >= in_features:
        return Places(num_groups, kind.outer_bytes, own, 0, kind.outer_bytes, _MOST_SHIFT)
    per_outer = weight.span // GROUP
    num_outer = -(-num_groups // per_outer)
    shift = per_outer.bit_length() - 1
    return Places(num_groups, num_outer * kind.outer_bytes, own, 0, kind.outer_bytes, shift)


def _write(
    weight: GroupedWeight, places: Places, kind: Format, blocks: torch.Tensor
) -> torch.Tensor:
    """Fills ``blocks``; returns the factors of channels, ``[channels]``."""
    num_channels = len(blocks) * CHANNELS
    groups = blocks[:, places.first_group :].view(len(blocks), places.num_groups, -1)
    _write_codes(weight.codes, kind, groups)
    at = kind.code_bytes
    for numbers in (weight.inner_scales, weight.inner_minima):
        if numbers is not None:
            at = _write_inner(numbers, places.num_groups, groups, at)
    factors = weight.channel_scales
    if weight.scales is not None:
        scales, minima, powers = _as_halves(weight)
        outer = groups[..., at:]
        if places.first_group:
            outer = blocks[:, : places.first_group].view(len(blocks), -1, kind.outer_bytes)
        parts = [_by_channel(scales, num_channels).view(torch.uint8)]
        if minima is not None:
            parts.append(_by_channel(minima, num_channels).view(torch.uint8))
        if weight.zeros is not None:
            parts.append(_by_channel(weight.zeros, num_channels))
        outer.copy_(torch.cat(parts, 2))
        factors = powers if factors is None else factors * powers
    assert factors is not None, "weights have scales"
    return factors


def _write_codes(codes: torch.Tensor, kind: Format, groups: torch.Tensor) -> None:
    """``groups`` ``[blocks, groups, bytes of a group]``."""
    num_blocks, num_groups = groups.shape[:2]
    missing = (0, num_groups * GROUP - codes.shape[1], 0, num_blocks * CHANNELS - len(codes))
    if any(missing):
        codes = F.pad(codes, missing)
    # [blocks, groups, fours, halves of the channels, channels, four features]
    shaped = codes.view(num_blocks, 2, LANES, num_groups, FOURS, 4).permute(0, 3, 4, 1, 2, 5)
    if kind.bits == 8:
        groups[..., : kind.code_bytes].view(shaped.shape).copy_(shaped)
        return
    lowest = groups[..., : CHANNELS * GROUP // 2].view(num_blocks, num_groups, FOURS, LANES, 4)
    lowest.copy_(shaped[:, :, :, 1] & 15).bitwise_left_shift_(4)
    lowest.bitwise_or_(shaped[:, :, :, 0] & 15)
    num_bits = kind.bits - 4
    if num_bits:
        per_plane = 8 // num_bits
        high = (shaped >> 4).reshape(num_blocks, num_groups, -1, per_plane, 4 * LANES)
        shifts = num_bits * torch.arange(per_plane, dtype=torch.uint8)
        planes = (high << shifts[:, None]).sum(3, dtype=torch.uint8)
        groups[..., CHANNELS * GROUP // 2 : kind.code_bytes].view(planes.shape).copy_(planes)


def _write_inner(numbers: torch.Tensor, num_groups: int, groups: torch.Tensor, at: int) -> int:
    """Returns where the next ones go."""
    per_group = numbers.shape[1] // num_groups
    shaped = _by_channel(numbers.view(torch.uint8), len(groups) * CHANNELS)
    size = per_group * CHANNELS
    groups[..., at : at + size].copy_(shaped.view(len(groups), num_groups, size))
    return at + size


def _by_channel(numbers: torch.Tensor, num_channels: int) -> torch.Tensor:
    """``[channels, n]`` as ``[blocks, n, 32]``, with zeros where there are no channels."""
    filled = F.pad(numbers, (0, 0, 0, num_channels - len(numbers)))
    return filled.view(-1, CHANNELS, numbers.shape[1]).transpose(1, 2).contiguous()


def _as_halves(
    weight: GroupedWeight,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns scales and minima as float16, and the powers of two by which channels' are smaller. Raises
    UnpackableError where that would round them."""
    scales, minima = weight.scales, weight.minima
    assert scales is not None
    if scales.dtype == torch.float16 and (minima is None or minima.dtype == torch.float16):
        return scales, minima, torch.ones(len(scales))
    both = scales.float() if minima is None else torch.cat([scales, minima], 1).float()
    _, exponents = both.abs().amax(1).frexp()
    powers = torch.exp2((exponents - _LARGEST_EXPONENT).float())
    halves = (both / powers[:, None]).half()
    if not torch.equal(halves.float() * powers[:, None], both):
        raise UnpackableError("its scales have more digits than kernels hold")
    width = scales.shape[1]
    return halves[:, :width], None if minima is None else halves[:, width:], powers


def _filled_bias(bias: torch.Tensor, num_experts: int, num_channels: int) -> torch.Tensor:
    own = bias.detach().float().reshape(num_experts, -1)
    return F.pad(own, (0, num_channels - own.shape[1])).flatten()
