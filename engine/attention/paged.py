"""Attention on CPUs that reads the block store in place: no gathering, no padding, no masks.

Its loops (``engine.kernels.paged_attention``) give a row the same bits whatever shares its step, on
every CPU, and a row costs its keys' bytes and its own products. A draft tree's context is read once for
all its branches; each branch reads the tree's keys that it sees, in the order of its text.

Rows of the store have a multiple of 16 dimensions, with zeros beyond a head's own. Keys of blocks whose
size is no multiple of 16 are read slot by slot, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import (
    LARGEST_KEY,
    AttentionBackend,
    AttentionNeeds,
    AttentionOptions,
    attention_backend,
)
from engine.attention.branches import branches_of
from engine.batch import InputBatch, InputTensors, RequestRows, slot_of
from engine.kernels import KINDS, LANES, STORED_KINDS, Renewal, Scratch, find_kernel
from engine.request.info import Determinism
from kvpool.store import KVStore

_WORTH_A_TEAM = 1 << 20
"""Pairs of a query and a key, times their dimensions: fewer are done sooner than a team has begun."""
_ROWS_FOR_A_TEAM = 64
_TASKS_PER_THREAD = 2
_NO_WINDOW = 1 << 62
"""More keys than any text has."""


@attention_backend("paged")
class PagedAttention(AttentionBackend):
    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"exact", "fast"})
    device_types: ClassVar[frozenset[str] | None] = frozenset({"cpu"})
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = KINDS
    stored_dtypes: ClassVar[tuple[torch.dtype, ...] | None] = STORED_KINDS
    rank: ClassVar[int] = 1
    dim_multiple: ClassVar[int] = LANES
    can_capture: ClassVar[bool] = True

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.kernel = find_kernel("paged_attention")
        self._layers: dict[int, _Layer] = {}
        self.scratch = Scratch()

    def plan(self, batch: InputBatch, inputs: InputTensors) -> PagedPlan:
        return PagedPlan(self, batch, inputs)

    def layer(self, number: int, options: AttentionOptions, share: int) -> _Layer:
        """Returns what does not change from step to step. Another takes its place where a layer asks for
        other options; what is recorded holds the one that it was recorded with."""
        told = self._layers.get(number)
        if told is None or not told.serves(options):
            told = self._layers[number] = _Layer(self.store, number, options, share)
        return told


class _Layer:
    """A layer's part of the arguments: ``tensors`` and ``numbers``."""

    def __init__(self, store: KVStore, number: int, options: AttentionOptions, share: int) -> None:
        keys, values = store.key[number], store.value[number]
        self._options = options
        sinks = options.sinks
        self.tensors = keys, values, torch.empty(0) if sinks is None else sinks.float().contiguous()
        self.dims = keys.stride(0), values.stride(0)
        scale = keys.shape[2] ** -0.5 if options.scaling is None else options.scaling
        self.numbers = (
            *(keys.stride(1), values.stride(1), keys.shape[1], share, *self.dims),
            *(options.window or _NO_WINDOW, scale, options.softcap or 0.0, LARGEST_KEY),
        )

    def serves(self, options: AttentionOptions) -> bool:
        mine = self._options
        return options.sinks is mine.sinks and (
            (options.scaling, options.window, options.softcap)
            == (mine.scaling, mine.window, mine.softcap)
        )


_Kind = tuple[int, int, int, int, bool]
"""Key heads, query heads, padded dimensions of keys and of values, whether rows see their block."""


