"""Graphs on a CPU: a replay runs what was captured once more, and sees to it that a graph would do the
same.

A graph repeats kernels, with the shapes, numbers and addresses that they had. So does a replay here, by
running the captured closure: what the host worked out since, it does not see. Every operation, every
shape, every number and every address of memory that was there before has to be as it was when it was
captured; and neither may wait for what the device holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from engine.batch import ForwardOutput
from engine.capture.replays import Graph

_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class WaitsForDeviceError(RuntimeError):
    """As CUDA's "operation not permitted when stream is capturing"."""


class _Log(TorchDispatchMode):
    """Logs the operations that are done, with what, and where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self._made: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITING or _indexes_by_mask(func, args):
            raise WaitsForDeviceError(f"{func} waits for the device")
        flat, _ = tree_flatten((args, kwargs or {}))
        told = tuple(self._seen(each) for each in flat)
        result = func(*args, **(kwargs or {}))
        made, _ = tree_flatten(result)
        for each in made:
            if isinstance(each, torch.Tensor):
                self._keep(each)
        self.calls.append((str(func), told, tuple(map(_shape, made))))
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._lying:
            self._made.setdefault(address, len(self._made))
        self._kept.append(tensor)

    _lying: frozenset[int] = frozenset()

    def _seen(self, value: object) -> object:
        """A tensor by its shape, and by where it lies unless it was made on the way."""
        if not isinstance(value, torch.Tensor):
            return value if isinstance(value, int | float | str | bool | type(None)) else str(value)
        address = value.untyped_storage().data_ptr()
        number = self._made.get(address)
        if number is not None:
            return ("made", number, value.storage_offset(), _shape(value))
        # Memory that was there before; it cannot be made later, since it is kept.
        self._lying = self._lying | {address}
        return ("lies", value.data_ptr(), _shape(value))


@contextmanager
def _logged() -> Iterator[_Log]:
    """A launch of one of Triton's programs is one operation, whatever its interpreter does."""
    from triton.runtime.interpreter import GridExecutor

    plain, log = GridExecutor.__call__, _Log()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        if not torch._C._len_torch_dispatch_stack():  # within an operation, which was logged
            return plain(self, *args, **kwargs)
        with _disable_current_modes():
            flat, _ = tree_flatten((self.grid, args, kwargs))
            log.calls.append((self.fn.__name__, tuple(map(log._seen, flat)), ()))
            return plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, log:
        patch.setattr(GridExecutor, "__call__", launch)
        yield log


def _shape(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return None
    return (tuple(value.shape), value.stride(), str(value.dtype))


def _indexes_by_mask(func: Any, args: Any) -> bool:
    if func not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return False
    return any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in args[1]
    )


class _Replayed:
    def __init__(self, run: Callable[[], ForwardOutput]) -> None:
        self._run = run
        with _logged() as log:
            self.output = run()
        self._calls = log.calls
        self.num_replays = 0

    def replay(self) -> None:
        with _logged() as log:
            output = self._run()
        for now, then in zip(log.calls, self._calls, strict=True):
            assert now == then, (now, then)
        for place, value in zip(_results(self.output), _results(output), strict=True):
            place.copy_(value)
        self.num_replays += 1


def _results(output: ForwardOutput) -> list[torch.Tensor]:
    tokens = [] if output.tokens is None else [output.tokens]
    return [output.logits, *output.hidden, *tokens]


class ReplayingMaker:
    """See ``GraphMaker``. ``num_allowed``: for so many there is room."""

    def __init__(self, num_allowed: int | None = None) -> None:
        self.graphs: list[_Replayed] = []
        self._num_allowed = num_allowed

    def capture(self, run: Callable[[], ForwardOutput]) -> Graph:
        run()
        graph = _Replayed(run)
        self.graphs.append(graph)
        return Graph(graph.replay, graph.output)

    def has_room(self) -> bool:
        return self._num_allowed is None or len(self.graphs) < self._num_allowed

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)
