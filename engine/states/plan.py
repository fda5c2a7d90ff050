"""Inputs of operations with a state, and their reference in plain loops: the oracle of the kernels, and
the implementation for devices that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.batch import Bucket
from engine.kernels.walk_layout import Entry, Walk
from engine.states.work import StateWork, state_work
from kvpool.state_store import ConvolutionShape, RecurrenceShape, StateShape, StateStore


class Convolution(NamedTuple):
    """``rows`` ``[num_rows, channels]``, ``weight`` ``[channels, width]``, oldest tap first, ``bias``
    ``[channels]``. ``silu``: of what comes out."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None
    silu: bool = False

    @property
    def shape(self) -> ConvolutionShape:
        return ConvolutionShape(*self.weight.shape)


class Recurrence(NamedTuple):
    """A row's ``S = exp(log_decay) S + k u^T`` and what it reads, ``S^T q``.

    ``query``, ``key``: ``[num_rows, key_heads, key_dim]``; ``value``: ``[num_rows, heads, value_dim]``;
    ``log_decay``: ``[num_rows, heads]``, or ``[num_rows, heads, key_dim]``. ``beta``: ``[num_rows,
    heads]``: then u = beta (v - S^T k), of the state that has decayed (the gated delta rule, arXiv
    2412.06464); None: u = v (Mamba 2, arXiv 2405.21060). ``normalises``: queries and keys are divided by
    their lengths, of squares plus 1e-6. ``scale``: of queries, after it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    normalises: bool = False
    scale: float = 1.0

    @property
    def shape(self) -> RecurrenceShape:
        _, key_heads, key_dim = self.key.shape
        _, heads, value_dim = self.value.shape
        num_decays = 1 if self.log_decay.dim() == 2 else key_dim
        return RecurrenceShape(key_heads, heads, key_dim, value_dim, num_decays)


class StatePlan(Protocol):
    """The answer to a model's operations with a state: one step's plan, or the loader's probe.
    ``op``: the operation's number in the model."""

    def convolve(self, op: int, asked: Convolution) -> Tensor:
        """Returns ``[num_rows, channels]``, in the rows' type. Rows of padding are finite."""

    def recur(self, op: int, asked: Recurrence) -> Tensor:
        """Returns ``[num_rows, heads, value_dim]``, in the values' type."""

    def keep(self) -> Callable[[], None]:
        """Returns what puts back the states that the step reads and overwrites."""


class ModelStates(Protocol):
    """A model's operations with a state over one store; plans its steps. ``can_capture``: these may be
    recorded on a CPU and run again, ``can_graph``: captured on a GPU, as an attention backend's."""

    can_capture: bool
    can_graph: bool

    @property
    def store(self) -> StateStore: ...

    def plan(self, work: StateWork, bucket: Bucket | None = None) -> StatePlan: ...

    def reserve(self, bucket: Bucket, most_nodes: int) -> None:
        """Makes room for all steps that are padded to a bucket, of requests with at most so many draft
        nodes: as ``AttentionBackend.reserve``."""


class StateProbe:
    """Stands in for a plan and notes what each operation hands over."""

    def __init__(self) -> None:
        self.shapes: list[StateShape] = []

    def convolve(self, op: int, asked: Convolution) -> Tensor:
        del op
        self.shapes.append(asked.shape)
        return asked.rows.new_zeros(asked.rows.shape)

    def recur(self, op: int, asked: Recurrence) -> Tensor:
        del op
        self.shapes.append(asked.shape)
        return asked.value.new_zeros(asked.value.shape)

    def keep(self) -> Callable[[], None]:
        raise NotImplementedError("a probe is run once")