class PagedPlan:
    def __init__(self, backend: PagedAttention, batch: InputBatch, inputs: InputTensors) -> None:
        self._backend = backend
        self._batch = batch
        self._inputs = inputs
        self._num_threads = torch.get_num_threads()
        self._steps: dict[_Kind, _Step] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        kernel = self._backend.kernel
        num_rows, num_heads, _ = query.shape
        told = self._backend.layer(layer, options, num_heads // key.shape[1])
        key_dim, value_dim = told.dims
        query, key = (_padded(each, key_dim) for each in (query, key))
        own_dim, value = value.shape[2], _padded(value, value_dim)
        kind = key.shape[1], num_heads, key_dim, value_dim, options.sees_block
        output = query.new_empty(num_rows, num_heads, value_dim)
        rows = query, key, value, output
        strides = [stride for each in rows for stride in each.stride()[:2]]
        arguments = kernel.Arguments(
            *rows, *told.tensors, self._step(kind).record, *strides, *told.numbers
        )
        packed, dtypes = kernel.attend.layout.pack(arguments)
        for loop in (kernel.store_rows, kernel.attend):
            asked = kind, loop is kernel.attend
            num_threads = self.renewed(asked)[1]
            renewal = Renewal(asked, kernel.attend.layout.places["step"], told)
            loop.loop(dtypes).run(packed[:], num_threads, renewal)  # each counts its own rows
        return output if own_dim == value_dim else output[..., :own_dim]

    def keep(self) -> Callable[[], None]:
        return lambda: None  # rows are written where nothing is read that was there before

    def renewed(self, key: tuple[_Kind, bool]) -> tuple[int, int]:
        kind, is_attending = key
        step = self._step(kind)
        num_threads = self._num_threads if self._batch.num_rows >= _ROWS_FOR_A_TEAM else 1
        return step.record.data_ptr(), step.num_threads if is_attending else num_threads

    def _step(self, kind: _Kind) -> _Step:
        """Returns what layers of one kind share, made once."""
        if kind not in self._steps:
            self._steps[kind] = _Step(
                self._backend, self._batch, self._inputs, kind, self._num_threads
            )
        return self._steps[kind]


def _padded(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns rows whose numbers lie together, with zeros up to ``dim`` of them."""
    if rows.shape[2] < dim:
        rows = F.pad(rows, (0, dim - rows.shape[2]))
    return rows if rows.stride(2) == 1 else rows.contiguous()


# --- whose keys a row sees ---


_Group = int | Sequence[int]
"""Sixteen keys, by their first slot, or by all slots where they do not lie together."""
_Branch = tuple[Sequence[tuple[int, int]], Sequence[_Group]]
"""A branch's rows, as (number in the batch, keys up to its own), and its groups after the common ones."""


def _keys_of(request: RequestRows, block_size: int) -> tuple[Sequence[_Group], list[_Branch]]:
    """Returns which groups of keys a request's rows see: of a chain all in common, of a tree those before
    its first node."""
    base, root_end = request.base, request.known_end
    known = [(request.first_row + index, base + index + 1) for index in range(request.num_known)]
    if request.is_chain():
        first = request.first_row + request.num_known
        chain = [(first + index, root_end + index + 1) for index in range(len(request.parents))]
        return _groups(request.block_table, 0, request.end, block_size), [([*known, *chain], ())]
    start = root_end // LANES * LANES
    branches = [_branch(request, *each, start, block_size) for each in branches_of(request)]
    if known:
        branches.insert(0, (known, _groups(request.block_table, start, root_end, block_size)))
    return _groups(request.block_table, 0, start, block_size), branches


def _groups(table: Sequence[int], first: int, end: int, block_size: int) -> Sequence[_Group]:
    """Returns the groups of keys ``first`` .. ``end - 1`` of a text; ``first`` is a multiple of 16."""
    if block_size == LANES:
        return [block * LANES for block in table[first // LANES : -(-end // LANES)]]
    if block_size % LANES == 0:
        return [slot_of(table, key, block_size) for key in range(first, end, LANES)]
    return _grouped([slot_of(table, key, block_size) for key in range(first, end)])


def _grouped(slots: list[int]) -> list[_Group]:
    """Returns the groups of keys in these slots. The last slot fills up the last group, unseen there."""
    slots += slots[-1:] * (-len(slots) % LANES)
    groups: list[_Group] = []
    for at in range(0, len(slots), LANES):
        group = slots[at : at + LANES]
        lies_together = group == list(range(group[0], group[0] + LANES))
        groups.append(group[0] if lies_together else group)
    return groups


def _branch(
    request: RequestRows, nodes: Sequence[int], mine: Sequence[int], start: int, block_size: int
) -> _Branch:
    """Returns a branch's rows and own groups; ``start``: the first key of these."""
    root_end = request.known_end
    first_row = request.first_row + request.num_known - request.num_stored
    end = root_end + len(nodes)
    rows = [(first_row + node, end - len(mine) + index + 1) for index, node in enumerate(mine)]
    places = [*range(start, root_end), *(root_end + node for node in nodes)]
    slots = [slot_of(request.block_table, place, block_size) for place in places]
    return rows, _grouped(slots)


# --- the step's records ---


class _Step:
    """The step as the kernel reads it, for layers of one kind, and the memory that it points to."""

    def __init__(
        self,
        backend: PagedAttention,
        batch: InputBatch,
        inputs: InputTensors,
        kind: _Kind,
        num_threads: int,
    ) -> None:
        kernel, (kv_heads, num_heads, key_dim, value_dim, sees_block) = backend.kernel, kind
        tiles = _Tiles(kernel, num_heads // kv_heads)
        for request in batch.requests:
            limits = request.first_key, request.known_end if sees_block else 0
            tiles.add(*_keys_of(request, backend.store.block_size), limits)
        tiles.divide(kv_heads, _TASKS_PER_THREAD * num_threads)
        products = (
            sum(num_seen for _, num_seen, _ in tiles.rows) * num_heads * (key_dim + value_dim)
        )
        self.num_threads = num_threads if products >= _WORTH_A_TEAM else 1
        most, num_sums = tiles.most_queries, tiles.num_parts * kv_heads
        worker_floats = _round_up(kernel.scratch_floats(most, key_dim, value_dim), LANES)
        part_floats = num_sums * kernel.sums_floats(most, value_dim)
        scratch = backend.scratch.of(worker_floats * num_threads + part_floats)
        records = [
            torch.from_numpy(np.array(each, dtype=np.int64))
            for each in (tiles.tiles, tiles.rows, tiles.branches, tiles.groups, tiles.slots)
        ]
        self._told = kernel.Step(
            inputs.slot_mapping,
            *records,
            scratch=scratch,
            parts=scratch[worker_floats * num_threads :],
            counters=torch.zeros(num_sums, dtype=torch.int64),
            num_rows=batch.num_rows,
            num_tasks=len(tiles.tiles) * kv_heads,
            most_queries=most,
            scratch_size=worker_floats,
        )
        self.record = find_kernel("records").packed(self._told)


class _Tiles:
    """The rows of a step in tiles. A tile holds as many rows of one request as fit, branch after branch.
    ``tiles``, ``rows``, ``branches``, ``groups`` and ``slots`` as in the kernel's ``Step``."""

    def __init__(self, kernel: Any, share: int) -> None:
        self._kernel, self._share = kernel, share
        self.most_queries = max(kernel.TILE_QUERIES, _round_up(share, LANES))
        self.tiles: list[Any] = []
        self.rows: list[tuple[int, int, int]] = []
        self.branches: list[tuple[int, int, int, int]] = []
        self.groups: list[int] = []
        self.slots: list[int] = []
        self.num_parts = 0
        # Of the tile that is being filled.
        self._first_row = self._first_branch = self._num_queries = 0
        self._limits = (0, 0)

    def add(
        self, common: Sequence[_Group], branches: Sequence[_Branch], limits: tuple[int, int]
    ) -> None:
        """Adds a request's rows. ``limits``: its tiles' ``first_key`` and ``block_end``."""
        self._limits = limits
        num_common, common_at = len(common), self._put(common)
        for rows, groups in branches:
            own, end_group = self._put(groups), num_common + len(groups)
            first_query = self._num_queries
            for number, num_seen in rows:
                if self._num_queries + self._share > self.most_queries:
                    self._close_branch(first_query, own, end_group, num_common)
                    self._close_tile(common_at, num_common)
                    first_query = 0
                self.rows.append((number, num_seen, self._num_queries))
                self._num_queries += self._share
            self._close_branch(first_query, own, end_group, num_common)
        self._close_tile(common_at, num_common)

    def _put(self, groups: Sequence[_Group]) -> int:
        """Lists groups. Returns the number of the first of them."""
        first = len(self.groups)
        for group in groups:
            if isinstance(group, int):
                self.groups.append(group)
            else:
                self.groups.append(-1 - len(self.slots) // LANES)
                self.slots += group
        return first

    def _close_branch(self, first_query: int, groups: int, end_group: int, num_common: int) -> None:
        self._num_queries = _round_up(self._num_queries, self._kernel.QUERY_MULTIPLE)
        if end_group > num_common and self._num_queries > first_query:
            self.branches.append((first_query, self._num_queries, groups, end_group))

    def _close_tile(self, common_at: int, num_common: int) -> None:
        seen = [num_seen for _, num_seen, _ in self.rows[self._first_row :]]
        if seen:
            first_key, block_end = self._limits
            most_seen = max(*seen, block_end)
            num_chunks = -(-most_seen // self._kernel.CHUNK)
            tile = self._kernel.Tile(
                first_row=self._first_row,
                end_row=len(self.rows),
                first_chunk=0,
                end_chunk=num_chunks,
                first_branch=self._first_branch,
                end_branch=len(self.branches),
                first_key=first_key,
                block_end=block_end,
                least_seen=min(seen),
                most_seen=most_seen,
                num_queries=self._num_queries,
                groups=common_at,
                num_common=num_common,
                first_part=-1,
                num_chunks=num_chunks,
                num_tiles=1,
            )
            self.tiles.append(tile)
        self._first_row, self._first_branch = len(self.rows), len(self.branches)
        self._num_queries = 0

    def divide(self, kv_heads: int, wanted: int) -> None:
        """Divides tiles by chunks where there are fewer than ``wanted`` tasks, one for each key head."""
        pieces = -(-wanted // max(1, len(self.tiles) * kv_heads))
        if pieces > 1:
            self.tiles = [part for tile in self.tiles for part in self._parts(tile, pieces)]

    def _parts(self, tile: Any, pieces: int) -> list[Any]:
        each = -(-tile.num_chunks // min(pieces, tile.num_chunks))
        starts = range(0, tile.num_chunks, each)
        if len(starts) == 1:
            return [tile]
        first_part, self.num_parts = self.num_parts, self.num_parts + tile.num_chunks
        return [
            tile._replace(
                first_chunk=start,
                end_chunk=min(start + each, tile.num_chunks),
                first_part=first_part,
                num_tiles=len(starts),
            )
            for start in starts
        ]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
