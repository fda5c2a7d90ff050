"""Tensors added to each other, rounded as torch rounds them."""

from __future__ import annotations

from array import array
from enum import IntEnum

import torch

from engine.kernels import KINDS, LANES
from engine.kernels.compiled import Kernel, threads_for
from engine.kernels.lanes import add, argument, fetch_add, itemsize_of, load, store

_NUMBERS_AT_ONCE = 256 * LANES


class Arg(IntEnum):
    """Numbers, and addresses."""

    NEXT = 0
    COUNT = 1
    KIND = 2
    LEFT = 3
    RIGHT = 4
    OUTPUT = 5


def _add(p: int) -> None:
    kind, count = argument(p, Arg.KIND), argument(p, Arg.COUNT)
    itemsize = itemsize_of(kind)
    left, right, output = (
        argument(p, Arg.LEFT), argument(p, Arg.RIGHT), argument(p, Arg.OUTPUT)
    )  # fmt: skip
    while True:
        first = fetch_add(p + 8 * Arg.NEXT, _NUMBERS_AT_ONCE)
        if first >= count:
            break
        end = min(first + _NUMBERS_AT_ONCE, count)
        for at in range(first * itemsize, end * itemsize, LANES * itemsize):
            store(kind, output + at, add(load(kind, left + at), load(kind, right + at)))


add_all = Kernel(_add, len(Arg))
"""LEFT plus RIGHT."""


def can_add(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and left.dtype in KINDS
        and left.numel() % LANES == 0
        and all(each.is_contiguous() and each.device.type == "cpu" for each in (left, right))
    )


def sum_arguments(
    left: torch.Tensor, right: torch.Tensor, output: torch.Tensor
) -> tuple[array[int], int]:
    """What ``add_all`` is told, and in how many threads it runs."""
    kind, count = KINDS[left.dtype], left.numel()
    addresses = (each.data_ptr() for each in (left, right, output))
    return array("q", [0, count, kind, *addresses]), threads_for(count)
