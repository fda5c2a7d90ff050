"""Rows times weights as floats, in one order of sums whatever the number of rows.

What a product of few rows costs is reading its weights once; of many, keeping the CPU's multipliers busy.
Weights are packed in blocks of 64 output channels, and in them the channels' first features, then the
next (of bf16 two at once), so that a block is read from front to back. A row's sums run over its features
in their order, in fp32, and are rounded once: its bits depend on nothing but the row and the weights.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

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
from engine.kernels.lanes import (
    add,
    argument,
    fetch_add,
    itemsize_of,
    load32,
    store,
    store_zeros,
)

_FEATURES_AT_ONCE = 256
"""Of a block: so much of it stays in the nearest cache while rows are multiplied with it."""
_ROWS_OF_AN_ITEM = 64
"""Rows that a thread takes on at a time: layers with few blocks are shared out by rows, too."""


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. HAS_PAIRS: bf16 is multiplied by pairs; BIAS
    ``[out_features]`` float32, or 0; PARTS float32, ``[threads, 64, 64]``."""

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


@njit
def _add_dots(
    p: int, count: int, rows: int, weights: int, num_features: int, sums: int
) -> None:
    kind, stride = argument(p, Arg.KIND), argument(p, Arg.ROW)
    if kind == BFLOAT16 and argument(p, Arg.HAS_PAIRS) != 0:
        dots_pairs(count, rows, stride, weights, num_features // 2, sums)
    elif kind == BFLOAT16:
        dots_bfloat16(count, rows, stride, weights, num_features // 2, sums)
    elif kind == FLOAT16:
        dots_float16(count, rows, stride, weights, num_features, sums)
    else:
        dots_float32(count, rows, stride, weights, num_features, sums)


@njit
def _add_block(p: int, first_row: int, num_rows: int, weights: int, sums: int) -> None:
    """So many rows' products with a block of channels: as many rows at once as there are registers
    for, evenly."""
    num_features, itemsize = argument(p, Arg.IN_FEATURES), itemsize_of(argument(p, Arg.KIND))
    rows = argument(p, Arg.ROWS) + first_row * argument(p, Arg.ROW)
    num_groups = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    for at in range(0, CHANNELS * num_rows, LANES):
        store_zeros(sums + 4 * at)
    for first in range(0, num_features, _FEATURES_AT_ONCE):
        for group in range(num_groups):
            row, end = num_rows * group // num_groups, num_rows * (group + 1) // num_groups
            _add_dots(
                p, end - row, rows + row * argument(p, Arg.ROW) + itemsize * first,
                weights + CHANNELS * itemsize * first,
                min(_FEATURES_AT_ONCE, num_features - first), sums + 4 * CHANNELS * row,
            )  # fmt: skip


@njit
def _finish(p: int, row: int, channel: int, sums: int) -> None:
    """Sums of a row and block, plus bias, are rounded."""
    kind, bias = argument(p, Arg.KIND), argument(p, Arg.BIAS)
    target = argument(p, Arg.OUTPUT) + itemsize_of(kind) * (
        row * argument(p, Arg.OUT_FEATURES) + channel
    )
    for at in range(0, CHANNELS, LANES):
        value = load32(sums + 4 * at)
        if bias != 0:
            value = add(value, load32(bias + 4 * (channel + at)))
        store(kind, target + itemsize_of(kind) * at, value)


def _multiply(p: int) -> None:
    num_rows, width = argument(p, Arg.NUM_ROWS), argument(p, Arg.OUT_FEATURES)
    worker = fetch_add(p + 8 * Arg.NUM_WORKERS, 1)
    sums = argument(p, Arg.PARTS) + 4 * CHANNELS * _ROWS_OF_AN_ITEM * worker
    num_blocks = (width + CHANNELS - 1) // CHANNELS
    num_parts = (num_rows + _ROWS_OF_AN_ITEM - 1) // _ROWS_OF_AN_ITEM
    block_bytes = CHANNELS * argument(p, Arg.IN_FEATURES) * itemsize_of(argument(p, Arg.KIND))
    while True:
        item = fetch_add(p + 8 * Arg.NEXT_ITEM, 1)
        if item >= num_blocks * num_parts:
            break
        block, part = item // num_parts, item % num_parts
        first, end = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
        _add_block(p, first, end - first, argument(p, Arg.WEIGHTS) + block * block_bytes, sums)
        # The last block ends with the last channel; those that the one before has, too, are equal.
        channel = min(CHANNELS * block, width - CHANNELS)
        for row in range(first, end):
            _finish(p, row, channel, sums + 4 * CHANNELS * (row - first))


multiply = Kernel(_multiply, len(Arg), is_long=True)
"""Rows times the weights: OUTPUT."""


class PackedFloats:
    """A weight ``[out_features, in_features]`` of a type in ``KINDS`` and a bias or None, to multiply
    rows of the same type with. ``weights`` ``[blocks, steps, 64, features of a step]``: a copy, packed.
    ``has_pairs``: bf16 by pairs; None: where there is the instruction."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, has_pairs: bool | None = None
    ) -> None:
        self.weights = _packed(weight)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._sizes = weight.shape[1], weight.shape[0], KINDS[weight.dtype]
        self._has_pairs = has_pair_products() if has_pairs is None else has_pairs

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``. Returns ``[num_rows, out_features]``."""
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        output = rows.new_empty(len(rows), self._sizes[1])
        num_threads = threads_for(self.weights.numel())
        parts = torch.empty(num_threads * CHANNELS * _ROWS_OF_AN_ITEM)
        told = array(
            "q",
            [
                *(0, 0, len(rows), *self._sizes, self._has_pairs),
                *(rows.data_ptr(), rows.stride(0) * rows.element_size(), self.weights.data_ptr()),
                *(0 if self._bias is None else self._bias.data_ptr(), parts.data_ptr()),
                output.data_ptr(),
            ],
        )
        multiply.run(told.buffer_info()[0], num_threads)
        return output


def _packed(weight: torch.Tensor) -> torch.Tensor:
    out_features, in_features = weight.shape
    together = 2 if weight.dtype == torch.bfloat16 else 1
    num_blocks = -(-out_features // CHANNELS)
    firsts = torch.arange(num_blocks).mul_(CHANNELS).clamp_(max=out_features - CHANNELS)
    channels = (firsts[:, None] + torch.arange(CHANNELS)).view(-1)
    blocks = weight.detach()[channels].view(num_blocks, CHANNELS, -1, together)
    return blocks.transpose(1, 2).contiguous()


def can_multiply(in_features: int, out_features: int, dtype: torch.dtype) -> bool:
    """Whether this machine and weights of these sizes are for this kernel."""
    is_whole = in_features % 2 == 0 or dtype != torch.bfloat16
    return dtype in KINDS and is_whole and out_features >= CHANNELS and has_wide_registers()
