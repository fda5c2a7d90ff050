"""Rows of packed weights: what an embedding looks up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.records import Bytes, Counter, Int64s, Within
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.formats import CHANNELS, GROUP, Places
from engine.kernels.integers import half_at, multiply_add
from engine.kernels.packing import PackedGroups
from engine.kernels.records import NOWHERE, Float32s, Floats

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Arguments(NamedTuple):
    """``ids`` ``[num_rows]``: output channels, whose weights become rows of ``output`` ``[num_rows,
    num_groups * 32]``. Weights as those of a product (``grouped_product``), of ``bits`` bits with
    ``zero``, ``table`` (or NOWHERE), ``inner``, ``has_minima``, ``has_zeros`` and ``has_scales`` of their
    ``Format``."""

    places: Within[Places]
    output: Floats
    ids: Int64s
    weights: Bytes
    table: Bytes
    scales: Float32s
    num_rows: int
    bits: int
    zero: int
    inner: int
    has_minima: bool
    has_zeros: bool
    has_scales: bool
    block: int
    next_row: Counter = 0


@njit
def _code(a: Any, group: Any, lane: int, half: int, feature: int) -> int:
    """Returns the code of a feature of the channel ``lane`` of sixteen."""
    four, place = feature // 4, 4 * lane + feature % 4
    if a.bits == 8:
        return int(group[64 * (2 * four + half) + place])
    code = (int(group[64 * four + place]) >> (4 * half)) & 15
    high = a.bits - 4
    if high > 0:
        index, per_plane = 2 * four + half, 8 // high
        plane = group[64 * (8 + index // per_plane) + place]
        code += ((int(plane) >> (high * (index % per_plane))) & ((1 << high) - 1)) << 4
    return code if v.is_none(a.table) else int(a.table[code])


@njit
def _steps(a: Any, group: Any, outer: Any, channel: int, part: int) -> tuple[Any, Any, Any]:
    """Returns scale, minimum and zero of a channel in a part of a group."""
    if not a.has_scales:
        return _ONE, _ZERO, a.zero
    scale = half_at(outer + 2 * channel)
    least, zero = _ZERO, a.zero
    if a.has_minima:
        least = half_at(outer + (64 + 2 * channel))
    if a.has_zeros:
        zero += int(outer[64 + channel])
    if a.inner:
        numbers = group + 128 * a.bits
        number = int(numbers[32 * part + channel])
        if not a.has_minima and number > 127:
            number -= 256
        scale = scale * np.float32(number)
        if a.has_minima:
            least = least * np.float32(int(numbers[32 * (GROUP // a.inner) + channel]))
    return scale, least, zero


_room_for_group = v.room_for(GROUP)


def _look_up(a: Arguments) -> None:
    room, places = _room_for_group(), a.places
    for row in v.shared(a.next_row, a.num_rows):
        token = a.ids[row]
        channel = token % CHANNELS
        block = a.weights + (token // CHANNELS) * a.block
        by = v.splat(a.scales[token])
        for index in range(places.num_groups):
            group = block + (places.first_group + index * places.group_stride)
            number = index >> places.outer_shift
            outer = block + (places.first_outer + number * places.outer_stride)
            for feature in range(GROUP):
                part = feature // a.inner if a.inner else 0
                scale, least, zero = _steps(a, group, outer, channel, part)
                code = _code(a, group, channel % LANES, channel // LANES, feature)
                room[feature] = multiply_add(np.float32(code - zero), scale, least)
            for at in range(0, GROUP, LANES):
                target = row * places.num_groups * GROUP + index * GROUP + at
                v.store(a.output, target, v.load(room, at) * by)


look_up_all = Kernel(_look_up)
"""Writes the weights of some channels."""


def look_up(packed: PackedGroups, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``ids`` int64, each below ``out_features``. Returns their weights ``[.., in_features]``."""
    flat = ids.reshape(-1)
    kind, places = packed.format, packed.places
    output = torch.empty(len(flat), places.num_groups * GROUP, dtype=dtype)
    table = torch.tensor(kind.table, dtype=torch.uint8) if kind.table else NOWHERE
    told = Arguments(
        places, output, flat, packed.blocks, table, packed.scales, len(flat), kind.bits, kind.zero,
        kind.inner, kind.offset == "minima", kind.offset == "zeros", kind.has_scales,
        packed.blocks.shape[1],
    )  # fmt: skip
    look_up_all.run(told, threads_for(output.numel()))
    return output[:, : packed.in_features].view(*ids.shape, packed.in_features)
