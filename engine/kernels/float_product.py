"""Rows times weights as floats, in one order of sums whatever the number of rows.

What a product of few rows costs is reading its weights once; of many, keeping the CPU's multipliers busy.
Weights are packed in blocks of 64 output channels, and in them the channels' first features, then the
next (of bf16 two at once), so that a block is read from front to back. A row's sums run over its features
in their order, in fp32, and are rounded once: its bits depend on nothing but the row and the weights.

Of a gated feed-forward network the first two products are one, whose blocks have 32 channels of each:
activation and product of the two are done where the sums are rounded.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Any

import torch
from numba import njit

from engine.kernels import BFLOAT16, FLOAT16, KINDS, LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.float_dots import (
    CHANNELS,
    ROWS_AT_ONCE,
    dots_bfloat16,
    dots_float16,
    dots_float32,
    dots_pairs,
    has_pair_products,
    has_wide_registers,
)
from engine.kernels.int8_rows import ACTIVATIONS, SILU
from engine.kernels.lanes import (
    add,
    argument,
    fetch_add,
    gelu_tanh,
    itemsize_of,
    load32,
    mul,
    read_shared,
    rounded,
    silu,
    store,
    store_zeros,
)

_FEATURES_AT_ONCE = 256
"""Of a block: so much of it stays in the nearest cache while rows are multiplied with it."""
_LINE, _LINES_OF_A_STEP = 64, 4
_ROWS_OF_AN_ITEM = 64
"""Rows that a thread takes on at a time: layers with few blocks are shared out by rows, too."""


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. HAS_PAIRS: bf16 is multiplied by pairs; BLOCKS: how many,
    of which each has WIDTH channels of the output; BIAS float32 as blocks have their channels, or 0;
    PARTS float32, ``[threads, 64, 64]``; ACTIVATION: of the first half of a block, which its second half
    is multiplied with, or 0."""

    NEXT_ITEM = 0
    NUM_WORKERS = 1
    NUM_ROWS = 2
    IN_FEATURES = 3
    OUT_FEATURES = 4
    KIND = 5
    HAS_PAIRS = 6
    ROWS = 7
    ROW = 8
    WEIGHTS = 9
    BIAS = 10
    PARTS = 11
    OUTPUT = 12
    ACTIVATION = 13
    BLOCKS = 14
    WIDTH = 15


