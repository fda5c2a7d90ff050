"""A forward of any number of rows, from what forwards of three shapes did.

All that a forward's calls are told, sizes, strides, addresses of inputs and of what it makes, grows by
equal steps with its rows and with its rows that have logits: a number is ``a + b * rows + c * logits``.
Three samples determine a, b and c of each. Whether a model does the same for other numbers of rows,
``check`` tells from a sample of them, before they are replayed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from engine.batch import ForwardOutput
from engine.capture.recorder import KernelCall, TensorCall, Told, View, aligned
from engine.capture.sample import (
    NotRecordedError,
    Numbers,
    Sample,
    Shape,
    fixed_threads,
    numbers_in,
)
from engine.kernels import Renews, find_kernel, threads_for_each

_MOST_KEPT = 32
"""Shapes whose arguments are kept as they were last; those of another are made anew."""
_SAMPLED = (Shape(4, 2), Shape(7, 2), Shape(7, 5))
"""Shapes that are recorded. A single row's strides may be any."""
_UNEVEN = "what calls are told does not grow by equal steps with the rows"


class Recording:
    """Runs a forward of any shape again, as ``sample`` records it."""

    def __init__(self, sample: Callable[[Shape], Sample]) -> None:
        """``sample``: records a forward of a shape. Raises NotRecordedError."""
        sample(_SAMPLED[0])  # what is made once is there then
        first, more_rows, more_logits = map(sample, _SAMPLED)
        self._sample = first
        self._check_calls(more_rows)
        self._check_calls(more_logits)
        one, two, three = _SAMPLED
        rows, logits = two.num_rows - one.num_rows, three.num_logits - two.num_logits
        self._by_rows = _slope(first.numbers, more_rows.numbers, rows)
        self._by_logits = _slope(more_rows.numbers, more_logits.numbers, logits)
        self._base = first.numbers - self._at(_SAMPLED[0], 0)
        self._room = Shape(0, 0)
        self._memory, self._placed = _Memory([], []), self._base
        self._forwards: OrderedDict[Shape, _Forward] = OrderedDict()
        renewals = (call.renewal for call in first.kernels())
        self._renewed = {each.key for each in renewals if each is not None}
        groups = groupby(first.calls, lambda call: isinstance(call, KernelCall))
        self._groups: list[_Kernels | list[TensorCall]] = [
            _Kernels(cast(list[KernelCall], [*calls]))
            if are_kernels
            else cast(list[TensorCall], [*calls])
            for are_kernels, calls in groups
        ]

    def _at(self, shape: Shape, base: Numbers | int) -> Numbers:
        found: Numbers = base + self._by_rows * shape.num_rows + self._by_logits * shape.num_logits
        return found

    def check(self, shape: Shape, sample: Sample) -> None:
        """Raises NotRecordedError unless ``sample``, which is of this shape, did what a replay would do.
        Of a single row strides may be any."""
        self._check_calls(sample)
        if not np.array_equal(self._at(shape, self._base), sample.numbers):
            raise NotRecordedError(_UNEVEN)

    def _check_calls(self, sample: Sample) -> None:
        if not self._sample.is_like(sample):
            raise NotRecordedError("other calls are made for other numbers of rows")

    @property
    def has_kernels_alone(self) -> bool:
        return all(isinstance(group, _Kernels) for group in self._groups)

    def num_bytes(self, shape: Shape) -> int:
        """Returns the memory that forwards up to a shape take, with those that there were."""
        room = Shape(*map(max, shape, self._room))
        return self._memory.num_bytes if room == self._room else self._planned(room).num_bytes

    def _planned(self, room: Shape) -> _Memory:
        sizes = self._at(room, self._base)[: len(self._sample.blocks)]
        return _Memory(sizes.tolist(), self._sample.events)

    def wants_team(self, plan: Renews) -> bool:
        """Whether what differs from step to step, which is attention, has work for several threads."""
        return any(map(plan.wants_team, self._renewed))

    def replay(self, shape: Shape, plan: Renews, most_threads: int) -> ForwardOutput:
        """For inputs that lie where those of all forwards lie. Bits do not depend on threads. Results are
        overwritten by the next replay."""
        forward = self._forwards.get(shape)
        if forward is None:
            forward = self._forwards[shape] = self._made(shape)
            if len(self._forwards) > _MOST_KEPT:
                self._forwards.popitem(last=False)
        self._forwards.move_to_end(shape)
        for part in forward.parts:
            part(plan, most_threads)
        return forward.output

    def _made(self, shape: Shape) -> _Forward:
        room = Shape(*map(max, shape, self._room))
        sample = self._sample
        if room != self._room:
            self._forwards.clear()
            self._room, self._memory = room, self._planned(room)
            self._memory.allocate()
            inside = sample.owners >= 0
            self._placed = self._base.copy()
            self._placed[inside] += self._memory.addresses[sample.owners[inside]]
        memory, numbers = self._memory, self._at(shape, self._placed)
        rest = iter(numbers[len(sample.blocks) : sample.num_told].tolist())
        made = {id(told): _values(told, rest, memory) for told in sample.every_told()}
        of_kernels = numbers[sample.num_told :].reshape(len(sample.kernels()), -1)
        first, parts = 0, []
        for group in self._groups:
            if isinstance(group, _Kernels):
                last = first + len(group.codes)
                parts.append(group.told(of_kernels[first:last]))
                first = last
            else:
                parts.append(partial(_repeat, group, made))
        logits, hidden = made[id(sample.output)]
        return _Forward(parts, ForwardOutput(logits, hidden))


