"""Writes down what a forward does, compiled kernels and torch's operations between them, and does it
again."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from engine.batch import ForwardOutput
from engine.kernels import Renewal, Renews, find_kernel, watch_kernels

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_ALIGNMENT = 64
_ADD = torch.ops.aten.add.Tensor
_CONCATENATE = torch.ops.aten.cat.default
_EMBED = torch.ops.aten.embedding.default
_INDEX = torch.ops.aten.index.Tensor
_SELECT = torch.ops.aten.index_select.default


class KernelCall(NamedTuple):
    """``address``: of its machine code."""

    address: int
    arguments: array[int]
    num_threads: int
    renewal: Renewal | None


class TensorCall(NamedTuple):
    """One of torch's operations; ``results``: the tensors that it made, whose place is kept. None where
    it writes to what it is given."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: list[torch.Tensor] | None


class _Memory:
    """Buffers for what a forward makes. One that nothing refers to any more is used again: so may the
    recorded forward, which does the same in the same order."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._lent: dict[int, _Buffer] = {}
        self.num_bytes = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes == 0 or tensor.device.type != "cpu":
            return tensor
        free = self._free[num_bytes]
        if not free:
            self.num_bytes += num_bytes
            free.append(np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8))
        buffer = free.pop()
        lent = _aligned(buffer)
        self._lent[lent.ctypes.data] = buffer
        # torch refers to it for as long as a tensor or a view of one does.
        finalize(lent, free.append, buffer).atexit = False
        return _tensor_over(lent, tensor)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self.like(tensor)
        return place if place is tensor else place.copy_(tensor)

    def seen(self, value: Any) -> Any:
        """Returns the same tensor, which does not keep its buffer from being used again; what is no
        tensor, or lies elsewhere, as it is."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        buffer = self._lent.get(value.untyped_storage().data_ptr())
        return value if buffer is None else _tensor_over(_aligned(buffer), value)


_Buffer = np.ndarray[Any, Any]


def _aligned(buffer: _Buffer) -> _Buffer:
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + len(buffer) - _ALIGNMENT]


def _tensor_over(buffer: _Buffer, like: torch.Tensor) -> torch.Tensor:
    plain = torch.from_numpy(buffer).view(like.dtype)
    return plain.as_strided(like.shape, like.stride(), like.storage_offset())


