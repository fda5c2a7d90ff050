"""Kernels that stand for torch's operations in a recording, with the same bits.

Between two sequences of kernels the interpreter and the end of a team cost what a kernel of few rows
does, and a hybrid model has twenty such operations in a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine.kernels import find_kernel

_aten = torch.ops.aten

Kernels = Callable[[Tensor], list[Any]]
"""Returns the kernels that write an operation's result to a place, each with its arguments and its
threads."""


def kernels_for(func: Any, args: tuple[Any, ...], result: Any) -> Kernels | None:
    """``args`` and ``result``: of an operation that was done. None: there are none for it."""
    find = _FINDERS.get(func)
    if find is None or not isinstance(result, Tensor):
        return None
    return find(args, result)


def _elementwise(
    name: str, rounds: bool = False
) -> Callable[[tuple[Any, ...], Tensor], Kernels | None]:
    """``rounds``: torch rounds a number for all elements to their type."""

    def find(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
        kernel = find_kernel("elementwise")
        left, *more = args
        numbers = [float(each) for each in more if isinstance(each, int | float)]
        if rounds:
            numbers = torch.tensor(numbers, dtype=result.dtype).tolist()
        tensors = [each for each in more if isinstance(each, Tensor)]
        if len(numbers) + len(tensors) < len(more) or not isinstance(left, Tensor):
            return None
        right = tensors[0] if tensors else None
        told = getattr(kernel, name), left, right
        return _written(result, lambda place: kernel.recorded(*told, place, *numbers))

    return find


def _written(result: Tensor, *writers: Callable[[Tensor], Any]) -> Kernels | None:
    """Returns kernels of which each is for what its writer is given; None: one is for other tensors."""
    if not all(write(result) for write in writers):
        return None
    return lambda place: [write(place) for write in writers]


def _square(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    return _elementwise("SQUARE")(args[:1], result) if args[1:] in ((), (2,)) else None


def _clamp(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    values, least, most = *args[:2], args[2] if len(args) > 2 else None
    bounds = -torch.inf if least is None else least, torch.inf if most is None else most
    return _elementwise("CLAMP")((values, *bounds), result)


def _copied(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    """Results with the elements of the first argument, in their order."""
    source, kernel = args[0], find_kernel("elementwise")
    is_view = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    if is_view or not (result.is_contiguous() or result.shape == source.shape):
        return None
    return _written(
        result, lambda place: kernel.recorded(kernel.COPY, source, None, place.view(source.shape))
    )


def _joined(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    """``cat(parts, dim)``."""
    kernel = find_kernel("elementwise")
    parts, dim = [each for each in args[0] if each.numel()], args[1] if len(args) > 1 else 0
    starts = accumulate((each.shape[dim] for each in parts), initial=0)

    def writer(part: Tensor, start: int) -> Callable[[Tensor], Any]:
        size = part.shape[dim]
        return lambda place: kernel.recorded(
            kernel.COPY, part, None, place.narrow(dim, start, size)
        )

    return _written(result, *map(writer, parts, starts))


@cache
def _number(number: float, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of it, which lies where it lay the last time."""
    return torch.tensor(number, dtype=dtype)


def _padded(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    """Zeros behind each row."""
    kernel, (source, pads, *how) = find_kernel("elementwise"), args
    if len(pads) < 2 or pads[0] or pads[1] <= 0 or any(pads[2:]) or how not in ([], ["constant"]):
        return None
    behind = pads[1]
    zero, width = _number(0.0, result.dtype), source.shape[-1]

    def copied(place: Tensor) -> Any:
        return kernel.recorded(kernel.COPY, source, None, place.narrow(-1, 0, width))

    def filled(place: Tensor) -> Any:
        return kernel.recorded(kernel.COPY, zero, None, place.narrow(-1, width, behind))

    return _written(result, copied, filled)


def _filled(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    source, mask, number = args
    return _elementwise("FILL", rounds=True)((source, mask, 0.0, number), result)


def _inverted(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    """A 0 where there is a 1."""
    if result.dtype is not torch.bool:
        return None
    return _elementwise("FILL")((_number(1.0, result.dtype), *args, 0.0, 0.0), result)


def _gathered(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    rows, (source, dim, numbers) = find_kernel("rows"), args
    if not _are_of_each_row(source, dim, numbers):
        return None
    return _written(result, lambda place: rows.recorded_gather(source, numbers, place))


def _scattered(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    rows, (target, dim, numbers, value) = find_kernel("rows"), args
    if not _are_of_each_row(target, dim, numbers):
        return None
    return _written(result, lambda place: rows.recorded_scatter(numbers, float(value), place))


def _are_of_each_row(rows: Tensor, dim: int, numbers: Tensor) -> bool:
    return rows.dim() == 2 and dim % 2 == 1 and len(numbers) == len(rows)


def _rows(source: Tensor, dim: int, numbers: Tensor, result: Tensor) -> Kernels | None:
    rows = find_kernel("rows")
    dim %= source.dim()
    return _written(result, lambda place: rows.recorded_rows(source, dim, numbers, place))


def _selected(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    source, dim, numbers = args
    return _rows(source, dim, numbers, result)


def _indexed(args: tuple[Any, ...], result: Tensor) -> Kernels | None:
    """``source[:, numbers]`` and the like."""
    source, (*before, numbers) = args
    if any(each is not None for each in before) or numbers is None or numbers.dim() != 1:
        return None
    return _rows(source, len(before), numbers, result)


_FINDERS: dict[Any, Callable[[tuple[Any, ...], Tensor], Kernels | None]] = {
    _aten.add.Tensor: _elementwise("SUM", rounds=True),
    _aten.add_.Tensor: _elementwise("SUM", rounds=True),
    _aten.sub.Tensor: _elementwise("DIFFERENCE", rounds=True),
    _aten.mul.Tensor: _elementwise("PRODUCT"),
    _aten.mul_.Tensor: _elementwise("PRODUCT"),
    _aten.div.Tensor: _elementwise("QUOTIENT"),
    _aten.div_.Tensor: _elementwise("QUOTIENT"),
    _aten.neg.default: _elementwise("NEGATIVE"),
    _aten.pow.Tensor_Scalar: _square,
    _aten.square.default: _square,
    _aten.relu.default: lambda args, result: _clamp((*args, 0.0), result),
    _aten.clamp.default: _clamp,
    _aten.contiguous.default: _copied,
    _aten.clone.default: _copied,
    _aten.reshape.default: _copied,
    _aten.flatten.using_ints: _copied,
    _aten.to.dtype: _copied,
    _aten.type_as.default: _copied,
    _aten.copy_.default: lambda args, result: _elementwise("COPY")(args[1:2], result),
    _aten.cat.default: _joined,
    _aten.index_select.default: _selected,
    _aten.index.Tensor: _indexed,
    _aten.embedding.default: lambda args, result: _rows(args[0], 0, args[1], result),
    _aten.pad.default: _padded,
    _aten.zeros_like.default: lambda _, result: _elementwise("COPY")(
        (_number(0.0, result.dtype),), result
    ),
    _aten.bitwise_not.default: _inverted,
    _aten.masked_fill.Scalar: _filled,
    _aten.gather.default: _gathered,
    _aten.scatter_.value: _scattered,
}
