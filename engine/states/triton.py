"""Operations with a state on GPUs, as Triton programs that read a step's walks from the device's memory.

They are copied there once per step without waiting for the device, and nothing is read back: launches of
steps that are fitted into the same ``Room`` may be captured in a graph and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Bucket
from engine.kernels.triton.ops import lanes
from engine.kernels.walk_layout import Entry, Walk
from engine.states.plan import Convolution, Recurrence, kept_states
from engine.states.work import StateWork, state_work
from kvpool.state_slots import NOWHERE
from kvpool.state_store import RecurrenceShape, StateStore

_CHANNELS = 256
"""Channels per program."""
_VALUES = 32
"""Values of a head per program."""
_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_Ints = NDArray[np.int32]
_ROW, _PARENT, _STORE, _SNAPSHOT = (
    Entry._fields.index(name) for name in ("row", "parent", "store", "snapshot")
)


class Room(NamedTuple):
    """Sizes of launches: the largest numbers that a step has."""

    num_walks: int
    num_entries: int
    num_stores: int
    num_rows: int
    num_buffers: int

    @classmethod
    def for_steps(cls, bucket: Bucket, most_nodes: int) -> Room:
        """Returns what any step of a bucket needs, each request having ``most_nodes`` drafts at most: as
        many may have been accepted in the step before. A tree of n nodes has never more than n / 2
        branches open beside the one that is walked."""
        num_rows, num_walks = bucket
        num_entries = num_rows + num_walks * most_nodes
        num_stores = num_entries + num_walks
        return cls(num_walks, num_entries, num_stores, num_rows, num_rows // 2 + num_walks)


class Told(NamedTuple):
    """A step as programs read it. ``ints``: walks ``[n, WALK_INTS]``, entries ``[n, ENTRY_INTS]``, stores
    ``[n, STORE_INTS]``, and each row's entry ``[n, 1]``."""

    ints: tuple[_Ints, ...]
    num_buffers: int

    @property
    def room(self) -> Room:
        return Room._make([*map(len, self.ints), self.num_buffers])

    def fitted(self, room: Room) -> Told:
        """Returns the same with walks of nothing and entries of no row. Raises ValueError if the room is
        too small."""
        if any(mine > most for mine, most in zip(self.room, room, strict=True)):
            raise ValueError(f"a step of {self.room} has no room in {room}")
        padded = (
            np.pad(each, ((0, count - len(each)), (0, 0)), constant_values=value)
            for each, count, value in zip(self.ints, room, (0, NOWHERE, 0, NOWHERE), strict=False)
        )
        return Told(tuple(padded), room.num_buffers)


def told_of(work: StateWork) -> Told:
    walks, entries = work.walks, work.entries
    numbers = np.arange(len(entries))
    # What the next entry follows is carried on.
    parents = entries[:, _PARENT]
    is_read = np.zeros(len(entries), dtype=np.int64)
    is_read[parents[(parents != numbers - 1) & (parents >= 0)]] = 1
    starts = np.zeros(len(entries), dtype=np.int64)
    stores: list[tuple[int, int]] = []
    told, num_buffers = [], 0
    for first, end, source, count in (Walk(*each) for each in walks.tolist()):
        starts[first:end] = source
        first_store = len(stores)
        mine = entries[first:end, [_SNAPSHOT, _STORE]]
        stores += [(first + int(at), int(mine[at, which])) for at, which in np.argwhere(mine >= 0)]
        told.append((first, end, source, num_buffers, first_store, len(stores)))
        num_buffers += count if is_read[first:end].any() else 0
    wide = np.column_stack([entries, is_read, starts])
    is_row = entries[:, _ROW] >= 0
    entry_of = np.full((work.num_rows, 1), NOWHERE, dtype=np.int32)
    entry_of[entries[is_row, _ROW], 0] = numbers[is_row]
    walks_told = np.array(told, dtype=np.int32).reshape(-1, 6)
    stores_told = np.array(stores, dtype=np.int32).reshape(-1, 2)
    return Told((walks_told, wide.astype(np.int32), stores_told, entry_of), num_buffers)


