"""Operations on the elements of one or two tensors, which lie as they like: torch's bits where IEEE says
what they are, and of the other functions the same for every element, wherever in a call it stands."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from compiled.records import Counter, Within
from engine.kernels import KINDS, LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel, Recorded
from engine.kernels.records import NOWHERE, Floats

COPY, NEGATIVE, SQUARE, LOGISTIC, SILU, GELU_TANH, TANH, SOFTPLUS, EXPONENTIAL, INVERSE_ROOT = (
    range(10)
)
"""Operations on one element."""
SUM, DIFFERENCE, PRODUCT, QUOTIENT, CLAMP, FILL = range(10, 16)
"""Operations on two, the second of which may be one number for all; ``CLAMP``: between two numbers;
``FILL``: a number where the second is true."""
_MOST_DIMS = 4


class _Steps(NamedTuple):
    """From one element to the next, in each dimension: 0 where all of a tensor's are one."""

    first: int
    second: int
    third: int
    last: int


class Arguments(NamedTuple):
    """``output``, of ``sizes``: what ``operation`` makes of ``left`` and ``right``; where that is
    NOWHERE, of ``left`` and the ``number``."""

    left_steps: Within[_Steps]
    right_steps: Within[_Steps]
    output_steps: Within[_Steps]
    sizes: Within[_Steps]
    left: Floats
    right: Floats
    output: Floats
    operation: int
    number: float
    most: float
    next_line: Counter = 0


@njit
def _of_one(operation: int, x: Any) -> Any:
    if operation == NEGATIVE:
        return v.negative(x)
    if operation == SQUARE:
        return x * x
    if operation == LOGISTIC:
        return v.logistic(x)
    if operation == SILU:
        return v.silu(x)
    if operation == GELU_TANH:
        return v.gelu_tanh(x)
    if operation == TANH:
        return v.tanh(x)
    if operation == SOFTPLUS:
        return v.softplus(x)
    if operation == EXPONENTIAL:
        return v.exp_of_any(x)
    if operation == INVERSE_ROOT:
        return v.inverse_root(x)
    return x


@njit
def _of_two(operation: int, x: Any, y: Any, most: Any) -> Any:
    if operation == SUM:
        return x + y
    if operation == DIFFERENCE:
        return x - y
    if operation == PRODUCT:
        return x * y
    if operation == QUOTIENT:
        return x / y
    if operation == FILL:
        return v.where(y, most, x)
    return v.negative(v.larger(v.negative(most), v.negative(v.larger(y, x))))


_gathered = v.room_for(LANES)


@njit
def _loaded(elements: Any, step: int, at: int, count: int) -> Any:
    """Those from ``at`` on, of which ``count`` are there."""
    if step == 0:
        return v.splat(v.one_of(elements, 0))
    if step == 1:
        return v.load(elements, at) if count >= LANES else v.load_some(elements + at, count)
    room = _gathered()
    for lane in range(min(count, LANES)):
        room[lane] = v.one_of(elements, (at + lane) * step)
    return v.load(room, 0)


@njit
def _place(elements: Any, steps: Any, first: int, second: int, third: int) -> Any:
    return elements + (first * steps.first + second * steps.second + third * steps.third)


def _compute(a: Arguments) -> None:
    sizes, count = a.sizes, a.sizes.last
    num_lines = sizes.first * sizes.second * sizes.third
    y, most = v.splat(np.float32(a.number)), v.splat(np.float32(a.most))
    for line in v.shared(a.next_line, num_lines, max(1, min(16, num_lines // 8))):
        rest = line // sizes.third
        third, second, first = line % sizes.third, rest % sizes.second, rest // sizes.second
        left = _place(a.left, a.left_steps, first, second, third)
        right = _place(a.right, a.right_steps, first, second, third)
        output = _place(a.output, a.output_steps, first, second, third)
        for at in range(0, count, LANES):
            some = count - at
            x = _loaded(left, a.left_steps.last, at, some)
            if a.operation >= SUM:
                if not v.is_none(a.right):
                    y = _loaded(right, a.right_steps.last, at, some)
                x = _of_two(a.operation, x, y, most)
            else:
                x = _of_one(a.operation, x)
            if some >= LANES:
                v.store(output, at, x)
            else:
                v.store_some(output + at, x, some)


compute_all = Kernel(_compute)


def recorded(
    operation: int,
    left: torch.Tensor,
    right: torch.Tensor | None,
    output: torch.Tensor,
    number: float = 0.0,
    most: float = 0.0,
) -> Recorded | None:
    """Returns what writes an operation's results to ``output``, whose shape the others are expanded to;
    None: it is for other tensors. It points to all three, which have to outlive it."""
    given = [left, output] if right is None else [left, output, right]
    if output.dim() > _MOST_DIMS or not all(map(_is_served, given)):
        return None
    order = sorted(range(output.dim()), key=lambda dim: _rank(output, dim))
    steps = [_steps(each.expand(output.shape), order) for each in given]
    if steps[1].last != 1:
        return None
    arguments = Arguments(
        left_steps=steps[0],
        right_steps=steps[-1],
        output_steps=steps[1],
        sizes=_Steps(*_filled([output.shape[dim] for dim in order], 1)),
        left=left,
        right=NOWHERE if right is None else right,
        output=output,
        operation=operation,
        number=number,
        most=most,
    )
    return compute_all.recorded(arguments, threads_for(output.numel()))


def _is_served(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in (*KINDS, torch.bool)
        and tensor.numel() > 0
    )


def _rank(tensor: torch.Tensor, dim: int) -> tuple[bool, int]:
    """Dimensions of one element come first, and then those with long steps."""
    return tensor.shape[dim] > 1, -tensor.stride(dim)


def _steps(tensor: torch.Tensor, order: list[int]) -> _Steps:
    # A step to the next of one element is any number.
    own = [tensor.stride(dim) for dim in order]
    return _Steps(*_filled([*own[:-1], 1] if own and tensor.shape[order[-1]] == 1 else own, 1))


def _filled(numbers: list[int], first: int) -> list[int]:
    return [first] * (_MOST_DIMS - len(numbers)) + numbers


def computed(operation: int, values: torch.Tensor) -> torch.Tensor:
    """Returns what an operation on one element makes of ``values``, of a type in ``KINDS`` on a CPU."""
    rows = values.reshape(-1, values.shape[-1]) if values.dim() > _MOST_DIMS else values
    output = rows.new_empty(rows.shape)
    run = recorded(operation, rows, None, output) or recorded(
        operation, rows.contiguous(), None, output
    )
    if run is not None:  # there are any
        run.kernel.run(run.arguments, run.num_threads)
    return output.view(values.shape)
