"""Rows of a tensor, or numbers of each row, copied in an order that numbers give, or set."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
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
    that ``numbers`` names, the same of all where ``next_numbers`` is 0."""

    source: Floats
    numbers: Int64s
    output: Floats
    num_rows: int
    num_features: int
    num_picked: int
    next_numbers: int
    next_row: Counter = 0


def _pick(a: PickArguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        source, output = a.source + row * a.num_features, a.output + row * a.num_picked
        for at in range(a.num_picked):
            number = max(0, min(a.numbers[row * a.next_numbers + at], a.num_features - 1))
            v.store_some(output + at, v.splat(v.one_of(source, number)), 1)


class SetArguments(NamedTuple):
    """``output`` ``[num_rows, num_features]``; ``numbers`` ``[num_rows, num_set]``: those of its row that
    become ``value``."""

    numbers: Int64s
    output: Floats
    value: float
    num_rows: int
    num_features: int
    num_set: int
    next_row: Counter = 0


def _set(a: SetArguments) -> None:
    value = v.splat(np.float32(a.value))
    for row in v.shared(a.next_row, a.num_rows):
        output = a.output + row * a.num_features
        for at in range(a.num_set):
            number = max(0, min(a.numbers[row * a.num_set + at], a.num_features - 1))
            v.store_some(output + number, value, 1)


pick_all, set_all = Kernel(_pick), Kernel(_set)


def recorded_rows(
    source: torch.Tensor, dim: int, numbers: torch.Tensor, output: torch.Tensor
) -> Recorded | None:
    """Returns what writes ``source.index_select(dim, numbers)`` to ``output``; None: it is for other
    tensors. It points to all three, which have to outlive it."""
    given = source, numbers, output
    if not _are_plain(numbers, source, output):
        return None
    before, width = source.shape[:dim].numel(), source.shape[dim + 1 :].numel()
    num_bytes = width * source.itemsize
    if before == 1 and num_bytes % _WORD == source.data_ptr() % _WORD == 0:
        rows = Arguments(*given, source.shape[dim], numbers.numel(), num_bytes // _WORD)
        return copy_all.recorded(rows, threads_for(output.numel()))
    if width == 1 and source.dtype in KINDS and bool((numbers >= 0).all()):
        picked = PickArguments(*given, before, source.shape[dim], numbers.numel(), 0)
        return pick_all.recorded(picked, threads_for(output.numel()))
    return None


def recorded_gather(
    source: torch.Tensor, numbers: torch.Tensor, output: torch.Tensor
) -> Recorded | None:
    """The same of ``source.gather(1, numbers)``, all of two dimensions."""
    if not _are_plain(numbers, source, output) or source.dtype not in KINDS:
        return None
    picked = PickArguments(source, numbers, output, *source.shape, *[numbers.shape[1]] * 2)
    return pick_all.recorded(picked, threads_for(output.numel()))


def recorded_scatter(numbers: torch.Tensor, value: float, output: torch.Tensor) -> Recorded | None:
    """The same of ``output.scatter_(1, numbers, value)``, both of two dimensions."""
    if not _are_plain(numbers, output) or output.dtype not in KINDS:
        return None
    num_rows, num_features = output.shape
    told = SetArguments(numbers, output, value, num_rows, num_features, numbers.shape[1])
    return set_all.recorded(told, threads_for(numbers.numel()))


def _are_plain(numbers: torch.Tensor, *others: torch.Tensor) -> bool:
    """Returns whether all have elements, one behind the other, and ``numbers`` are int64."""
    given = numbers, *others
    are_of_host = all(e.device.type == "cpu" and e.layout is torch.strided for e in given)
    are_whole = are_of_host and all(each.is_contiguous() and each.numel() for each in given)
    return are_whole and numbers.dtype == torch.int64