class TritonStates:
    """Makes plans over a store (``ModelStates``). What ``reserve`` has made keeps its address."""

    can_capture = False
    can_graph = True

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self._ints = self._zeros(0, torch.int32)
        self._buffers = self._zeros(0, torch.float32)
        self._rooms: dict[Bucket, Room] = {}

    def reserve(self, bucket: Bucket, most_nodes: int) -> None:
        """See ``ModelStates``."""
        self._rooms[bucket] = room = Room.for_steps(bucket, most_nodes)
        empty = told_of(state_work(())).fitted(room)
        count = sum(each.size for each in empty.ints)
        if count > len(self._ints):
            self._ints = self._zeros(count, torch.int32)
        self._buffers = self.buffers_of(room.num_buffers)

    def plan(self, work: StateWork, bucket: Bucket | None = None) -> TritonPlan:
        """Raises ValueError where a bucket has no room for the step."""
        told, sources = told_of(work), work.walks[:, 2].tolist()
        fitted = told if bucket is None else told.fitted(self._rooms[bucket])
        return TritonPlan(self, fitted, sources)

    def buffers_of(self, count: int) -> Tensor:
        """Returns memory for so many states of any operation."""
        shapes = (each.state for each in self.store.shapes if isinstance(each, RecurrenceShape))
        size = count * max((torch.Size(each).numel() for each in shapes), default=0)
        if size <= len(self._buffers):
            return self._buffers
        return self._zeros(size, torch.float32)

    def written(self, told: Told) -> list[Tensor]:
        """Returns a step's ints on the device. Those of a captured step lie where they lay."""
        flat = torch.from_numpy(np.concatenate([each.reshape(-1) for each in told.ints]))
        if len(flat) > len(self._ints):
            memory = self._zeros(len(flat), torch.int32)
        else:
            memory = self._ints[: len(flat)]
        is_apart = self.store.device.type == "cuda"
        memory.copy_(flat.pin_memory() if is_apart else flat, non_blocking=is_apart)
        return list(memory.split([each.size for each in told.ints]))

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self.store.device)


class TritonPlan:
    """One step's operations (``StatePlan``)."""

    def __init__(self, backend: TritonStates, told: Told, sources: Sequence[int] = ()) -> None:
        self._sources = sources
        self._store = backend.store
        self._room = told.room
        self._walks, self._entries, self._stores, self._entry_of = backend.written(told)
        self._buffers = backend.buffers_of(told.num_buffers)

    def keep(self) -> Callable[[], None]:
        return kept_states(self._store, self._sources)

    def convolve(self, op: int, asked: Convolution) -> Tensor:
        from engine.kernels.triton.state_programs import convolve, shift

        rows = _lying_together(asked.rows)
        channels, width = asked.weight.shape
        output = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        weight = asked.weight.contiguous()
        places = self._store.states[op], self._store.rows[op]
        numbers = rows.stride(0), channels
        constants: dict[str, Any] = {"WIDTH": width, "CHANNELS": min(_CHANNELS, lanes(channels))}
        blocks = -(-channels // constants["CHANNELS"])
        with torch.cuda.device_of(rows):
            if self._room.num_rows:
                bias = weight if asked.bias is None else asked.bias
                convolve[(self._room.num_rows, blocks)](
                    rows, weight, bias, output, *places, self._entries, self._entry_of, *numbers,
                    **constants, HAS_BIAS=asked.bias is not None, SILU=asked.silu, **_LAUNCH,
                )  # fmt: skip
            if self._room.num_stores and width > 1:
                shift[(self._room.num_walks, blocks)](
                    rows, *places, self._walks, self._entries, self._stores, *numbers,
                    **constants, **_LAUNCH,
                )  # fmt: skip
        return output

    def recur(self, op: int, asked: Recurrence) -> Tensor:
        from engine.kernels.triton.state_programs import recur

        shape = asked.shape
        query, key, value = (_lying_together(each) for each in asked[:3])
        log_decay = _lying_together(asked.log_decay.float())
        beta = log_decay if asked.beta is None else asked.beta.float()
        output = torch.zeros_like(value, memory_format=torch.contiguous_format)
        given = query, key, value, log_decay, beta
        values = min(_VALUES, lanes(shape.value_dim))
        grid = self._room.num_walks, shape.heads, -(-shape.value_dim // values)
        if not self._room.num_walks:
            return output
        with torch.cuda.device_of(value):
            recur[grid](
                *given, output, self._store.states[op], self._store.rows[op], self._buffers,
                self._walks, self._entries,
                *(stride for each in given for stride in each.stride()[:2]),
                shape.row_size, asked.scale,
                KEY_HEADS=shape.key_heads, HEADS=shape.heads, KEY_DIM=shape.key_dim,
                VALUE_DIM=shape.value_dim, KEY_LANES=lanes(shape.key_dim), VALUES=values,
                PER_KEY=int(shape.num_decays > 1), HAS_BETA=asked.beta is not None,
                NORMALISES=asked.normalises, **_LAUNCH,
            )  # fmt: skip
        return output


def _lying_together(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()
