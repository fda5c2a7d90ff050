"""The calls of one forward as numbers, which can be compared with those of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import ForwardOutput
from engine.capture.recorder import KernelCall, Recorder, TensorCall, Told, View
from engine.kernels import Threads

Numbers = NDArray[np.int64]


class Shape(NamedTuple):
    """Rows of a forward, and those of them that have logits."""

    num_rows: int
    num_logits: int


class NotRecordedError(ValueError):
    """Says why a model's forwards cannot be recorded."""


class Sample:
    """The calls of a forward that ``recorder`` has watched, and that returned ``output``: all numbers in
    one row, and what has to be equal in each recording. Made while the output lives."""

    def __init__(self, recorder: Recorder, output: ForwardOutput) -> None:
        if recorder.reason is not None:
            raise NotRecordedError(recorder.reason)
        self.calls, self.held = recorder.calls, recorder.held
        self.output = recorder.tell((output.logits, output.hidden))
        self.blocks, self.events = recorder.blocks, list(recorder.events)
        self.numbers = np.array([*self._numbers()], dtype=np.int64)
        in_leaves = (numbers_in(leaf) for told in self.every_told() for leaf in told.leaves)
        self.num_told = len(self.blocks) + sum(map(len, in_leaves))
        """Before it are the bytes of blocks and what torch's operations are told, then the kernels'."""
        self.owners = self._owners()
        starts = np.array([address for address, _ in self.blocks] or [0], dtype=np.int64)
        inside = self.owners >= 0
        self.numbers[inside] -= starts[self.owners[inside]]

    def _numbers(self) -> Iterator[int]:
        for _, num_bytes in self.blocks:
            yield num_bytes
        for told in self.every_told():
            for leaf in told.leaves:
                yield from numbers_in(leaf)
        kernels = self.kernels()
        width = max((len(call.arguments) for call in kernels), default=0)
        for call in kernels:
            arguments = [*call.arguments, *[0] * (width - len(call.arguments))]
            if call.renewal is not None:
                arguments[call.renewal.place] = 0
            yield getattr(call.num_threads, "numbers", 0)
            yield from arguments

    def every_told(self) -> Iterator[Told]:
        yield self.output
        for call in self.calls:
            if isinstance(call, TensorCall):
                yield call.told
                if call.results is not None:
                    yield call.results

    def kernels(self) -> list[KernelCall]:
        return [call for call in self.calls if isinstance(call, KernelCall)]

    def _owners(self) -> Numbers:
        """Returns for each number the block that it is an address in, or -1."""
        owners = np.full(len(self.numbers), -1)
        if self.blocks:
            order = np.argsort([address for address, _ in self.blocks])
            firsts, sizes = np.array(self.blocks, dtype=np.int64)[order].T
            found = np.searchsorted(firsts, self.numbers, side="right") - 1
            inside = (found >= 0) & (self.numbers <= (firsts + sizes)[found])
            owners[inside] = order[found[inside]]
        return owners

    def is_like(self, other: Sample) -> bool:
        """Whether both did the same calls, with other numbers at most."""
        return (
            len(self.numbers) == len(other.numbers)
            and np.array_equal(self.owners, other.owners)
            and len(self.calls) == len(other.calls)
            and all(map(_are_alike, self.calls, other.calls))
            and _are_told_alike(self.output, other.output)
        )


def numbers_in(leaf: Any) -> tuple[int, ...]:
    """Returns those of an argument that may depend on the rows."""
    if isinstance(leaf, View):
        return leaf.numbers
    return (leaf,) if isinstance(leaf, int) and not isinstance(leaf, bool) else ()


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, KernelCall) and isinstance(other, KernelCall):
        return (one.address, len(one.arguments), _renewed(one), fixed_threads(one)) == (
            *(other.address, len(other.arguments), _renewed(other), fixed_threads(other)),
        )
    if isinstance(one, TensorCall) and isinstance(other, TensorCall):
        return (
            one.function is other.function
            and _are_told_alike(one.told, other.told)
            and (one.results is None) == (other.results is None)
            and (one.results is None or _are_told_alike(one.results, cast(Told, other.results)))
        )
    return False


def _renewed(call: KernelCall) -> Any:
    return None if call.renewal is None else (call.renewal.key, call.renewal.place)


def fixed_threads(call: KernelCall) -> int:
    """Returns in how many threads a kernel always runs; 0: the numbers it works on or the plan tell."""
    is_told = call.renewal is not None or isinstance(call.num_threads, Threads)
    return 0 if is_told else call.num_threads


def _are_told_alike(one: Told, other: Told) -> bool:
    return one.spec == other.spec and all(map(_is_same_leaf, one.leaves, other.leaves))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, View) and isinstance(other, View):
        mine, theirs = ((e.block, e.dtype, len(e.numbers), _storage(e)) for e in (one, other))
        return mine == theirs
    if numbers_in(one) and numbers_in(other):
        return True
    return one is other or (not isinstance(one, torch.Tensor | View) and bool(one == other))


def _storage(view: View) -> int | None:
    return None if view.base is None else view.base.untyped_storage().data_ptr()
