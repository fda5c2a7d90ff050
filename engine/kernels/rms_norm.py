"""Root mean square norms of rows (Zhang and Sennrich 2019) in one pass."""

from __future__ import annotations

from array import array
from enum import IntEnum

import numpy as np
import torch

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, numbers_at, threads_for
from engine.kernels.lanes import (
    add,
    argument,
    fetch_add,
    fma,
    itemsize_of,
    load,
    load32,
    mul,
    read_float,
    rounded,
    splat,
    store,
    sum_of,
)

_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. NUMBERS, float32: epsilon, one over the number of
    features. IS_ROUNDED: a row is rounded to its type before it is weighed."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    NUM_FEATURES = 2
    KIND = 3
    ROWS = 4
    ROW = 5
    WEIGHT = 6  # float32
    IS_ROUNDED = 7
    OUTPUT = 8
    NUMBERS = 9


def _normalize(p: int) -> None:
    kind, num_features = argument(p, Arg.KIND), argument(p, Arg.NUM_FEATURES)
    itemsize, weight, numbers = itemsize_of(kind), argument(p, Arg.WEIGHT), argument(p, Arg.NUMBERS)
    epsilon, share = read_float(numbers), read_float(numbers + 4)
    is_rounded = argument(p, Arg.IS_ROUNDED)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        source = argument(p, Arg.ROWS) + row * argument(p, Arg.ROW)
        target = argument(p, Arg.OUTPUT) + row * num_features * itemsize
        even = odd = splat(_ZERO)
        at = 0
        while at + 2 * LANES <= num_features:
            x, y = load(kind, source + itemsize * at), load(kind, source + itemsize * (at + LANES))
            even, odd = fma(x, x, even), fma(y, y, odd)
            at += 2 * LANES
        if at < num_features:
            x = load(kind, source + itemsize * at)
            even = fma(x, x, even)
        scale = splat(_ONE / np.sqrt(sum_of(add(even, odd)) * share + epsilon))
        for at in range(0, num_features, LANES):
            value = mul(load(kind, source + itemsize * at), scale)
            if is_rounded:
                value = rounded(kind, value)
            store(kind, target + itemsize * at, mul(value, load32(weight + 4 * at)))


normalize = Kernel(_normalize, len(Arg))
"""Every row over its root mean square, times WEIGHT."""


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, is_rounded: bool
) -> torch.Tensor:
    """``rows`` ``[.., num_features]``, of a type in ``KINDS``, features a multiple of 16; ``weight``
    float32. Returns the like of ``rows``."""
    rows = rows if rows.is_contiguous() else rows.contiguous()
    num_features = rows.shape[-1]
    output = torch.empty_like(rows)
    told = array(
        "q",
        [
            *(0, rows.numel() // num_features, num_features, KINDS[rows.dtype]),
            *(rows.data_ptr(), num_features * rows.element_size()),
            *(
                weight.data_ptr(),
                is_rounded,
                output.data_ptr(),
                numbers_at(epsilon, 1.0 / num_features),
            ),
        ],
    )
    normalize.run(told.buffer_info()[0], threads_for(rows.numel()))
    return output
