"""Rows of a tensor, or numbers of each row, copied in an order that numbers give."""

from __future__ import annotations

from typing import NamedTuple

import torch

from compiled.records import Counter, Int64s
from engine.kernels import KINDS, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel, Recorded
from engine.kernels.records import Floats

_WORD = 8
"""Bytes that are copied at a time."""


def reference(source: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return source[numbers]


class Arguments(NamedTuple):
    """``source``: ``num_source_rows`` rows, of which ``numbers`` names those to copy to ``output``,
    negative ones from the end. Rows have ``num_words`` words of 8 bytes."""

    source: Int64s
    numbers: Int64s
    output: Int64s
    num_source_rows: int
    num_rows: int
    num_words: int
    next_row: Counter = 0


def _copy(a: Arguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        number = a.numbers[row]
        if number < 0:
            number += a.num_source_rows
        # Numbers were looked at when the forward was recorded; nothing else is read in any case.
        number = max(0, min(number, a.num_source_rows - 1))
        source, output = a.source + number * a.num_words, a.output + row * a.num_words
        for at in range(a.num_words):
            output[at] = source[at]


copy_all = Kernel(_copy)


class PickArguments(NamedTuple):
    """``source`` ``[num_rows, num_features]``; ``output`` ``[num_rows, num_picked]``: of each row those
    that ``numbers`` names."""

    source: Floats
    numbers: Int64s
    output: Floats
    num_rows: int
    num_features: int
    num_picked: int
    next_row: Counter = 0


def _pick(a: PickArguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        source, output = a.source + row * a.num_features, a.output + row * a.num_picked
        for at in range(a.num_picked):
            number = max(0, min(a.numbers[at], a.num_features - 1))
            v.store_some(output + at, v.splat(v.one_of(source, number)), 1)


pick_all = Kernel(_pick)


def recorded_rows(
    source: torch.Tensor, dim: int, numbers: torch.Tensor, output: torch.Tensor
) -> Recorded | None:
    """Returns what writes ``source.index_select(dim, numbers)`` to ``output``; None: it is for other
    tensors. It points to all three, which have to outlive it."""
    given = source, numbers, output
    are_plain = all(e.device.type == "cpu" and e.layout is torch.strided for e in given)
    if not are_plain or not all(each.is_contiguous() and each.numel() for each in given):
        return None
    before, width = source.shape[:dim].numel(), source.shape[dim + 1 :].numel()
    num_bytes = width * source.itemsize
    if numbers.dtype != torch.int64:
        return None
    if before == 1 and num_bytes % _WORD == source.data_ptr() % _WORD == 0:
        rows = Arguments(*given, source.shape[dim], numbers.numel(), num_bytes // _WORD)
        return copy_all.recorded(rows, threads_for(output.numel()))
    if width == 1 and source.dtype in KINDS and bool((numbers >= 0).all()):
        picked = PickArguments(*given, before, source.shape[dim], numbers.numel())
        return pick_all.recorded(picked, threads_for(output.numel()))
    return None