class Recorder(TorchDispatchMode):
    """``calls``, in their order. ``reason``: why they cannot be run again; None: they can. What they read
    and write is kept; ``num_bytes``: what it takes.

    Few kinds of torch's operations stand between a layer's kernels in most models: sums of residuals, and
    rows that are chosen or put side by side. They are written down as kernels, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[KernelCall | TensorCall] = []
        self.reason: str | None = None
        self._memory = _Memory()
        self._held: list[Any] = []
        """Keeps alive what kernels that stand for operations point to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would load its whole compiler to leave this alone."""
        return False

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @contextmanager
    def watch(self) -> Iterator[None]:
        with self, watch_kernels(self):
            yield

    def note_kernel(
        self, address: int, arguments: array[int], num_threads: int, renewal: Renewal | None
    ) -> None:
        self.calls.append(KernelCall(address, arguments, num_threads, renewal))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        named = kwargs or {}
        result = func(*args, **named)
        if func._schema.name.partition("::")[2] in _ALLOCATIONS:
            return self._memory.like(result)
        if isinstance(result, torch.Tensor) and result.numel() == 0:
            return result  # nothing is to be made again
        find = None if named else _STANDS_FOR.get(func)
        kernels = None if find is None else find(args, result)
        if kernels is None:
            return self._note(func, args, named, result)
        place = self._memory.filled(result)
        self._held.append(tree_map(self._memory.seen, args))
        for kernel, arguments, num_threads in kernels(place):
            self.calls.append(KernelCall(kernel.address, arguments, num_threads, None))
        return place

    def _note(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
        """Returns the result, in a place that a replay writes to."""
        seen = self._memory.seen
        if func._schema.is_mutable:
            self.calls.append(TensorCall(func, tree_map(seen, args), tree_map(seen, named), None))
            return result
        leaves = tree_leaves(result)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if len(tensors) != len(leaves) or _has_shape_of_data(func, args):
            self.reason = f"{func} reads what tensors hold"
            return result
        if any(each.layout is not torch.strided for each in tensors):
            self.reason = f"{func} makes a tensor whose place cannot be written to"
            return result
        # What may return a view, like ``reshape``, may also return a copy.
        if _storages(tensors) <= _storages([args, named]):
            return result
        places = tree_map(self._memory.filled, result)
        results = [seen(each) for each in tree_leaves(places)]
        self.calls.append(TensorCall(func, tree_map(seen, args), tree_map(seen, named), results))
        return places


def _storages(values: Any) -> set[int]:
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    # Packed weights have none that anybody could look at.
    plain = (each for each in tensors if each.layout is torch.strided)
    return {each.untyped_storage().data_ptr() for each in plain}


def _has_shape_of_data(func: Any, args: tuple[Any, ...]) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # Whole numbers choose as many rows as they are; masks do not.
    masks = (torch.bool, torch.uint8)
    return func is not _INDEX or any(each is not None and each.dtype in masks for each in args[1])


# --- operations that kernels stand for ---

_Kernels_of = Callable[[torch.Tensor], list[Any]]
"""Returns the kernels that write an operation's result to a place, each with its arguments and its
threads."""


def _sum(args: tuple[Any, ...], result: torch.Tensor) -> _Kernels_of | None:
    sums = find_kernel("sums")
    if len(args) != 2 or not all(isinstance(each, torch.Tensor) for each in args):
        return None
    if not sums.can_add(*args) or not result.is_contiguous():
        return None
    return lambda place: [sums.recorded_sum(*args, place)]


def _selected_rows(args: tuple[Any, ...], _: torch.Tensor) -> _Kernels_of | None:
    return _rows_of(*args)


def _rows_of(source: torch.Tensor, dim: int, numbers: torch.Tensor) -> _Kernels_of | None:
    """``source.index_select(dim, numbers)``, as far as nothing lies before ``dim``."""
    rows = find_kernel("rows")
    dim %= source.dim()
    width = source.shape[dim + 1 :].numel()
    if source.shape[:dim].numel() != 1 or not rows.can_copy(source, width, numbers):
        return None
    return lambda place: [rows.recorded_rows(source, numbers, width, place)]


def _indexed_rows(args: tuple[Any, ...], _: torch.Tensor) -> _Kernels_of | None:
    """``source[:, numbers]`` and the like."""
    source, (*before, numbers) = args
    if any(each is not None for each in before) or numbers is None or numbers.dim() != 1:
        return None
    return _rows_of(source, len(before), numbers)


def _embedded_rows(args: tuple[Any, ...], _: torch.Tensor) -> _Kernels_of | None:
    return _rows_of(args[0], 0, args[1])


def _side_by_side(args: tuple[Any, ...], result: torch.Tensor) -> _Kernels_of | None:
    """``cat(parts, -1)``."""
    rows = find_kernel("rows")
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    if result.dim() == 0 or dim not in (-1, result.dim() - 1) or not result.is_contiguous():
        return None
    if not all(
        each.dtype == result.dtype and rows.can_copy(each, each.shape[-1]) for each in parts
    ):
        return None
    starts = accumulate((each.shape[-1] for each in parts), initial=0)
    return lambda place: [
        rows.recorded_side(each, place, first) for each, first in zip(parts, starts, strict=False)
    ]


_STANDS_FOR: dict[Any, Callable[[tuple[Any, ...], torch.Tensor], _Kernels_of | None]] = {
    _ADD: _sum,
    _SELECT: _selected_rows,
    _INDEX: _indexed_rows,
    _EMBED: _embedded_rows,
    _CONCATENATE: _side_by_side,
}


class CapturedForward:
    """A recorded forward. ``recorder`` has no ``reason``, and its calls hold what kernels point to;
    ``output``: what the forward returned."""

    def __init__(self, recorder: Recorder, output: ForwardOutput) -> None:
        self._recorder = recorder
        self._output = output
        self.num_bytes = recorder.num_bytes
        groups = groupby(recorder.calls, lambda call: isinstance(call, KernelCall))
        self._parts: list[_Kernels | list[TensorCall]] = [
            _Kernels(list(calls)) if are_kernels else list(calls)  # type: ignore[arg-type]
            for are_kernels, calls in groups
        ]

    def wants_team(self, plan: Renews) -> bool:
        """Whether what differs from step to step, which is attention, has work for several threads."""
        kernels = (part for part in self._parts if isinstance(part, _Kernels))
        keys = (key for part in kernels for key, *_ in part.renewed)
        return any(plan.renewed(key)[1] > 1 for key in keys)

    def replay(self, plan: Renews, most_threads: int) -> ForwardOutput:
        """For inputs that lie where those of the recorded forward lay. Bits do not depend on threads.
        Logits and hidden states lie where the recorded forward's lay."""
        for part in self._parts:
            if isinstance(part, _Kernels):
                part.run(plan, most_threads)
            else:
                for call in part:
                    _repeat(call)
        return self._output


class _Kernels:
    """Consecutive kernels. ``renewed``: for each of attention's keys, its positions in the arguments
    and the kernels concerned."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        sequence = find_kernel("sequence")
        self._run_sequence = sequence.run_sequence
        width = max(len(call.arguments) for call in calls)
        # As they are told at first, counters at 0; the kernels themselves work on the copy.
        self._arguments = np.zeros((len(calls), width), dtype=np.int64)
        self._told = self._arguments.copy()
        self._nodes = np.zeros((len(calls), sequence.NODE_INTS), dtype=np.int64)
        renewals: dict[tuple[object, int], list[int]] = {}
        for index, call in enumerate(calls):
            self._arguments[index, : len(call.arguments)] = call.arguments
            self._nodes[index] = call.address, self._told[index].ctypes.data, call.num_threads
            if call.renewal is not None:
                key = call.renewal.key, call.renewal.place
                renewals.setdefault(key, []).append(index)
        self.renewed = [(*key, np.array(rows)) for key, rows in renewals.items()]

    def run(self, plan: Renews, most_threads: int) -> None:
        np.copyto(self._told, self._arguments)
        for key, place, rows in self.renewed:
            number, num_threads = plan.renewed(key)
            self._told[rows, place] = number
            self._nodes[rows, 2] = num_threads
        nodes = self._nodes
        num_threads = min(most_threads, int(nodes[:, 2].max()))
        self._run_sequence(torch.from_numpy(nodes), num_threads)


def _repeat(call: TensorCall) -> None:
    results = call.function(*call.arguments, **call.named)
    if call.results is None:
        return
    made = (results,) if isinstance(results, torch.Tensor) else results
    for place, result in zip(call.results, made, strict=True):
        place.copy_(result)
