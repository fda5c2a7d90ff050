"""Attention on CPUs that reads the block store where it is: no gathering, no padding, no masks.

Its loops (``engine.kernels.paged_attention``) give a row the same bits whatever shares its step, on every
CPU, and a row costs its keys' bytes and its own products. A draft tree's context is read once for all its
branches; of its own keys each branch reads those that it sees, in the order of their text.

Rows of the store have a multiple of 16 dimensions, with zeros beyond a head's own. Keys of blocks whose
size is no multiple of 16 are read slot by slot, which is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

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
from engine.config import Determinism
from engine.kernels import KINDS, LANES, STORED_KINDS, find_kernel
from engine.kernels.attention_records import (
    CALL,
    CHUNK,
    COUNTERS,
    LAYER,
    NUM_ARGS,
    QUERY_MULTIPLE,
    STEP,
    TILE_QUERIES,
    Branch,
    Layer,
    Row,
    Step,
    Tile,
    layer_arguments,
)
from engine.kernels.watch import Renewal
from kvpool.store import KVStore

_WORTH_A_TEAM = 1 << 20
"""Pairs of a query and a key, times their dimensions: fewer are done sooner than a team has begun."""
_ROWS_FOR_A_TEAM = 64
_TASKS_PER_THREAD = 2


@attention_backend("paged")
class PagedAttention(AttentionBackend):
    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"exact", "fast"})
    device_types: ClassVar[frozenset[str] | None] = frozenset({"cpu"})
    rank: ClassVar[int] = 1
    dim_multiple: ClassVar[int] = LANES
    can_capture: ClassVar[bool] = True

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self._layers: dict[int, _Layer] = {}
        self.arguments = np.zeros(NUM_ARGS, dtype=np.int64)
        self.address: int = self.arguments.ctypes.data
        self._scratch = np.zeros(0, dtype=np.float32)

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        reason = super().refusal(needs)
        if reason is not None:
            return reason
        for dtype, known in ((needs.dtype, KINDS), (needs.kv_dtype or needs.dtype, STORED_KINDS)):
            if dtype not in known:
                return f"it knows no {dtype}"
        return None

    def plan(self, batch: InputBatch, inputs: InputTensors) -> PagedPlan:
        return PagedPlan(self, batch, inputs)

    def scratch_of(self, size: int) -> Any:
        """Returns at least so many floats, the first of which begins a line of a cache: sixteen that lie
        in two lines take twice the time. Made anew only where more are wanted than ever before."""
        if self._scratch.size < size:
            floats = np.zeros(size + LANES, dtype=np.float32)
            start = -floats.ctypes.data // 4 % LANES
            self._scratch = floats[start : start + size]
        return self._scratch

    def layer(self, number: int, options: AttentionOptions, share: int) -> _Layer:
        """Returns what does not change from step to step. Another takes its place where a layer asks for
        other options; what is recorded holds the one that it was recorded with."""
        told = self._layers.get(number)
        if told is None or not told.serves(options):
            told = _Layer(self.store, number, options, share, self.needs.dtype)
            self._layers[number] = told
        return told


class _Layer:
    """A layer's part of the arguments, and the memory that it points to."""

    def __init__(
        self, store: KVStore, number: int, options: AttentionOptions, share: int, dtype: torch.dtype
    ) -> None:
        keys, values = store.key[number], store.value[number]
        _, self.num_kv_heads, own_dim = keys.shape
        self.dims = keys.stride(0), values.stride(0)
        self._options = options
        self._sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self.arguments = layer_arguments(
            Layer(
                num_kv_heads=self.num_kv_heads,
                share=share,
                key_dim=self.dims[0],
                value_dim=self.dims[1],
                kind=KINDS[dtype],
                store_kind=STORED_KINDS[store.dtype],
                keys=keys.data_ptr(),
                key_head=keys.stride(1) * keys.element_size(),
                values=values.data_ptr(),
                value_head=values.stride(1) * values.element_size(),
                window=options.window or 0,
                sinks=0 if self._sinks is None else self._sinks.data_ptr(),
                scale=own_dim**-0.5 if options.scaling is None else options.scaling,
                softcap=options.softcap or 0.0,
                largest_key=LARGEST_KEY,
            )
        )

    def serves(self, options: AttentionOptions) -> bool:
        mine = self._options
        return options.sinks is mine.sinks and (
            (options.scaling, options.window, options.softcap)
            == (mine.scaling, mine.window, mine.softcap)
        )


_Shape = tuple[int, int, int, int]
"""Key heads, query heads, padded dimensions of keys and of values."""


