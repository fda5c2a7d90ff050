"""Attention on GPUs that reads the block store where it is: no gathering, no padding, no masks in memory.

Its programs (``engine.kernels.triton``) read a step's work (``work.py``) from one buffer of ints, copied
once per step without waiting for the device. Nothing of a step lies anywhere else, and nothing is read
back, so a step's launches may be captured in a graph and run again over other contents:

- A step that is padded to a bucket is fitted into launches of the bucket's size (``Room``); plans of one
  bucket differ in nothing but what the buffer holds.
- What ``reserve`` had made keeps its address (``addresses``): larger steps get further memory.
- Layers whose rows see their block read work of their own, in memory of its own. Once a layer has asked
  for it, it is planned with every step: a graph that was captured asks no more.
- Rows that pad a batch come after it, with slot -1: they are stored nowhere, see nothing, and get zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from engine.attention.backend import (
    LARGEST_KEY,
    AttentionBackend,
    AttentionNeeds,
    AttentionOptions,
    attention_backend,
)
from engine.attention.work import Cut, Room, Work
from engine.batch import Bucket, InputBatch, InputTensors
from engine.kernels import KINDS, STORED_KINDS
from engine.kernels.triton import missing_for, num_processors
from engine.kernels.triton.joint_ops import Heads, put_heads
from engine.kernels.triton.ops import ragged_attention, store_rows
from engine.kernels.triton.row_ops import Sums
from engine.request.info import Determinism
from kvpool.store import KVStore

_MOST_DIMENSIONS = 256
_MOST_SHARED = 128
_PROGRAMS_PER_PROCESSOR = 4
_BYTES_OF_SUMS = 64 << 20
"""Partial sums of a layer that wait to be joined."""


@attention_backend("triton")
class TritonAttention(AttentionBackend):
    """``chunk``: keys whose sums are merged with those before, at least (``Cut``); how many follows from
    no step, or a row's bits would. 8 key heads after 1,024 tokens are work for 136 programs at once.
    Where determinism is exact, tiles have one size."""

    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"exact", "fast"})
    device_types: ClassVar[frozenset[str] | None] = frozenset({"cpu", "cuda"})
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = KINDS
    stored_dtypes: ClassVar[tuple[torch.dtype, ...] | None] = STORED_KINDS
    rank: ClassVar[int] = 2
    can_graph: ClassVar[bool] = True
    chunk: ClassVar[int] = 64
    longest_chunk: ClassVar[int] = 512
    most_chunks: ClassVar[int] = 24

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.cut = self._cut(needs)
        self.is_exact = needs.determinism == "exact"
        # By ``sees_block`` of the layers that read it.
        self._ints = {kind: _Ints(store.device) for kind in (False, True)}
        self._kinds = [False]
        self._rooms: dict[Bucket, Room] = {}
        self._width = max(shape.num_heads * shape.value_dim for shape in needs.shapes)
        self._heads = max(shape.num_heads for shape in needs.shapes)
        self._sums, self._stats = self._memory_for_sums(0)

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        reason = super().refusal(needs) or missing_for(needs.device)
        if reason is not None:
            return reason
        for shape in needs.shapes:
            if max(shape.key_dim, shape.value_dim) > _MOST_DIMENSIONS:
                wide = max(shape.key_dim, shape.value_dim)
                return f"its heads have at most {_MOST_DIMENSIONS} dimensions, not {wide}"
            if shape.num_heads // shape.num_kv_heads > _MOST_SHARED:
                shared = shape.num_heads // shape.num_kv_heads
                return f"at most {_MOST_SHARED} heads share a key head, not {shared}"
        return None

    @classmethod
    def rank_for(cls, needs: AttentionNeeds) -> int:
        """Returns a rank below 0 on a CPU, where its programs run under Triton's interpreter."""
        return cls.rank if needs.device.type == "cuda" else -1

    def plan(self, batch: InputBatch, inputs: InputTensors) -> TritonPlan:
        """Raises ValueError where a bucket has no room for the step."""
        told = {kind: self._told(batch, kind) for kind in self._kinds}
        return TritonPlan(self, batch, inputs.slot_mapping, told)

    def told_late(self, batch: InputBatch, sees_block: bool) -> Told:
        """Returns the arguments for the first layer of its kind; later plans have them from the start."""
        if sees_block not in self._kinds:
            self._kinds.append(sees_block)
        return self._told(batch, sees_block)

    def _told(self, batch: InputBatch, sees_block: bool) -> Told:
        room = None if batch.bucket is None else self._rooms[batch.bucket]
        work = Work(batch.requests, self.cut, room, sees_block)
        if work.num_partials > len(self._sums):
            self._sums, self._stats = self._memory_for_sums(work.num_partials)
        launch = work.num_items, work.num_joins, work.joins_at, work.tile_rows
        ints = self._ints[sees_block].written(work)
        if batch.moved is not None:
            work.row_ends(ints).sub_(batch.moved[2])
        return Told(ints, self._sums, self._stats, launch)

    def can_move(self, batch: InputBatch) -> bool:
        """See ``AttentionBackend``. Rows whose chunks may turn out to be longer or shorter wait."""
        chunk_for = self.cut.chunk_for
        return self._kinds == [False] and all(
            chunk_for(rows.base - rows.num_unsure + 1) == chunk_for(rows.end)
            for rows in batch.requests
        )

    def reserve(self, bucket: Bucket, most_keys: int, most_nodes: int) -> None:
        """See ``AttentionBackend``."""
        room = Room.for_steps(self.cut, *bucket, most_keys, most_nodes)
        self._rooms[bucket] = room
        count = Work([], self.cut, room).num_ints + room.num_ints
        for each in self._ints.values():
            each.reserve(count)
        if len(self._sums) < self.cut.max_partials:
            self._sums, self._stats = self._memory_for_sums(self.cut.max_partials)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the memory that captured launches use beside inputs and store."""
        ints = (each.reserved.data_ptr() for each in self._ints.values())
        return *ints, self._sums.data_ptr(), self._stats.data_ptr()

    @classmethod
    def _cut(cls, needs: AttentionNeeds) -> Cut:
        is_exact = needs.determinism == "exact"
        wide = max(max(shape.key_dim, shape.value_dim) for shape in needs.shapes)
        sizes = (16, 32) if wide > 128 or needs.dtype == torch.float32 else (16, 32, 64)
        row_bytes = 4 * max(shape.num_heads * (shape.value_dim + 2) for shape in needs.shapes)
        return Cut(
            block_size=needs.block_size,
            chunk=cls.chunk,
            longest_chunk=cls.longest_chunk,
            most_chunks=cls.most_chunks,
            tile_pairs=sizes[-1:] if is_exact else sizes,
            share=max(shape.num_heads // shape.num_kv_heads for shape in needs.shapes),
            num_kv_heads=min(shape.num_kv_heads for shape in needs.shapes),
            num_programs=_PROGRAMS_PER_PROCESSOR * num_processors(needs.device),
            max_partials=_BYTES_OF_SUMS // row_bytes,
        )

    def _memory_for_sums(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.zeros(count, self._width, dtype=torch.float32, device=self.store.device),
            torch.zeros(count, self._heads * 2, dtype=torch.float32, device=self.store.device),
        )


class _Ints:
    """Memory on the device for the ints of steps' work. It grows by further pieces: what a graph was
    captured over stays, in the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = [self._made(1 << 12)]

    @property
    def reserved(self) -> torch.Tensor:
        return self._pieces[0]

    def reserve(self, count: int) -> None:
        if count > len(self.reserved):
            self._pieces = [self._made(count)]

    def written(self, work: Work) -> torch.Tensor:
        """Returns memory that begins with a step's ints. Copies to a GPU come from pinned memory that is
        taken anew each time, and used again once they are done: several steps may be planned before the
        first has run."""
        count = work.num_ints
        if count > len(self._pieces[-1]):
            self._pieces.append(self._made(2 * count))
        piece = next(each for each in self._pieces if count <= len(each))
        if piece.device.type != "cuda":
            work.write(piece.numpy())
            return piece
        host = torch.empty(count, dtype=torch.int32, pin_memory=True)
        work.write(host.numpy())
        piece[:count].copy_(host, non_blocking=True)
        return piece

    def _made(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


class Told(NamedTuple):
    """Launch arguments for the programs of one kind of layer. ``launch``: numbers of items and of
    joins, where joins begin, rows of a tile."""

    ints: torch.Tensor
    sums: torch.Tensor
    stats: torch.Tensor
    launch: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """``told``: by ``sees_block`` of layers."""

    backend: TritonAttention
    batch: InputBatch
    slots: torch.Tensor  # [num_rows] int64
    told: dict[bool, Told]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        planes = self.backend.store.planes[layer]
        num_heads = query.shape[1]
        output: torch.Tensor = store_rows(key, value, *planes, self.slots, num_heads, LARGEST_KEY)
        return self._attended(layer, query, output, options)

    def attend_joint(
        self, layer: int, product: Sums, heads: Heads, options: AttentionOptions
    ) -> torch.Tensor:
        """See ``JointPlan``."""
        planes = self.backend.store.planes[layer]
        query, output = put_heads(product, heads, planes, self.slots, LARGEST_KEY)
        return self._attended(layer, query, output, options)

    def _attended(
        self, layer: int, query: torch.Tensor, output: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Returns the ``output``, with what rows get whose keys and values are stored."""
        backend = self.backend
        keys, values = backend.store.planes[layer]
        if options.sees_block not in self.told:
            self.told[options.sees_block] = backend.told_late(self.batch, options.sees_block)
        ints, sums, stats, launch = self.told[options.sees_block]
        num_items, num_joins, joins_at, tile_rows = launch
        ragged_attention(
            query,
            keys,
            values,
            ints,
            output,
            sums,
            stats,
            options.sinks,
            num_items,
            num_joins,
            joins_at,
            tile_rows,
            backend.store.block_size,
            backend.cut.chunk,
            query.shape[2] ** -0.5 if options.scaling is None else options.scaling,
            options.softcap or 0.0,
            options.window or 0,
            backend.is_exact,
        )
        return output
