"""Rows times weights as floats, in one order of sums whatever the number of rows.

What a product of few rows costs is reading its weights once; of many, keeping the CPU's multipliers busy.
Weights are packed in blocks of 64 output channels, and in them the channels' first features, then the
next (of bf16 two at once), so that a block is read from front to back. A row's sums run over its features
in their order, in fp32, and are rounded once: its bits depend on nothing but the row and the weights.

Of a gated feed-forward network the first two products are one, whose blocks have 32 channels of each:
activation and product of the two are done where the sums are rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.records import Counter, Int64s
from engine.kernels import KINDS, LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.float_dots import CHANNELS, add_dots, add_pairs, has_pair_products
from engine.kernels.instructions import ROWS_AT_ONCE, has_wide_registers
from engine.kernels.records import NOWHERE, Float32s, Floats
from engine.kernels.routes import MOST_PAIRS, SEGMENT_INTS, Routes


def reference(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns ``rows`` ``[num_rows, in_features]`` times ``weight`` ``[out_features, in_features]``, not
    by pairs: one fma after another, the bias, and one rounding to the rows' type."""
    sums = torch.zeros(len(rows), len(weight))
    for feature in range(rows.shape[1]):
        sums = v.fma_of_tensors(
            rows[:, feature, None].float(), weight[None, :, feature].float(), sums
        )
    return (sums if bias is None else sums + bias.float()).to(rows.dtype)


_ZERO = np.float32(0.0)
_FEATURES_AT_ONCE = 256
"""The part of a block that stays in the nearest cache while rows are multiplied with it."""
_LINES_OF_A_STEP = 4
_ROWS_OF_AN_ITEM = 64
"""Rows that a thread takes on at a time: layers with few blocks are shared out by rows, too."""


class Arguments(NamedTuple):
    """``rows`` ``[num_rows, in_features]``, ``row`` features apart; ``weights`` ``[num_blocks,
    in_features, 64]``, of which each block has ``width`` channels of ``output``; ``bias`` as blocks have
    their channels, or NOWHERE; ``activation``: of the first half of a block, which its second half is
    multiplied with, or 0; ``has_pairs``: bf16 is multiplied by pairs.

    Weights of experts are ``num_blocks`` for each, one after another. ``segments`` say which rows each is
    multiplied with, and ``order`` which row of ``output`` they become, as ``routes`` writes them; or
    NOWHERE."""

    rows: Floats
    output: Floats
    weights: Floats
    bias: Float32s
    segments: Int64s
    order: Int64s
    num_rows: int
    row: int
    in_features: int
    out_features: int
    num_blocks: int
    width: int
    activation: int
    has_pairs: bool
    next_item: Counter = 0
    num_workers: Counter = 0


_room_for_sums = v.room_for(max(_ROWS_OF_AN_ITEM, MOST_PAIRS) * CHANNELS)


@njit
def _add_dots(
    has_pairs: bool, rows: Any, num_rows: int, row: int, num_features: int,
    weights: Any, ahead: Any, sums: Any,
) -> None:  # fmt: skip
    """Is a function of its own, in whose loops addresses have registers, too."""
    if has_pairs:
        add_pairs(rows, num_rows, row, num_features, weights, ahead, sums)
    else:
        add_dots(rows, num_rows, row, num_features, weights, ahead, sums)