@njit
def _add_dots(
    p: int, count: int, rows: int, weights: int, num_features: int, sums: int, ahead: int
) -> None:
    kind, stride = argument(p, Arg.KIND), argument(p, Arg.ROW)
    if kind == BFLOAT16 and argument(p, Arg.HAS_PAIRS) != 0:
        dots_pairs(count, rows, stride, weights, num_features // 2, sums, ahead)
    elif kind == BFLOAT16:
        dots_bfloat16(count, rows, stride, weights, num_features // 2, sums, ahead)
    elif kind == FLOAT16:
        dots_float16(count, rows, stride, weights, num_features, sums, ahead)
    else:
        dots_float32(count, rows, stride, weights, num_features, sums, ahead)


@njit
def _add_block(
    p: int, first_row: int, num_rows: int, weights: int, following: int, sums: int
) -> None:
    """So many rows' products with a block of channels: as many rows at once as there are registers
    for, evenly. While they are multiplied with a part of the block the next part is fetched, or the
    first one of the block that is ``following``, in the first passes: a line of four in each step."""
    num_features, itemsize = argument(p, Arg.IN_FEATURES), itemsize_of(argument(p, Arg.KIND))
    rows = argument(p, Arg.ROWS) + first_row * argument(p, Arg.ROW)
    num_groups = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    for at in range(0, CHANNELS * num_rows, LANES):
        store_zeros(sums + 4 * at)
    for first in range(0, num_features, _FEATURES_AT_ONCE):
        last = first + _FEATURES_AT_ONCE
        ahead = weights + CHANNELS * itemsize * last if last < num_features else following
        here = weights + CHANNELS * itemsize * first
        for group in range(num_groups):
            lines = ahead + _LINE * group if group < _LINES_OF_A_STEP else here
            row, end = num_rows * group // num_groups, num_rows * (group + 1) // num_groups
            _add_dots(
                p, end - row, rows + row * argument(p, Arg.ROW) + itemsize * first,
                here, min(_FEATURES_AT_ONCE, num_features - first), sums + 4 * CHANNELS * row, lines,
            )  # fmt: skip


@njit
def _sum_at(kind: int, sums: int, bias: int, at: int) -> Any:
    value = load32(sums + 4 * at)
    return rounded(kind, value if bias == 0 else add(value, load32(bias + 4 * at)))


@njit
def _finish(p: int, sums: int, bias: int, target: int) -> None:
    """Sums of a row and block, plus bias, are rounded; of gated ones the activation is, too."""
    kind, activation = argument(p, Arg.KIND), argument(p, Arg.ACTIVATION)
    for at in range(0, argument(p, Arg.WIDTH), LANES):
        value = _sum_at(kind, sums, bias, at)
        if activation != 0:
            value = rounded(kind, silu(value) if activation == SILU else gelu_tanh(value))
            value = mul(value, _sum_at(kind, sums, bias, at + CHANNELS // 2))
        store(kind, target + itemsize_of(kind) * at, value)


@njit
def _finish_block(p: int, block: int, first: int, end: int, sums: int) -> None:
    """Of rows from ``first`` to before ``end``. The last block ends with the last channel; those that
    the one before has, too, are equal."""
    out_features, width = argument(p, Arg.OUT_FEATURES), argument(p, Arg.WIDTH)
    channel, bias = min(width * block, out_features - width), argument(p, Arg.BIAS)
    if bias != 0:
        bias += 4 * CHANNELS * block
    for row in range(first, end):
        at = itemsize_of(argument(p, Arg.KIND)) * (row * out_features + channel)
        _finish(p, sums + 4 * CHANNELS * (row - first), bias, argument(p, Arg.OUTPUT) + at)


def _multiply(p: int) -> None:
    num_rows, num_blocks = argument(p, Arg.NUM_ROWS), argument(p, Arg.BLOCKS)
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    sums = argument(p, Arg.PARTS) + 4 * CHANNELS * _ROWS_OF_AN_ITEM * worker
    num_parts = (num_rows + _ROWS_OF_AN_ITEM - 1) // _ROWS_OF_AN_ITEM
    block_bytes = CHANNELS * argument(p, Arg.IN_FEATURES) * itemsize_of(argument(p, Arg.KIND))
    while True:
        item = fetch_add(p + 8 * Arg.NEXT_ITEM, 1)
        if item >= num_blocks * num_parts:
            break
        block, part = item // num_parts, item % num_parts
        first, end = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
        # Where all threads are as fast, the one that this one takes next.
        following = (item + read_shared(p + 8 * Arg.NUM_WORKERS)) // num_parts
        weights = argument(p, Arg.WEIGHTS) + block * block_bytes
        step = (following - block) * block_bytes if following < num_blocks else 0
        _add_block(p, first, end - first, weights, weights + step, sums)
        _finish_block(p, block, first, end, sums)


multiply = Kernel(_multiply, len(Arg), is_long=True)
"""Rows times the weights: OUTPUT."""


class PackedFloats:
    """Weights of a type in ``KINDS``, packed, to multiply rows of that type with. ``weights`` ``[blocks,
    steps, 64, features of a step]``; ``bias`` ``[blocks, 64]`` float32, or None; ``activation``: of a
    gated product, which makes half as many channels, or 0. ``has_pairs``: bf16 is multiplied by pairs."""

    def __init__(
        self,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        out_features: int,
        activation: int = 0,
        has_pairs: bool | None = None,
    ) -> None:
        self.weights, self.bias = weights, bias
        self.in_features, self.out_features = weights.shape[1] * weights.shape[3], out_features
        self._has_pairs = has_pair_products() if has_pairs is None else has_pairs
        width = CHANNELS // 2 if activation else CHANNELS
        bias_at = 0 if bias is None else bias.data_ptr()
        self._sizes = self.in_features, out_features, KINDS[weights.dtype], self._has_pairs
        self._where = weights.data_ptr(), bias_at
        self._how = activation, weights.shape[0], width

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``. Returns ``[num_rows, out_features]``."""
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        output = rows.new_empty(len(rows), self.out_features)
        num_threads = threads_for(self.weights.numel())
        parts = torch.empty(num_threads * CHANNELS * _ROWS_OF_AN_ITEM)
        told = array(
            "q",
            [
                *(0, 0, len(rows), *self._sizes),
                *(rows.data_ptr(), rows.stride(0) * rows.element_size(), *self._where),
                *(parts.data_ptr(), output.data_ptr(), *self._how),
            ],
        )
        multiply.run(told.buffer_info()[0], num_threads)
        return output


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, has_pairs: bool | None = None
) -> PackedFloats:
    """``weight`` ``[out_features, in_features]``, which ``can_multiply`` takes; ``bias``
    ``[out_features]``. ``has_pairs``: None: where there is the instruction."""
    out_features = weight.shape[0]
    together = 2 if weight.dtype == torch.bfloat16 else 1
    num_blocks = -(-out_features // CHANNELS)
    firsts = torch.arange(num_blocks).mul_(CHANNELS).clamp_(max=out_features - CHANNELS)
    channels = firsts[:, None] + torch.arange(CHANNELS)
    blocks = weight.detach()[channels].view(num_blocks, CHANNELS, -1, together)
    biases = None if bias is None else bias.detach().float()[channels]
    return PackedFloats(
        blocks.transpose(1, 2).contiguous(), biases, out_features, has_pairs=has_pairs
    )


def pack_gated(first: PackedFloats, second: PackedFloats, activation: str) -> PackedFloats:
    """What multiplies rows with both, and returns the activation (of ``ACTIVATIONS``) of the first
    product times the second. Both have the same sizes and type, which ``can_gate`` takes."""
    weights = torch.cat([_halves(each.weights, 2) for each in (first, second)], 2)
    bias = None
    if first.bias is not None and second.bias is not None:
        bias = torch.cat([_halves(each, 1) for each in (first.bias, second.bias)], 1)
    return PackedFloats(weights, bias, first.out_features, ACTIVATIONS[activation])


def _halves(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """Blocks of 64 channels, which are at ``dim``, become twice as many of 32."""
    return torch.stack(blocks.chunk(2, dim), 1).flatten(0, 1)


def can_gate(first: PackedFloats, second: PackedFloats) -> bool:
    """Whether the two can be one gated product."""
    return (
        first.weights.shape == second.weights.shape
        and first.weights.dtype == second.weights.dtype
        and first.out_features == second.out_features
        and first.out_features % CHANNELS == 0
        and (first.bias is None) == (second.bias is None)
    )


def can_multiply(in_features: int, out_features: int, dtype: torch.dtype) -> bool:
    """Whether this machine and weights of these sizes are for this kernel."""
    is_whole = in_features % 2 == 0 or dtype != torch.bfloat16
    return dtype in KINDS and is_whole and out_features >= CHANNELS and has_wide_registers()
