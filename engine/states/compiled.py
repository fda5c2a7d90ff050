"""Operations with a state on CPUs, as compiled kernels that read rows and states where they lie.

A row has the same bits whatever shares its step, however rows are cut into steps, whether it is known,
kept or a draft, in any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.batch import Bucket
from engine.kernels import LANES, Renewal, Scratch, find_kernel
from engine.states.plan import Convolution, Recurrence, kept_states
from engine.states.work import StateWork
from kvpool.state_store import ConvolutionShape, StateShape, StateStore

_WORTH_A_TEAM = 1 << 17
"""Numbers of states times entries: fewer are done sooner than a team has begun."""
_CHANNELS_FOR_A_TEAM = 1 << 15
"""Channels times entries, likewise."""
_TASKS_PER_THREAD = 4

Key = tuple[str, StateShape]
"""Operations of one shape share their arguments for a step."""


class CompiledStates:
    """Makes plans over a store (``ModelStates``)."""

    can_capture = True
    can_graph = False

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._taps: dict[int, _Taps] = {}
        self.scratch = Scratch()

    def reserve(self, bucket: Bucket, most_nodes: int) -> None:
        raise NotImplementedError

    def plan(self, work: StateWork, bucket: Bucket | None = None) -> CompiledPlan:
        del bucket
        return CompiledPlan(self, work)

    def taps(self, op: int, asked: Convolution) -> _Taps:
        """Returns an operation's weights in the kernel's layout. A recording holds the weights it was
        recorded with."""
        held = self._taps.get(op)
        if held is None or not held.serves(asked):
            held = self._taps[op] = _Taps(asked)
        return held


class _Taps:
    """``weight`` ``[width, channels]`` and ``bias``, in float32, filled up to whole lanes."""

    def __init__(self, asked: Convolution) -> None:
        self._given = asked.weight, asked.bias
        channels, width = asked.weight.shape
        rows = torch.zeros(width + 1, -(-channels // LANES) * LANES)
        rows[:width, :channels] = asked.weight.t()
        if asked.bias is not None:
            rows[width, :channels] = asked.bias
        self.weight, self.bias = rows[:width], rows[width]

    def serves(self, asked: Convolution) -> bool:
        pairs = zip(self._given, (asked.weight, asked.bias), strict=True)
        return all(_is_same(*pair) for pair in pairs)


def _is_same(held: Tensor | None, given: Tensor | None) -> bool:
    """Whether they are the same memory, which is held."""
    if held is given:
        return True
    if held is None or given is None:
        return False
    mine, theirs = ((e.data_ptr(), e.shape, e.stride(), e.dtype) for e in (held, given))
    return mine == theirs


class _Step(NamedTuple):
    """``record``: where kernels read it, an ``Address``."""

    record: Any
    num_threads: int


class CompiledPlan:
    """One step's operations (``StatePlan``)."""

    def __init__(self, backend: CompiledStates, work: StateWork) -> None:
        self._backend = backend
        self._work = work
        self._walks, self._entries = (torch.from_numpy(each) for each in work[:2])
        self._num_threads = torch.get_num_threads()
        self._steps: dict[Key, _Step] = {}

    def convolve(self, op: int, asked: Convolution) -> Tensor:
        kernel, store = find_kernel("short_convolution"), self._backend.store
        rows = asked.rows if asked.rows.stride(-1) == 1 else asked.rows.contiguous()
        taps = self._backend.taps(op, asked)
        channels, width = shape = asked.shape
        key = "states", shape
        step = self._step(key)
        output = rows.new_empty(rows.shape)
        arguments = kernel.Arguments(
            rows=rows,
            output=output,
            weight=taps.weight,
            bias=taps.bias,
            states=store.states[op],
            kept=store.rows[op],
            step=step.record,
            row=rows.stride(0),
            num_rows=len(rows),
            channels=channels,
            width=width,
            weight_row=taps.weight.stride(0),
            block=kernel.block_of(channels, _TASKS_PER_THREAD * self._num_threads),
            silu=asked.silu,
        )
        self._run(kernel.convolve, arguments, key, taps)
        return output

    def recur(self, op: int, asked: Recurrence) -> Tensor:
        kernel, store = find_kernel("recurrence"), self._backend.store
        query, key, value = (
            each if each.stride(-1) == 1 else each.contiguous() for each in asked[:3]
        )
        log_decay, shape = asked.log_decay.float(), asked.shape
        if shape.num_decays > 1 and log_decay.stride(-1) != 1:
            log_decay = log_decay.contiguous()
        beta = find_kernel("records").NOWHERE if asked.beta is None else asked.beta.float()
        asked_key = "states", shape
        output = value.new_empty(value.shape)
        arguments = kernel.Arguments(
            query=query,
            key=key,
            value=value,
            output=output,
            log_decay=log_decay,
            beta=beta,
            states=store.states[op],
            kept=store.rows[op],
            step=self._step(asked_key).record,
            query_row=query.stride(0),
            query_head=query.stride(1),
            key_row=key.stride(0),
            key_head=key.stride(1),
            value_row=value.stride(0),
            value_head=value.stride(1),
            decay_row=log_decay.stride(0),
            decay_head=log_decay.stride(1),
            beta_row=0 if asked.beta is None else beta.stride(0),
            beta_head=0 if asked.beta is None else beta.stride(1),
            num_rows=len(value),
            key_heads=shape.key_heads,
            heads=shape.heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            num_decays=shape.num_decays,
            row_size=shape.row_size,
            normalises=asked.normalises,
            scale=asked.scale,
        )
        self._run(kernel.recur, arguments, asked_key, None)
        return output

    def keep(self) -> Callable[[], None]:
        return kept_states(self._backend.store, self._work.walks[:, 2].tolist())

    def renewed(self, key: Any) -> tuple[int, int]:
        """As ``engine.kernels.Renews`` has it. ``key``: a ``Key``."""
        step = self._step(key)
        return step.record.data_ptr(), step.num_threads

    def wants_team(self, key: Any) -> bool:
        """As ``engine.kernels.Renews`` has it."""
        return self._step(key).num_threads > 1

    def _run(self, loop: Any, arguments: Any, key: Key, held: object) -> None:
        packed, dtypes = loop.layout.pack(arguments)
        held = held, arguments.states, arguments.kept
        renewal = Renewal(key, loop.layout.places["step"], held)
        loop.loop(dtypes).run(packed, self._step(key).num_threads, renewal)

    def _step(self, key: Key) -> _Step:
        """Returns what operations of one kind share, made once."""
        if key not in self._steps:
            self._steps[key] = self._made(key[1])
        return self._steps[key]

    def _made(self, shape: StateShape) -> _Step:
        walks, entries = self._walks, self._entries
        num_threads, num_parts = self._num_threads, 1
        numbers = len(entries) * torch.Size(shape.state).numel()
        if isinstance(shape, ConvolutionShape):
            worth, size = (
                _CHANNELS_FOR_A_TEAM,
                find_kernel("short_convolution").scratch_floats(shape.width),
            )
        else:
            dims = self._work.most_buffers, shape.key_dim, shape.value_dim
            worth, size = _WORTH_A_TEAM, find_kernel("recurrence").scratch_floats(*dims)
            num_tasks = max(1, len(walks) * shape.heads)
            num_parts = -(-_TASKS_PER_THREAD * num_threads // num_tasks)
        scratch = self._backend.scratch.of(size * num_threads)
        told = find_kernel("walks").Step(
            walks,
            entries,
            scratch,
            scratch_size=size,
            num_walks=len(walks),
            num_rows=self._work.num_rows,
            num_parts=num_parts,
            num_threads=num_threads,
        )
        record = find_kernel("records").packed(told)
        return _Step(record, num_threads if numbers >= worth else 1)
