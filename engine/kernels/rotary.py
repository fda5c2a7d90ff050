"""Rotary position embeddings of queries and keys in one pass (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from array import array
from enum import IntEnum

import torch
from numba import njit

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.lanes import (
    add,
    argument,
    fetch_add,
    itemsize_of,
    load,
    mul,
    rounded,
    store,
    sub,
)


class Arg(IntEnum):
    """Numbers, and addresses; strides in bytes. HALF: half the dimensions of a head."""

    NEXT_ROW = 0
    NUM_ROWS = 1
    KIND = 2
    HALF = 3
    COSINES = 4
    COSINE_ROW = 5
    SINES = 6
    SINE_ROW = 7
    # Of the queries, then of the keys: heads, row, head, where they are, and where they go.
    QUERIES = 8
    KEYS = 13
    END = 18


@njit
def _rotate_heads(p: int, which: int, row: int) -> None:
    """Each value is rounded where torch's operations would round it."""
    kind, half = argument(p, Arg.KIND), argument(p, Arg.HALF)
    itemsize = itemsize_of(kind)
    cosines = argument(p, Arg.COSINES) + row * argument(p, Arg.COSINE_ROW)
    sines = argument(p, Arg.SINES) + row * argument(p, Arg.SINE_ROW)
    num_heads, step = argument(p, which), half * itemsize
    source = argument(p, which + 3) + row * argument(p, which + 1)
    target = argument(p, which + 4) + row * num_heads * 2 * step
    for _ in range(num_heads):
        for at in range(0, step, LANES * itemsize):
            x, y = load(kind, source + at), load(kind, source + step + at)
            turned = rounded(kind, mul(y, load(kind, sines + at)))
            kept = rounded(kind, mul(x, load(kind, cosines + at)))
            store(kind, target + at, sub(kept, turned))
            turned = rounded(kind, mul(x, load(kind, sines + step + at)))
            kept = rounded(kind, mul(y, load(kind, cosines + step + at)))
            store(kind, target + step + at, add(kept, turned))
        source += argument(p, which + 2)
        target += 2 * step


def _rotate(p: int) -> None:
    while True:
        row = fetch_add(p + 8 * Arg.NEXT_ROW, 1)
        if row >= argument(p, Arg.NUM_ROWS):
            break
        _rotate_heads(p, Arg.QUERIES, row)
        _rotate_heads(p, Arg.KEYS, row)


rotate_all = Kernel(_rotate, Arg.END)
"""Every row's queries and keys."""


def can_rotate(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> bool:
    """Whether ``rotate`` is for them: one batch, all dimensions rotated, halves a multiple of 16."""
    parts = (query, key, cosines, sines)
    dim = query.shape[-1]
    return (
        query.dim() == key.dim() == 4
        and query.shape[0] == key.shape[0] == 1
        and cosines.shape == sines.shape == (1, query.shape[2], dim)
        and key.shape[2:] == query.shape[2:]
        and dim % (2 * LANES) == 0
        and query.dtype in KINDS
        and all(each.dtype == query.dtype and each.stride(-1) == 1 for each in parts)
        and all(each.device.type == "cpu" for each in parts)
    )


def rotate(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` ``[1, heads, rows, dim]``, ``cosines`` and ``sines`` ``[1, rows, dim]``, as
    ``can_rotate`` takes them. Returns the like of ``query`` and ``key``, a row's heads side by side."""
    _, _, num_rows, dim = query.shape
    size = query.element_size()
    turned = [each.new_empty(1, num_rows, each.shape[1], dim) for each in (query, key)]
    told = array("q", [0, num_rows, KINDS[query.dtype], dim // 2])
    told.extend((cosines.data_ptr(), cosines.stride(1) * size))
    told.extend((sines.data_ptr(), sines.stride(1) * size))
    for source, target in zip((query, key), turned, strict=True):
        told.extend((source.shape[1], source.stride(2) * size, source.stride(1) * size))
        told.extend((source.data_ptr(), target.data_ptr()))
    rotate_all.run(told.buffer_info()[0], threads_for(query.numel()))
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)
