"""What an integer product leaves, scaled by output channel, becomes rows of a model's type: each times
its own scale, plus a bias, in one pass instead of three."""

from __future__ import annotations

from array import array
from enum import IntEnum

import torch

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.lanes import (
    add,
    argument,
    fetch_add,
    itemsize_of,
    load32,
    mul,
    read_float,
    splat,
    store,
)


class Arg(IntEnum):
    """Numbers, and addresses. SUMS float32 ``[NUM_ROWS, NUM_FEATURES]``, SCALES float32 of each row, BIAS
    float32 of each feature, or 0; OUTPUT like SUMS, of KIND."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    NUM_FEATURES = 2
    SUMS = 3
    SCALES = 4
    BIAS = 5
    KIND = 6
    OUTPUT = 7


def _scale(p: int) -> None:
    kind, num_features, bias = (
        argument(p, Arg.KIND), argument(p, Arg.NUM_FEATURES), argument(p, Arg.BIAS)
    )  # fmt: skip
    itemsize = itemsize_of(kind)
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        scale = splat(read_float(argument(p, Arg.SCALES) + 4 * row))
        sums = argument(p, Arg.SUMS) + 4 * num_features * row
        output = argument(p, Arg.OUTPUT) + itemsize * num_features * row
        for at in range(0, num_features, LANES):
            value = mul(load32(sums + 4 * at), scale)
            if bias != 0:
                value = add(value, load32(bias + 4 * at))
            store(kind, output + itemsize * at, value)


scale = Kernel(_scale, len(Arg))
"""Every row."""


def can_scale(num_features: int, dtype: torch.dtype) -> bool:
    return num_features % LANES == 0 and dtype in KINDS


def scale_rows(
    sums: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``sums`` float32 ``[num_rows, num_features]``, contiguous, times ``scales`` float32
    ``[num_rows, 1]``, plus ``bias`` float32 ``[num_features]``, as ``dtype``: each operation rounded as
    torch rounds it."""
    output = torch.empty_like(sums, dtype=dtype)
    told = array(
        "q",
        [
            *(0, *sums.shape, sums.data_ptr(), scales.data_ptr()),
            *(0 if bias is None else bias.data_ptr(), KINDS[dtype], output.data_ptr()),
        ],
    )
    scale.run(told.buffer_info()[0], threads_for(sums.numel()))
    return output