def _slope(one: Numbers, other: Numbers, step: int) -> Numbers:
    slope, rest = np.divmod(other - one, step)
    if rest.any():
        raise NotRecordedError(_UNEVEN)
    return slope


_Part = Callable[[Renews, int], None]


class _Forward(NamedTuple):
    """A shape's: its parts in their order, and where its results are."""

    parts: list[_Part]
    output: ForwardOutput


class _Memory:
    """Memory for blocks of so many bytes (``sizes``). One that was given back is taken again."""

    def __init__(self, sizes: Sequence[int], events: Sequence[int]) -> None:
        free: defaultdict[int, list[int]] = defaultdict(list)
        self._buffer_of = [0] * len(sizes)
        self._sizes: list[int] = []
        for event in events:
            if event < 0:
                free[sizes[~event]].append(self._buffer_of[~event])
                continue
            if not free[sizes[event]]:
                free[sizes[event]].append(len(self._sizes))
                self._sizes.append(sizes[event])
            self._buffer_of[event] = free[sizes[event]].pop()
        self.num_bytes = sum(self._sizes)
        self.addresses = np.zeros(0, dtype=np.int64)
        self._blocks: list[torch.Tensor] = []

    def allocate(self) -> None:
        lying = [torch.from_numpy(aligned(size)) for size in self._sizes]
        self._blocks = [lying[buffer] for buffer in self._buffer_of]
        self.addresses = np.array([each.data_ptr() for each in self._blocks], dtype=np.int64)

    def tensor(self, view: View, numbers: Sequence[int]) -> torch.Tensor:
        rank = len(numbers) // 2
        lies = numbers[:rank], numbers[rank : 2 * rank], numbers[-1]
        if view.base is not None:
            return view.base.as_strided(*lies)
        assert view.block is not None
        block = self._blocks[view.block]
        return block.view(view.dtype).as_strided(*lies)


def _values(told: Told, numbers: Iterator[int], memory: _Memory) -> Any:
    leaves: list[Any] = []
    for leaf in told.leaves:
        own = [next(numbers) for _ in numbers_in(leaf)]
        if isinstance(leaf, View):
            leaves.append(memory.tensor(leaf, own))
        else:
            leaves.append(own[0] if own else leaf)
    return tree_unflatten(leaves, told.spec)


class _Kernels:
    """Consecutive kernels: their machine ``codes``. ``_threads``: how many each has, 0: as many as its
    numbers are worth."""

    def __init__(self, kernels: Sequence[KernelCall]) -> None:
        self.codes = np.array([call.address for call in kernels])
        self._threads = np.array([fixed_threads(call) for call in kernels])
        renewals: defaultdict[tuple[Hashable, int], list[int]] = defaultdict(list)
        for index, call in enumerate(kernels):
            if call.renewal is not None:
                renewals[call.renewal.key, call.renewal.place].append(index)
        self._renewed = [(*key, np.array(rows)) for key, rows in renewals.items()]

    def told(self, numbers: Numbers) -> _Part:
        """Returns what runs them with these numbers: for each what its work is worth, then its
        arguments."""
        sequence = find_kernel("sequence")
        # As they are told at first, counters at 0; the kernels themselves work on the copy.
        arguments = np.ascontiguousarray(numbers[:, 1:])
        told = arguments.copy()
        nodes = np.zeros((len(arguments), sequence.NODE_INTS), dtype=np.int64)
        worth = threads_for_each(numbers[:, 0])
        nodes[:, 0] = self.codes
        nodes[:, 1] = told.ctypes.data + np.arange(len(told)) * told.strides[0]
        nodes[:, 2] = np.where(self._threads > 0, self._threads, worth)
        as_tensor = torch.from_numpy(nodes)

        def run(plan: Renews, most_threads: int) -> None:
            np.copyto(told, arguments)
            for key, place, rows in self._renewed:
                number, num_threads = plan.renewed(key)
                told[rows, place] = number
                nodes[rows, 2] = num_threads
            sequence.run_sequence(as_tensor, min(most_threads, int(nodes[:, 2].max())))

        return run


def _repeat(
    calls: Sequence[TensorCall], made: dict[int, Any], plan: Renews, most_threads: int
) -> None:
    del plan, most_threads
    for call in calls:
        arguments, named = made[id(call.told)]
        results = call.function(*arguments, **named)
        if call.results is not None:
            places = tree_leaves(made[id(call.results)])
            for place, result in zip(places, tree_leaves(results), strict=True):
                place.copy_(result)
