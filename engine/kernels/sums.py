"""Tensors added to each other, rounded as torch rounds them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from compiled.records import Counter
from engine.kernels import KINDS, LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel, TeamLoop
from engine.kernels.records import Floats


def reference(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.float() + right.float()).to(left.dtype)


_NUMBERS_AT_ONCE = 256 * LANES


class Arguments(NamedTuple):
    """``left``, ``right`` and ``output``: ``num_floats`` each."""

    left: Floats
    right: Floats
    output: Floats
    num_floats: int
    next_part: Counter = 0


def _add(a: Arguments) -> None:
    num_parts = (a.num_floats + _NUMBERS_AT_ONCE - 1) // _NUMBERS_AT_ONCE
    for part in v.shared(a.next_part, num_parts):
        first = part * _NUMBERS_AT_ONCE
        for at in range(first, min(first + _NUMBERS_AT_ONCE, a.num_floats), LANES):
            v.store(a.output, at, v.load(a.left, at) + v.load(a.right, at))


add_all = Kernel(_add)


def can_add(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether ``add_all`` is for them: rows of a multiple of 16 floats on a CPU that lie together. It is
    for any number of rows, or for none."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and left.dtype in KINDS
        and left.dim() > 0
        and left.shape[-1] % LANES == 0
        and all(each.is_contiguous() and each.device.type == "cpu" for each in (left, right))
    )


def recorded_sum(
    left: torch.Tensor, right: torch.Tensor, output: torch.Tensor
) -> tuple[TeamLoop, array[int], int]:
    """Returns the kernel for a sum, what it is told, and in how many threads it runs."""
    told, dtypes = add_all.layout.pack(Arguments(left, right, output, left.numel()))
    return add_all.loop(dtypes), told, threads_for(left.numel())
