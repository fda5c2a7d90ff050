"""Rows of a tensor copied, in an order that numbers give, or side by side with others' rows."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from compiled.records import Counter, Int64s
from engine.kernels import lanes as v
from engine.kernels import threads_for
from engine.kernels.compiled import Kernel, TeamLoop
from engine.kernels.records import NOWHERE

_WORD = 8
"""Bytes that are copied at a time."""


def reference(source: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return source[numbers]


class Arguments(NamedTuple):
    """``source``: ``num_source_rows`` rows, of which ``numbers`` names those to copy, negative ones from
    the end; without ``are_named`` the first ``num_rows``. ``output``: rows ``output_row`` apart. Rows
    have ``num_words`` words of 8 bytes."""

    source: Int64s
    numbers: Int64s
    output: Int64s
    num_source_rows: int
    num_rows: int
    num_words: int
    output_row: int
    are_named: bool
    next_row: Counter = 0


def _copy(a: Arguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        number = row
        if a.are_named:
            number = a.numbers[row]
            if number < 0:
                number += a.num_source_rows
            # Numbers were looked at when the forward was recorded; nothing else is read in any case.
            number = max(0, min(number, a.num_source_rows - 1))
        source, output = a.source + number * a.num_words, a.output + row * a.output_row
        for at in range(a.num_words):
            output[at] = source[at]


copy_all = Kernel(_copy)


class Recorded(NamedTuple):
    """A kernel, what it is told, and in how many threads it runs."""

    kernel: TeamLoop
    arguments: array[int]
    num_threads: int


def can_copy(source: torch.Tensor, width: int, numbers: torch.Tensor = NOWHERE) -> bool:
    """Whether ``copy_all`` is for rows of ``width`` elements, and for these numbers: on a CPU, rows that
    lie together and are whole words."""
    return (
        source.device.type == numbers.device.type == "cpu"
        and source.layout is numbers.layout is torch.strided
        and source.is_contiguous()
        and source.numel() > 0
        and width * source.itemsize % _WORD == 0 < width
        and source.data_ptr() % _WORD == 0
        and numbers.is_contiguous()
        and (numbers is NOWHERE or numbers.dtype == torch.int64)
    )


def recorded_rows(
    source: torch.Tensor, numbers: torch.Tensor, width: int, output: torch.Tensor
) -> Recorded:
    """Returns what copies the rows that ``numbers`` names to ``output``. It points to all three, which
    have to outlive it."""
    num_words = width * source.itemsize // _WORD
    return _recorded(
        Arguments(
            source=source,
            numbers=numbers,
            output=output,
            num_source_rows=source.numel() // width,
            num_rows=numbers.numel(),
            num_words=num_words,
            output_row=num_words,
            are_named=True,
        )
    )


def recorded_side(source: torch.Tensor, output: torch.Tensor, first: int) -> Recorded:
    """Returns what copies rows into longer ones, from their element ``first`` on. It points to both."""
    width, wide = source.shape[-1], output.shape[-1]
    num_rows = source.numel() // width
    return _recorded(
        Arguments(
            source=source,
            numbers=NOWHERE,
            output=output.view(-1, wide)[:, first:],
            num_source_rows=num_rows,
            num_rows=num_rows,
            num_words=width * source.itemsize // _WORD,
            output_row=wide * source.itemsize // _WORD,
            are_named=False,
        )
    )


def _recorded(arguments: Arguments) -> Recorded:
    told, dtypes = copy_all.layout.pack(arguments)
    num_threads = threads_for(arguments.num_rows * arguments.num_words)
    return Recorded(copy_all.loop(dtypes), told, num_threads)
