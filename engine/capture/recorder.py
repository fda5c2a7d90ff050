"""Writes down what a forward does: compiled kernels, torch's operations between them, and the memory that
they make."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from engine.capture.stand_ins import kernels_for
from engine.kernels import Renewal, watch_kernels

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_ALIGNMENT = 64


class KernelCall(NamedTuple):
    """``address``: of its machine code."""

    address: int
    arguments: array[int]
    num_threads: int
    renewal: Renewal | None


class View(NamedTuple):
    """A strided tensor: ``numbers`` are its sizes, its strides and its offset. It lies in the block with
    the number ``block``, or, if that is None, where ``base`` does."""

    block: int | None
    base: torch.Tensor | None
    dtype: torch.dtype
    numbers: tuple[int, ...]


class Told(NamedTuple):
    """Arguments or results, as ``tree_flatten`` has them, with a ``View`` for each strided tensor."""

    leaves: list[Any]
    spec: TreeSpec


class TensorCall(NamedTuple):
    """One of torch's operations; ``told``: its positional and its named arguments. ``results``: the
    tensors that it made, whose place is kept; None where it writes to what it is given."""

    function: Callable[..., Any]
    told: Told
    results: Told | None


class Recorder(TorchDispatchMode):
    """``calls``, in their order. ``reason``: why they cannot be run again; None: they can.

    ``blocks``: addresses and bytes of the memory that the forward asked for, each at an address of its
    own. ``events``: numbers of blocks, in the order in which they were asked for (``n``) and given back
    (``~n``). A forward that does the same calls in the same order may give a block the memory of one that
    was given back.

    Few kinds of torch's operations stand between a layer's kernels: operations on elements, copies, and
    rows that are chosen. They are written down as kernels, too (``engine.capture.stand_ins``).
    """

    def __init__(self, runs: bool = True) -> None:
        """``runs``: kernels run, too. Without them results are 0, which is a row that there is."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._runs = runs
        self.calls: list[KernelCall | TensorCall] = []
        self.reason: str | None = None
        self.blocks: list[tuple[int, int]] = []
        self.events: list[int] = []
        self.held: list[Any] = []
        """Keeps alive what kernels that stand for operations point to."""
        self._buffers: list[Any] = []
        self._block_at: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would load its whole compiler to leave this alone."""
        return False

    @contextmanager
    def watch(self) -> Iterator[None]:
        with self, watch_kernels(self):
            yield

    def tell(self, values: Any) -> Told:
        """Describes arguments, results or an output. It does not keep blocks from being given back."""
        leaves, spec = tree_flatten(values)
        return Told([self._view(each) for each in leaves], spec)

    def _view(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        block = self._block_at.get(value.untyped_storage().data_ptr())
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        return View(block, value if block is None else None, value.dtype, numbers)

    def note_kernel(
        self, address: int, arguments: array[int], num_threads: int, renewal: Renewal | None
    ) -> bool:
        self.calls.append(KernelCall(address, arguments, num_threads, renewal))
        return self._runs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        named = kwargs or {}
        result = func(*args, **named)
        if func._schema.name.partition("::")[2] in _ALLOCATIONS:
            return self._block_like(result)
        if isinstance(result, torch.Tensor) and result.numel() == 0:
            return result  # nothing is to be made again
        is_told_more = any(each is not None and each is not False for each in named.values())
        kernels = None if is_told_more else kernels_for(func, args, result)
        if kernels is None:
            return self._note(func, args, named, result)
        place = result if func._schema.is_mutable else self._filled(result)
        self.held.append(self.tell(args))
        for kernel, arguments, num_threads in kernels(place):
            self.calls.append(KernelCall(kernel.address, arguments, num_threads, None))
        return place

    def _block_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor as this one in a block."""
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return tensor
        # Of what torch has allocated some is left over, here more and there less.
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
        num_bytes = int(last + 1) * tensor.itemsize
        buffer, number = aligned(num_bytes), len(self.blocks)
        if not self._runs:
            buffer[:] = 0
        self._buffers.append(buffer)
        lent = buffer[:]
        self._block_at[lent.ctypes.data] = number
        self.blocks.append((lent.ctypes.data, num_bytes))
        self.events.append(number)
        # torch refers to it for as long as a tensor or a view of one does.
        finalize(lent, self.events.append, ~number).atexit = False
        plain = torch.from_numpy(lent).view(tensor.dtype)
        return plain.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._block_like(tensor)
        return place if place is tensor else place.copy_(tensor)

    def _note(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
        """Returns the result, in a place that a replay writes to."""
        told = self.tell((args, named))
        if func._schema.is_mutable:
            self.calls.append(TensorCall(func, told, None))
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
        places = tree_map(self._filled, result)
        self.calls.append(TensorCall(func, told, self.tell(places)))
        return places


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Returns bytes that begin where a line of a cache does."""
    buffer = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes]


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
    return func is not torch.ops.aten.index.Tensor or any(
        each is not None and each.dtype in masks for each in args[1]
    )
