"""Causal convolutions of a few taps over each channel of the rows of walks (``walks``).

A task is some channels of all rows. A row's taps are found by its entry's parents, then in the window
that the walk begins with; their products are added oldest first, to the bias, whatever kind of place they
lie in and whoever else is in the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from compiled.records import Counter
from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels import walks as w
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats

MOST_CHANNELS = 512
"""Channels of a task, at most."""


def block_of(channels: int, num_tasks: int) -> int:
    """Returns how many channels make about so many tasks."""
    each = -(-channels // num_tasks)
    return min(MOST_CHANNELS, -(-each // (2 * LANES)) * 2 * LANES)


def convolved(taps: Any, weight: Any, bias: float = 0.0, silu: bool = False) -> Any:
    """Returns what a channel of a row becomes. ``taps`` and ``weight`` ``[width]``, oldest first, of
    which the last is the row's own."""
    total = bias
    for tap, each in zip(taps, weight, strict=True):
        total += each * tap
    return total / (1 + np.exp(-total)) if silu else total


class Arguments(NamedTuple):
    """``rows`` ``[num_rows, channels]``, ``row`` floats apart, and ``output``, which lies together;
    ``weight`` ``[width, channels]`` and ``bias``, with zeros up to whole lanes; ``states`` ``[slots,
    width - 1, channels]``; ``kept`` ``[places, channels]``. ``block``: channels of a task, a multiple of
    16."""

    rows: Floats
    output: Floats
    weight: Float32s
    bias: Float32s
    states: Float32s
    kept: Float32s
    step: w.Step
    row: int
    num_rows: int
    channels: int
    width: int
    weight_row: int
    block: int
    silu: bool
    next_task: Counter = 0
    num_workers: Counter = 0


def scratch_floats(width: int) -> int:
    """Returns what one worker needs."""
    return MOST_CHANNELS * width


@njit
def _read_tap(
    a: Arguments, walk: w.Walk, number: int, steps: int, begin: int, count: int, target: Any
) -> None:
    """Writes channels of the input that lies ``steps`` rows before an entry's."""
    while steps > 0 and number >= 0:
        number = a.step.entries[number].parent
        steps -= 1
    if number >= 0:
        entry = a.step.entries[number]
        if entry.row >= 0:
            w.copy(a.rows + (entry.row * a.row + begin), count, target)
        else:
            w.copy(a.kept + (entry.read * a.channels + begin), count, target)
    elif walk.source >= 0:
        place = (walk.source + 1) * (a.width - 1) - 1 - steps
        w.copy(a.states + (place * a.channels + begin), count, target)
    else:
        w.clear(target, count)


@njit
def _write_row(a: Arguments, taps: Any, row: int, begin: int, count: int) -> None:
    """``taps``: ``[width, MOST_CHANNELS]``; the sums take the place of the first."""
    weight, bias = a.weight + begin, a.bias + begin
    for at in range(0, count, LANES):
        total = v.load(bias, at)
        for tap in range(a.width):
            x = v.load(taps, tap * MOST_CHANNELS + at)
            total = v.fma(v.load(weight, tap * a.weight_row + at), x, total)
        v.store(taps, at, v.silu(total) if a.silu else total)
    w.copy(taps, count, a.output + (row * a.channels + begin))


@njit
def _write_window(
    a: Arguments, walk: w.Walk, number: int, slot: int, begin: int, count: int
) -> None:
    """Writes the last inputs to a slot, which the walk may begin from: older ones come first, and none is
    read after its place was written."""
    for tap in range(1, a.width):
        place = slot * (a.width - 1) + tap - 1
        target = a.states + (place * a.channels + begin)
        _read_tap(a, walk, number, a.width - 1 - tap, begin, count, target)


@njit
def _take_walk(a: Arguments, walk: w.Walk, taps: Any, begin: int, count: int) -> None:
    for number in range(walk.first, walk.end):
        entry = a.step.entries[number]
        if entry.row >= 0:
            for tap in range(a.width):
                steps, target = a.width - 1 - tap, taps + tap * MOST_CHANNELS
                _read_tap(a, walk, number, steps, begin, count, target)
            _write_row(a, taps, entry.row, begin, count)
        if entry.keep >= 0:
            kept = a.kept + (entry.keep * a.channels + begin)
            w.copy(a.rows + (entry.row * a.row + begin), count, kept)
    # No row of the walk reads its window any more.
    for number in range(walk.first, walk.end):
        entry = a.step.entries[number]
        if entry.snapshot >= 0:
            _write_window(a, walk, number, entry.snapshot, begin, count)
        if entry.store >= 0:
            _write_window(a, walk, number, entry.store, begin, count)


def _convolve(a: Arguments) -> None:
    taps = a.step.scratch + v.fetch_add(a.num_workers, 1) * a.step.scratch_size
    for task in v.shared(a.next_task, (a.channels + a.block - 1) // a.block):
        begin = task * a.block
        count = min(a.block, a.channels - begin)
        for number in range(a.step.num_walks):
            _take_walk(a, a.step.walks[number], taps, begin, count)
        for row in range(a.step.num_rows, a.num_rows):
            w.clear(a.output + (row * a.channels + begin), count)


convolve = Kernel(_convolve, is_long=True)
"""Convolves all rows, and writes what is kept of them."""
