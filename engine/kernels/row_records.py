"""Rows as they are multiplied with weights in few bits.

Of each group of features a row's record has its scale (float32), two sums and its values (int8). A
group's scale is its largest magnitude over 127, so that a value far above all others coarsens the steps
of its own group alone (real models have such outliers in some channels). Or rows keep their floats, as
float32. A gated row is one half of what a product left, after an activation, times the other half: what
the second product of a feed-forward network reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.records import Counter, Within
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.formats import GROUP, Format
from engine.kernels.integers import (
    HEADER_BYTES,
    LIFT,
    features_of_a_scale,
    larger_bits,
    largest_bits_of,
    store_int8,
)
from engine.kernels.records import Floats

SMALLEST_SCALE = np.float32(1e-12)
_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(127.0)


class Gate(NamedTuple):
    """``activation``: of ``v.ACTIVATIONS``; ``is_first``: it is for the first half of a row."""

    activation: str
    is_first: bool


class Rows(NamedTuple):
    """``floats`` ``[num_rows, num_features]``, ``stride`` features apart. If there is an ``activation``
    (0: none) they are the halves that it is for, the other halves are ``other`` features further, and
    what is gated is written to ``gated`` ``[num_rows, num_features]``."""

    floats: Floats
    gated: Floats
    num_rows: int
    num_features: int
    stride: int
    activation: int
    other: int


def rows_of(rows: torch.Tensor, gate: Gate | None) -> Rows:
    """``rows`` ``[num_rows, num_features]``, or twice as many that ``gate`` halves."""
    (num_rows, width), stride = rows.shape, rows.stride(0)
    if gate is None:
        return Rows(rows, rows, num_rows, width, stride, activation=0, other=0)
    half, activation = width // 2, v.ACTIVATIONS[gate.activation]
    gated, other = rows.new_empty(num_rows, half), half if gate.is_first else -half
    floats = rows if gate.is_first else rows[:, half:]
    return Rows(floats, gated, num_rows, half, stride, activation, other)


class Form(NamedTuple):
    """How rows are written to be multiplied: in ``size`` bytes each, ``num_units`` equal parts.
    ``group``: features that share a scale in a row, 0: rows keep their floats; ``zero``: of the weights'
    format; ``lift``: as ``integers`` has it, or 0; ``has_halves``: whether halves of groups are summed
    apart."""

    size: int
    num_units: int
    group: int
    zero: int
    lift: int
    has_halves: bool


@cache
def form_of(kind: Format, num_groups: int, keeps_inputs: bool) -> tuple[Format, Form]:
    """Returns also the format that rows are multiplied with."""
    group, size, num_units = GROUP, num_groups * (HEADER_BYTES + GROUP), num_groups
    if keeps_inputs:
        kind, group, size = kind._replace(inputs="float32"), 0, 4 * num_groups * GROUP
    elif not kind.has_scales:
        group, size, num_units = num_groups * GROUP, HEADER_BYTES + num_groups * GROUP, 1
    lift = LIFT if kind.has_scales else 0
    return kind, Form(size, num_units, group, kind.zero, lift, kind.num_parts == 2)


_room_for_scales = v.room_for(2 * LANES)


@njit
def quantize_row(
    blocks: Any, form: Form, row: Any, begin: int, end: int, record: Any, step: int
) -> None:
    """Writes what the record of a row has of some features, a multiple of 16 from the beginning of a
    group on, groups ``step`` bytes apart; a last group is filled with 0. Scales of sixteen groups are
    divided at once. ``blocks``: the weights, by whose format code is compiled."""
    scales = _room_for_scales()
    group = features_of_a_scale(blocks, form.group)
    for start in range(begin, end, LANES * group):
        firsts = range(start, min(start + LANES * group, end), group)
        for number, first in enumerate(firsts):
            scales[number] = _largest(row, first, group, end)
        # Of a pair with what is no number, the second is taken.
        scale = v.larger(v.splat(SMALLEST_SCALE), v.load(scales, 0) / v.splat(_LARGEST))
        v.store(scales, 0, scale)
        v.store(scales, LANES, v.splat(_ONE) / scale)
        for number, first in enumerate(firsts):
            v.float32s(record)[0] = scales[number]
            _quantize_group(form, row, first, group, end, record, scales[LANES + number])
            record = record + step


@njit
def _pair(row: Any, at: int, end: int) -> tuple[Any, Any]:
    """Returns 32 features; those that are not before the ``end`` are 0."""
    return v.load(row, at), v.load(row, at + LANES) if at + LANES < end else v.splat(_ZERO)


@njit
def _largest(row: Any, first: int, group: int, end: int) -> Any:
    most = v.splat(_ZERO)
    for at in range(0, group, GROUP):
        one, other = _pair(row, first + at, end)
        most = larger_bits(larger_bits(v.magnitude(one), v.magnitude(other)), most)
    return largest_bits_of(most)


@njit
def _quantize_group(
    form: Form, row: Any, first: int, group: int, end: int, record: Any, by: Any
) -> None:
    """Writes what a record has of a group but its scale."""
    half, rest, lift, zero = 0, 0, form.lift, form.zero
    for at in range(0, group, GROUP):
        one, other = _pair(row, first + at, end)
        half += store_int8(record + (HEADER_BYTES + at), one * v.splat(by))
        rest += store_int8(record + (HEADER_BYTES + at + LANES), other * v.splat(by))
    v.float32s(record)[1] = half + rest
    if form.has_halves:
        v.int32s(record)[2] = lift - zero * half
        v.int32s(record)[3] = lift - zero * rest
    else:
        v.int32s(record)[2] = lift - zero * (half + rest)


@njit
def widen_row(row: Any, begin: int, end: int, record: Any, step: int) -> None:
    """Writes the same features of a row as float32."""
    for first in range(begin, end, GROUP):
        target = v.float32s(record)
        for at in range(0, GROUP, LANES):
            is_there = first + at < end
            v.store(target, at, v.load(row, first + at) if is_there else v.splat(_ZERO))
        record = record + step


@njit
def gated_or_plain(rows: Rows, row: int, begin: int, end: int) -> Any:
    """Returns where the row is whose features ``begin`` .. ``end - 1`` are to be quantised: in ``gated``,
    once they are gated, or where it was."""
    source = rows.floats + row * rows.stride
    if rows.activation == 0:
        return source
    target, other = rows.gated + row * rows.num_features, source + rows.other
    for at in range(begin, end, LANES):
        value = v.activated(rows.activation, v.load(source, at))
        v.store(target, at, v.rounded(source, value) * v.load(other, at))
    return target


class GateArguments(NamedTuple):
    rows: Within[Rows]
    next_row: Counter = 0


def _gate(a: GateArguments) -> None:
    for row in v.shared(a.next_row, a.rows.num_rows):
        gated_or_plain(a.rows, row, 0, a.rows.num_features)


gate_all = Kernel(_gate)
"""Gates each row."""


def gate_rows(rows: torch.Tensor, how: Gate) -> torch.Tensor:
    """``rows`` ``[num_rows, 2 * num_features]``, of a type in ``KINDS``; features a multiple of 16, which
    lie together. Returns ``[num_rows, num_features]``, of the same type."""
    told = rows_of(rows, how)
    gate_all.run(GateArguments(told), threads_for(rows.numel()))
    return told.gated
