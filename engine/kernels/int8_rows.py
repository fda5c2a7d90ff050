"""Rows in 8 bits, as integer products read them: quantised by groups of features as they are, or gated
first.

A group's scale is its largest magnitude over 127, so that a value far above all others coarsens the steps
of its own group alone (real models have such outliers in some channels). A row is written as one record:
of each group its scale (float32), its correction (int32) and its values (int8). A gated row is one half
of what a product left, after an activation, times the other half: what the second product of a
feed-forward network reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.compiled import Loop, threads_for
from engine.kernels.integers import HEADER_BYTES, larger_bits, largest_bits_of, store_int8, to_whole
from engine.kernels.records import NOWHERE, Bytes, Counter, Floats

ZERO_POINT = 128
"""What is added to weights in 8 bits, for an instruction that multiplies unsigned by signed bytes."""
_SMALLEST_SCALE = np.float32(1e-12)


class Quantized(NamedTuple):
    """``values`` ``[rows, groups, group]`` whole numbers; ``scales`` and ``corrections``, which is what
    weights that are stored with 128 added make too much, ``[rows, groups]``."""

    values: torch.Tensor
    scales: torch.Tensor
    corrections: torch.Tensor


def reference(rows: torch.Tensor, group: int) -> Quantized:
    """Returns what the records of ``rows`` ``[rows, num_features]`` hold."""
    groups = F.pad(rows.float(), (0, -rows.shape[1] % group)).unflatten(1, (-1, group))
    scales = (groups.abs().amax(2) / 127).clamp_min(float(_SMALLEST_SCALE))
    values = (groups * (1 / scales)[:, :, None]).round()
    return Quantized(values, scales, (-ZERO_POINT * values.sum(2)).to(torch.int32))


def read_records(records: torch.Tensor, group: int) -> Quantized:
    """Returns what ``records`` ``[rows, record_bytes]`` hold."""
    parts = records.unflatten(1, (-1, HEADER_BYTES + group))
    header, values = parts[..., :HEADER_BYTES].contiguous(), parts[..., HEADER_BYTES:].contiguous()
    scales, corrections = header.view(torch.float32)[..., 0], header.view(torch.int32)[..., 1]
    return Quantized(values.view(torch.int8).float(), scales, corrections)


SILU, GELU_TANH = 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
_ZERO, _ONE, _LARGEST = np.float32(0.0), np.float32(1.0), np.float32(127.0)


class Gate(NamedTuple):
    """``activation``: of ``ACTIVATIONS``; ``is_first``: it is for the first half of a row."""

    activation: str
    is_first: bool


class Arguments(NamedTuple):
    """``rows`` ``[num_rows, num_features]``, ``row`` features apart; where ``activation`` is not 0, the
    halves that it is for, with the other halves ``other`` features further and room in ``gated``;
    ``group``: features of a group."""

    rows: Floats
    gated: Floats
    records: Bytes
    num_rows: int
    num_features: int
    row: int
    activation: int
    other: int
    group: int
    next_row: Counter = 0


def record_bytes(num_features: int, group: int) -> int:
    """Of a row whose last group is filled up with zeros."""
    return (num_features + group - 1) // group * (HEADER_BYTES + group)


_record_bytes = njit(record_bytes)


@njit
def quantize_row(row: Any, num_features: int, group: int, record: Any) -> None:
    """``num_features`` floats, a multiple of 16, become a record."""
    for first in range(0, num_features, group):
        end = min(first + group, num_features)
        most = v.splat(_ZERO)
        for at in range(first, end, LANES):
            most = larger_bits(v.magnitude(v.load(row, at)), most)
        scale = largest_bits_of(most) / _LARGEST
        if scale < _SMALLEST_SCALE:  # which what is no number is not
            scale = _SMALLEST_SCALE
        by, total = v.splat(_ONE / scale), v.splat(_ZERO)
        values = record + HEADER_BYTES
        for at in range(first, end, LANES):
            value = to_whole(v.load(row, at) * by)
            total = total + value
            store_int8(values + (at - first), value)
        for at in range(end, first + group, LANES):
            store_int8(values + (at - first), v.splat(_ZERO))
        v.float32s(record)[0] = scale
        v.int32s(record)[1] = -ZERO_POINT * int(v.sum_of(total))
        record = values + group


@njit
def gated_or_plain(a: Any, row: int) -> Any:
    """Where the row is that is to be quantised: in ``a.gated``, once it is gated, or where it was."""
    source = a.rows + row * a.row
    if a.activation == 0:
        return source
    target, other = a.gated + row * a.num_features, source + a.other
    for at in range(0, a.num_features, LANES):
        value = v.load(source, at)
        value = v.silu(value) if a.activation == SILU else v.gelu_tanh(value)
        v.store(target, at, v.rounded(source, value) * v.load(other, at))
    return target


def _gate(a: Arguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        gated_or_plain(a, row)


def _quantize(a: Arguments) -> None:
    size = _record_bytes(a.num_features, a.group)
    for row in v.shared(a.next_row, a.num_rows):
        quantize_row(gated_or_plain(a, row), a.num_features, a.group, a.records + row * size)


quantize = Loop(_quantize, Arguments)
"""Writes the record of each row."""
gate_all = Loop(_gate, Arguments)
"""Gates each row."""


def gate_rows(rows: torch.Tensor, how: Gate) -> torch.Tensor:
    """``rows`` ``[num_rows, 2 * num_features]``, of a type in ``KINDS``; features a multiple of 16, which
    lie together. Returns ``[num_rows, num_features]``, of the same type."""
    gated = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
    first, activation, other = gating_of(rows, how)
    sizes = gated.shape[0], gated.shape[1], rows.stride(0)
    arguments = Arguments(first, gated, NOWHERE, *sizes, activation, other, group=0)
    gate_all.run(arguments, threads_for(rows.numel()))
    return gated


def quantize_rows(rows: torch.Tensor, group: int, gate: Gate | None = None) -> torch.Tensor:
    """``rows`` ``[num_rows, num_features]``, of a type in ``KINDS``; features lie together, and are a
    multiple of 16; ``group`` is one of 32. Of gated rows there are twice as many. Returns records
    ``[num_rows, record_bytes]`` uint8."""
    num_rows, num_features = rows.shape[0], rows.shape[1] // (2 if gate else 1)
    records = torch.empty((num_rows, record_bytes(num_features, group)), dtype=torch.uint8)
    first, activation, other = gating_of(rows, gate)
    gated = torch.empty((num_rows, num_features), dtype=rows.dtype) if gate else rows
    sizes = num_rows, num_features, rows.stride(0)
    arguments = Arguments(first, gated, records, *sizes, activation, other, group)
    quantize.run(arguments, threads_for(rows.numel()))
    return records


def gating_of(rows: torch.Tensor, gate: Gate | None) -> tuple[torch.Tensor, int, int]:
    """Returns ``rows``, ``activation`` and ``other`` as a kernel is told them. ``rows`` ``[num_rows,
    num_features]``, or twice as many that ``gate`` halves."""
    if gate is None:
        return rows, 0, 0
    half, activation = rows.shape[1] // 2, ACTIVATIONS[gate.activation]
    if gate.is_first:
        return rows, activation, half
    return rows[:, half:], activation, -half