class PlainStates:
    """Plain loops in float32 over a step's walks (``ModelStates``, ``StatePlan``)."""

    can_capture = can_graph = False

    def __init__(self, store: StateStore, work: StateWork | None = None) -> None:
        self.store = self._store = store
        work = work or state_work(())
        self._walks = [Walk(*each) for each in work.walks.tolist()]
        self._entries = [Entry(*each) for each in work.entries.tolist()]

    def keep(self) -> Callable[[], None]:
        return kept_states(self.store, (walk.source for walk in self._walks))

    def reserve(self, bucket: Bucket, most_nodes: int) -> None:
        raise NotImplementedError

    def plan(self, work: StateWork, bucket: Bucket | None = None) -> PlainStates:
        del bucket
        return PlainStates(self.store, work)

    def convolve(self, op: int, asked: Convolution) -> Tensor:
        states, kept = self._store.states[op], self._store.rows[op]
        rows, weight = asked.rows.float(), asked.weight.float()
        before = weight.shape[1] - 1
        output = torch.zeros_like(rows)
        inputs = [rows[e.row] if e.row >= 0 else kept[e.read].clone() for e in self._entries]
        for walk in self._walks:
            window = states[walk.source].clone() if walk.source >= 0 else _zeros(states)
            for at in range(walk.first, walk.end):
                entry, seen, above = self._entries[at], [inputs[at]], self._entries[at].parent
                num_missing = before
                while num_missing and above >= 0:
                    seen.append(inputs[above])
                    above, num_missing = self._entries[above].parent, num_missing - 1
                taps = [*window[before - num_missing :], *seen[::-1]]
                if entry.row >= 0:
                    found = torch.zeros_like(rows[0])
                    for tap, each in enumerate(taps):
                        found += weight[:, tap] * each
                    output[entry.row] = found
                for slot in (entry.store, entry.snapshot):
                    if slot >= 0:
                        states[slot] = torch.stack(taps[1:]) if before else states[slot]
        for entry in self._entries:
            if entry.keep >= 0:
                kept[entry.keep] = rows[entry.row]
        if asked.bias is not None:
            output += asked.bias.float()
        return (torch.nn.functional.silu(output) if asked.silu else output).to(asked.rows.dtype)

    def recur(self, op: int, asked: Recurrence) -> Tensor:
        states, kept = self._store.states[op], self._store.rows[op]
        query, key, value, log_decay = (each.float() for each in asked[:4])
        if asked.normalises:
            query, key = _normalised(query), _normalised(key)
        parts = [key, value, log_decay.exp()]
        beta = torch.ones_like(value[..., 0]) if asked.beta is None else asked.beta.float()
        shape = asked.shape
        sizes = [each[0].numel() for each in (*parts, beta)]
        packed = torch.cat([each.flatten(1) for each in (*parts, beta)], dim=1)
        inputs = [packed[e.row] if e.row >= 0 else kept[e.read].clone() for e in self._entries]
        share = shape.heads // shape.key_heads
        output = torch.zeros_like(value)
        for walk in self._walks:
            start = states[walk.source].clone() if walk.source >= 0 else _zeros(states)
            buffers = {0: start}
            for at in range(walk.first, walk.end):
                entry = self._entries[at]
                k, v, decay, weight = inputs[at].split(sizes)
                k = k.view(shape.key_heads, -1).repeat_interleave(share, 0)  # [heads, key_dim]
                v = v.view(shape.heads, -1)
                state = buffers[entry.source] * decay.view(shape.heads, -1, 1)
                if asked.beta is not None:
                    v = weight[:, None] * (v - (state * k[..., None]).sum(1))
                state = state + k[..., None] * v[:, None]
                buffers[entry.buffer] = state
                if entry.row >= 0:
                    q = query[entry.row].repeat_interleave(share, 0) * asked.scale
                    output[entry.row] = (state * q[..., None]).sum(1)
                for slot in (entry.store, entry.snapshot):
                    if slot >= 0:
                        states[slot] = state
        for entry in self._entries:
            if entry.keep >= 0:
                kept[entry.keep] = packed[entry.row]
        return output.to(asked.value.dtype)


def kept_states(store: StateStore, slots: Iterable[int]) -> Callable[[], None]:
    """Copies the states in these slots. Returns what puts them back."""
    kept = sorted({slot for slot in slots if slot >= 0})
    copies = [states[kept] for states in store.states]

    def restore() -> None:
        for states, copy in zip(store.states, copies, strict=True):
            states[kept] = copy

    return restore


def _zeros(states: Tensor) -> Tensor:
    return states.new_zeros(states.shape[1:])


def _normalised(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6)