class PagedPlan:
    def __init__(self, backend: PagedAttention, batch: InputBatch, inputs: InputTensors) -> None:
        self._backend = backend
        self._requests = [_keys_of(each, backend.store.block_size) for each in batch.requests]
        self._inputs = inputs
        self._num_rows = batch.num_rows
        self._num_threads = torch.get_num_threads()
        self._steps: dict[_Shape, _Step] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        backend = self._backend
        num_rows, num_heads, _ = query.shape
        told = backend.layer(layer, options, num_heads // key.shape[1])
        key_dim, value_dim = told.dims
        query, key = (_padded(each, key_dim) for each in (query, key))
        own_dim, value = value.shape[2], _padded(value, value_dim)
        shape = (told.num_kv_heads, num_heads, key_dim, value_dim)
        output = query.new_empty(num_rows, num_heads, value_dim)
        arguments = backend.arguments
        arguments[LAYER] = told.arguments
        arguments[CALL] = [*_lying(query), *_lying(key), *_lying(value), *_lying(output)]
        kernels = find_kernel("kv_rows").store_rows, find_kernel("paged_attention").attend
        for part, kernel in zip(("store", "attend"), kernels, strict=True):
            asked = (shape, part)
            arguments[COUNTERS] = 0
            arguments[STEP], num_threads = self.renewed(asked)
            kernel.run(backend.address, num_threads, Renewal(asked, STEP, told))
        return output if own_dim == value_dim else output[..., :own_dim]

    def renewed(self, key: tuple[_Shape, str]) -> tuple[Any, int]:
        shape, part = key
        step = self._step(shape)
        if part == "attend":
            return step.arguments, step.num_threads
        return step.arguments, self._num_threads if self._num_rows >= _ROWS_FOR_A_TEAM else 1

    def _step(self, key: _Shape) -> _Step:
        """Returns what layers of equal shape share, made once."""
        if key not in self._steps:
            self._steps[key] = _Step(
                self._backend, self._requests, self._inputs, key, self._num_rows, self._num_threads
            )
        return self._steps[key]


def _padded(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns rows whose numbers lie together, with zeros up to ``dim`` of them."""
    if rows.shape[2] < dim:
        rows = F.pad(rows, (0, dim - rows.shape[2]))
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _lying(rows: torch.Tensor) -> tuple[int, int, int]:
    """Returns the address, and bytes from row to row and from head to head."""
    size = rows.element_size()
    return rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size


# --- whose keys a row sees ---


class _BranchRows(NamedTuple):
    """A branch's rows, as (number in the batch, keys that it sees), and its groups after the common
    ones."""

    rows: Sequence[tuple[int, int]]
    groups: Sequence[int | Sequence[int]]


class _RequestKeys(NamedTuple):
    """Groups of sixteen keys, by their first slot, or by all slots where they do not lie together."""

    common: Sequence[int | Sequence[int]]
    branches: Sequence[_BranchRows]


def _keys_of(request: RequestRows, block_size: int) -> _RequestKeys:
    """Returns which groups of keys a request's rows see: of a chain all in common, of a tree those before
    its first node."""
    base, root_end = request.base, request.base + request.num_known
    known = [(request.first_row + index, base + index + 1) for index in range(request.num_known)]
    if request.is_chain():
        first = request.first_row + request.num_known
        chain = [(first + index, root_end + index + 1) for index in range(len(request.parents))]
        groups = _groups(request.block_table, 0, request.end, block_size)
        return _RequestKeys(groups, [_BranchRows([*known, *chain], ())])
    start = root_end // LANES * LANES
    common = _groups(request.block_table, 0, start, block_size)
    branches = [
        _branch(request, nodes, mine, start, block_size) for nodes, mine in branches_of(request)
    ]
    if known:
        in_place = _groups(request.block_table, start, root_end, block_size)
        branches.insert(0, _BranchRows(known, in_place))
    return _RequestKeys(common, branches)


def _groups(
    table: Sequence[int], first: int, end: int, block_size: int
) -> Sequence[int | Sequence[int]]:
    """Returns the groups of keys ``first`` .. ``end - 1`` of a text; ``first`` is a multiple of 16."""
    if block_size == LANES:
        return [block * LANES for block in table[first // LANES : -(-end // LANES)]]
    if block_size % LANES == 0:
        return [slot_of(table, key, block_size) for key in range(first, end, LANES)]
    return _grouped([slot_of(table, key, block_size) for key in range(first, end)])


def _grouped(slots: list[int]) -> list[int | Sequence[int]]:
    """Returns the groups of keys in these slots. The last slot fills up the last group, unseen there."""
    slots += slots[-1:] * (-len(slots) % LANES)
    groups: list[int | Sequence[int]] = []
    for at in range(0, len(slots), LANES):
        group = slots[at : at + LANES]
        lies_together = group == list(range(group[0], group[0] + LANES))
        groups.append(group[0] if lies_together else group)
    return groups


def _branch(
    request: RequestRows, nodes: Sequence[int], mine: Sequence[int], start: int, block_size: int
) -> _BranchRows:
    """Returns a branch's rows and own groups; ``start``: the first key of these."""
    root_end = request.base + request.num_known
    first_row = request.first_row + request.num_known - request.num_stored
    end = root_end + len(nodes)
    rows = [(first_row + node, end - len(mine) + index + 1) for index, node in enumerate(mine)]
    places = [*range(start, root_end), *(root_end + node for node in nodes)]
    slots = [slot_of(request.block_table, place, block_size) for place in places]
    return _BranchRows(rows, _grouped(slots))


# --- the step's records ---


class _Step:
    """The step's part of the arguments for layers of one shape, and the memory that it points to."""

    def __init__(
        self,
        backend: PagedAttention,
        requests: Sequence[_RequestKeys],
        inputs: InputTensors,
        shape: _Shape,
        num_rows: int,
        num_threads: int,
    ) -> None:
        kernel = find_kernel("paged_attention")
        kv_heads, num_heads, key_dim, value_dim = shape
        tiles = _Tiles(num_heads // kv_heads)
        for request in requests:
            tiles.add(request)
        tiles.divide(kv_heads, _TASKS_PER_THREAD * num_threads)
        products = sum(row.num_seen for row in tiles.rows) * num_heads * (key_dim + value_dim)
        self.num_threads = num_threads if products >= _WORTH_A_TEAM else 1
        most = tiles.most_queries
        worker_floats = _round_up(kernel.scratch_floats(most, key_dim, value_dim), LANES)
        num_sums = tiles.num_parts * kv_heads
        part_floats = num_sums * kernel.sums_floats(most, value_dim)
        scratch = backend.scratch_of(worker_floats * num_threads + part_floats)
        counters = np.zeros(num_sums, dtype=np.int64)
        records = [
            np.array(each, dtype=np.int64)
            for each in (tiles.tiles, tiles.rows, tiles.branches, tiles.groups, tiles.slots)
        ]
        self._held = scratch, inputs, counters, records
        tiles_at, rows_at, branches_at, groups_at, slots_at = (each.ctypes.data for each in records)
        step = Step(
            num_rows=num_rows,
            slot_mapping=inputs.slot_mapping.data_ptr(),
            num_tasks=len(tiles.tiles) * kv_heads,
            tiles=tiles_at,
            rows=rows_at,
            branches=branches_at,
            groups=groups_at,
            slots=slots_at,
            most_queries=most,
            scratch=scratch.ctypes.data,
            scratch_bytes=4 * worker_floats,
            parts=scratch.ctypes.data + 4 * worker_floats * num_threads,
            counters=counters.ctypes.data,
        )
        self.arguments = np.array(list(step), dtype=np.int64)


class _Tiles:
    """The rows of a step in tiles. A tile holds as many rows of one request as fit, branch after branch.
    ``groups`` and ``slots`` as in ``Step``."""

    def __init__(self, share: int) -> None:
        self._share = share
        self.most_queries = max(TILE_QUERIES, _round_up(share, LANES))
        self.tiles: list[Tile] = []
        self.rows: list[Row] = []
        self.branches: list[Branch] = []
        self.groups: list[int] = []
        self.slots: list[int] = []
        self.num_parts = 0
        # Of the tile that is being filled.
        self._first_row = self._first_branch = self._num_queries = 0

    def add(self, request: _RequestKeys) -> None:
        num_common, common = len(request.common), self._put(request.common)
        for branch in request.branches:
            own, end_group = self._put(branch.groups), num_common + len(branch.groups)
            first_query = self._num_queries
            for number, num_seen in branch.rows:
                if self._num_queries + self._share > self.most_queries:
                    self._close_branch(first_query, own, end_group, num_common)
                    self._close_tile(common, num_common)
                    first_query = 0
                self.rows.append(Row(number, num_seen, self._num_queries))
                self._num_queries += self._share
            self._close_branch(first_query, own, end_group, num_common)
        self._close_tile(common, num_common)

    def _put(self, groups: Sequence[int | Sequence[int]]) -> int:
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
        self._num_queries = _round_up(self._num_queries, QUERY_MULTIPLE)
        if end_group > num_common and self._num_queries > first_query:
            branch = Branch(first_query, self._num_queries, groups, end_group)
            self.branches.append(branch)

    def _close_tile(self, common: int, num_common: int) -> None:
        rows = self.rows[self._first_row :]
        if rows:
            num_chunks = -(-max(row.num_seen for row in rows) // CHUNK)
            tile = Tile(
                first_row=self._first_row,
                end_row=len(self.rows),
                first_chunk=0,
                end_chunk=num_chunks,
                first_branch=self._first_branch,
                end_branch=len(self.branches),
                num_queries=self._num_queries,
                groups=common,
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

    def _parts(self, tile: Tile, pieces: int) -> list[Tile]:
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