@njit
def _add_block(
    a: Arguments, first_row: int, num_rows: int, weights: Any, following: Any, sums: Any
) -> None:
    """So many rows' products with a block of channels: as many rows at once as there are registers
    for, evenly. While they are multiplied with a part of the block the next part is fetched, or the
    first one of the block that is ``following``, in the first passes: a line of four in each step."""
    for at in range(0, CHANNELS * num_rows, LANES):
        v.store(sums, at, v.splat(_ZERO))
    num_groups = (num_rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    for first in range(0, a.in_features, _FEATURES_AT_ONCE):
        last = first + _FEATURES_AT_ONCE
        here, num_features = weights + CHANNELS * first, min(last, a.in_features) - first
        ahead = weights + CHANNELS * last if last < a.in_features else following
        for group in range(num_groups):
            lines = ahead + group * v.line_length(ahead) if group < _LINES_OF_A_STEP else here
            row, end = v.share_of(num_rows, num_groups, group)
            rows, mine = a.rows + (first_row + row) * a.row + first, sums + CHANNELS * row
            _add_dots(a.has_pairs, rows, end - row, a.row, num_features, here, lines, mine)


@njit
def _finish(a: Arguments, sums: Any, bias: Any, target: Any) -> None:
    """Sums of a row and block, plus bias, are rounded; of gated ones the activation is, too."""
    for at in range(0, a.width, LANES):
        value = _rounded_sum(sums, bias, at, target)
        if a.activation != 0:
            value = v.activated(a.activation, value)
            other = _rounded_sum(sums, bias, at + CHANNELS // 2, target)
            value = v.rounded(target, value) * other
        v.store(target, at, value)


@njit
def _rounded_sum(sums: Any, bias: Any, at: int, target: Any) -> Any:
    value = v.load(sums, at)
    return v.rounded(target, value if v.is_none(bias) else value + v.load(bias, at))


@njit
def _finish_block(a: Arguments, block: int, first: int, end: int, sums: Any) -> None:
    """Writes rows from ``first`` to before ``end``. The last block ends with the last channel; channels
    that the one before has, too, are equal."""
    channel = min(a.width * (block % a.num_blocks), a.out_features - a.width)
    bias = a.bias if v.is_none(a.bias) else a.bias + CHANNELS * block
    for row in range(first, end):
        which = row if v.is_none(a.order) else a.order[row]
        target = a.output + (which * a.out_features + channel)
        _finish(a, sums + CHANNELS * (row - first), bias, target)


@njit
def _item(a: Arguments, item: int, num_parts: int) -> tuple[int, int, int]:
    """Returns a block and the rows that it is multiplied with."""
    if v.is_none(a.segments):
        first, end = v.share_of(a.num_rows, num_parts, item % num_parts)
        return item // num_parts, first, end
    segment = a.segments + (1 + SEGMENT_INTS * (item // a.num_blocks))
    return segment[0] * a.num_blocks + item % a.num_blocks, segment[1], segment[2]


def _multiply(a: Arguments) -> None:
    v.fetch_add(a.num_workers, 1)
    sums = _room_for_sums()
    num_parts = (a.num_rows + _ROWS_OF_AN_ITEM - 1) // _ROWS_OF_AN_ITEM
    if not v.is_none(a.segments):
        num_parts = a.segments[0]
    for item in v.shared(a.next_item, a.num_blocks * num_parts):
        block, first, end = _item(a, item, num_parts)
        # Where all threads are as fast, the one that this one takes next.
        ahead, following = item + v.read_shared(a.num_workers), block
        if ahead < a.num_blocks * num_parts:
            following = _item(a, ahead, num_parts)[0]
        size = CHANNELS * a.in_features
        _add_block(
            a, first, end - first, a.weights + block * size, a.weights + following * size, sums
        )
        _finish_block(a, block, first, end, sums)


multiply = Kernel(_multiply, is_long=True)
"""Writes rows times the weights."""


class PackedFloats:
    """Weights of a type in ``KINDS``, packed, to multiply rows of that type with: of one matrix, or of
    each of ``num_experts``. ``weights`` ``[blocks, steps, 64, features of a step]``; ``bias`` ``[blocks,
    64]`` float32, or None; ``activation``: of a gated product, which makes half as many channels, or 0.
    ``has_pairs``: bf16 is multiplied by pairs."""

    def __init__(
        self,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        out_features: int,
        activation: int = 0,
        has_pairs: bool | None = None,
        num_experts: int = 1,
    ) -> None:
        self.weights, self.bias, self.num_experts = weights, bias, num_experts
        self.in_features, self.out_features = weights.shape[1] * weights.shape[3], out_features
        can_pair = weights.dtype == torch.bfloat16
        has_pairs = can_pair and (has_pair_products() if has_pairs is None else has_pairs)
        width = CHANNELS // 2 if activation else CHANNELS
        self._where = weights, NOWHERE if bias is None else bias
        self._sizes = self.in_features, out_features, weights.shape[0] // num_experts, width
        self._how = activation, has_pairs

    @property
    def weight(self) -> torch.Tensor:
        """Returns ``[out_features, in_features]`` again. Not of a gated product."""
        plain = self.weights.new_empty(self.out_features, self.in_features)
        rows = self.weights.transpose(1, 2).reshape(-1, self.in_features)
        plain[_channels(self.out_features).flatten()] = rows
        return plain

    def times(self, rows: torch.Tensor, routes: Routes | None = None) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``. Returns ``[num_rows, out_features]``; with ``routes``, of
        rows or of their pairs to experts, a row for each pair."""
        if routes is not None:
            rows = rows.index_select(0, routes.sources(len(rows)))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        output = rows.new_empty(len(rows), self.out_features)
        num_threads = threads_for(self.weights.numel())
        where = (NOWHERE,) * 2 if routes is None else (routes.segments, routes.order)
        told = Arguments(
            rows, output, *self._where, *where,
            len(rows), rows.stride(0), *self._sizes, *self._how,
        )  # fmt: skip
        multiply.run(told, num_threads)
        return output

    def halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns what a gated product multiplies, ``[num_rows, 2 * out_features]``: of the same sums,
        the first half before its activation, and the second."""
        plain = PackedFloats(self.weights, self.bias, 2 * self.out_features, has_pairs=self._how[1])
        blocks = plain.times(rows).view(len(rows), -1, 2, CHANNELS // 2)
        return blocks.transpose(1, 2).reshape(len(rows), -1)


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, has_pairs: bool | None = None
) -> PackedFloats:
    """``weight`` ``[out_features, in_features]``, which ``can_multiply`` takes; ``bias``
    ``[out_features]``. ``has_pairs``: None: where there is the instruction."""
    out_features = weight.shape[0]
    together = 2 if weight.dtype == torch.bfloat16 else 1
    channels = _channels(out_features)
    blocks = weight.detach()[channels].view(len(channels), CHANNELS, -1, together)
    biases = None if bias is None else bias.detach().float()[channels]
    return PackedFloats(
        blocks.transpose(1, 2).contiguous(), biases, out_features, has_pairs=has_pairs
    )


def pack_experts(
    weights: Iterable[torch.Tensor], bias: torch.Tensor | None, num_experts: int
) -> PackedFloats:
    """Packs the ``weights`` of experts, one by one: each ``[out_features, in_features]``, which ``pack``
    takes; ``bias`` ``[num_experts, out_features]``."""
    packed: PackedFloats | None = None
    for expert, weight in enumerate(weights):
        one = pack(weight, None if bias is None else bias[expert])
        if packed is None:
            num_blocks = len(one.weights)
            blocks = one.weights.new_empty(num_blocks * num_experts, *one.weights.shape[1:])
            biases = None if one.bias is None else one.bias.new_empty(len(blocks), CHANNELS)
            packed = PackedFloats(blocks, biases, one.out_features, num_experts=num_experts)
        mine = slice(expert * num_blocks, (expert + 1) * num_blocks)
        packed.weights[mine] = one.weights
        if packed.bias is not None and one.bias is not None:
            packed.bias[mine] = one.bias
    assert packed is not None, "there are experts"
    return packed


def _channels(out_features: int) -> torch.Tensor:
    """Returns the output channels of each block ``[blocks, 64]``: the last ones may be in two."""
    num_blocks = -(-out_features // CHANNELS)
    firsts = torch.arange(num_blocks).mul_(CHANNELS).clamp_(max=out_features - CHANNELS)
    return firsts[:, None] + torch.arange(CHANNELS)


def pack_gated(first: PackedFloats, second: PackedFloats, activation: str) -> PackedFloats:
    """Returns what multiplies rows with both, and gives the activation (of ``v.ACTIVATIONS``) of the
    first product times the second. Both have the same sizes and type, which ``can_gate`` takes."""
    weights = torch.cat([_halves(each.weights, 2) for each in (first, second)], 2)
    bias = None
    if first.bias is not None and second.bias is not None:
        bias = torch.cat([_halves(each, 1) for each in (first.bias, second.bias)], 1)
    gate, num_experts = v.ACTIVATIONS[activation], first.num_experts
    return PackedFloats(weights, bias, first.out_features, gate, num_experts=num_experts)


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
