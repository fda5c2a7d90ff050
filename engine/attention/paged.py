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
from engine.kernels.watch import Renewal
from kvpool.store import KVStore

_KERNEL = "paged_attention"
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
        self.arguments = np.zeros(find_kernel(_KERNEL).NUM_ARGS, dtype=np.int64)
        self.address: int = self.arguments.ctypes.data
        self.scratch = np.zeros(0, dtype=np.float32)

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

    def layer(self, number: int, options: AttentionOptions, share: int) -> _Layer:
        """Returns what does not change from step to step. Another takes its place where a layer asks for
        other options; what is recorded holds the one that it was recorded with."""
        told = self._layers.get(number)
        if told is None or not told.serves(options):
            told = _Layer(self.store, number, options, share, self.needs.dtype)
            self._layers[number] = told
        return told


class _Layer:
    """A layer's part of the arguments, and what they point to."""

    def __init__(
        self, store: KVStore, number: int, options: AttentionOptions, share: int, dtype: torch.dtype
    ) -> None:
        keys, values = store.key[number], store.value[number]
        _, self.num_kv_heads, key_dim = keys.shape
        scale = key_dim**-0.5 if options.scaling is None else options.scaling
        numbers = [scale, options.softcap or 0.0, LARGEST_KEY, float("inf")]
        self._numbers = np.array(numbers, dtype=np.float32)
        self._options = options
        self._sinks = None if options.sinks is None else options.sinks.float().contiguous()
        size = keys.element_size()
        self.dims = (keys.stride(0), values.stride(0))
        self.arguments = np.array(
            [
                self.num_kv_heads,
                share,
                *self.dims,
                KINDS[dtype],
                STORED_KINDS[store.dtype],
                keys.data_ptr(),
                keys.stride(1) * size,
                values.data_ptr(),
                values.stride(1) * size,
                self._numbers.ctypes.data,
                options.window or 0,
                0 if self._sinks is None else self._sinks.data_ptr(),
            ],
            dtype=np.int64,
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
        kernel, backend = find_kernel(_KERNEL), self._backend
        num_rows, num_heads, _ = query.shape
        told = backend.layer(layer, options, num_heads // key.shape[1])
        key_dim, value_dim = told.dims
        query, key = (_padded(each, key_dim) for each in (query, key))
        own_dim, value = value.shape[2], _padded(value, value_dim)
        shape = (told.num_kv_heads, num_heads, key_dim, value_dim)
        output = query.new_empty(num_rows, num_heads, value_dim)
        arguments = backend.arguments
        arguments[kernel.LAYER] = told.arguments
        arguments[kernel.CALL] = [*_lying(query), *_lying(key), *_lying(value), *_lying(output)]
        for part, run in (("store", kernel.store_rows.run), ("attend", kernel.attend.run)):
            asked = (shape, part)
            arguments[kernel.COUNTS] = 0
            arguments[kernel.STEP], num_threads = self.renewed(asked)
            run(backend.address, num_threads, Renewal(asked, kernel.STEP, told))
        return output if own_dim == value_dim else output[..., :own_dim]

    def renewed(self, key: tuple[_Shape, str]) -> tuple[Any, int]:
        shape, part = key
        step = self._step(shape)
        if part == "attend":
            return step.arguments, step.num_threads
        return step.arguments, self._num_threads if self._num_rows >= _ROWS_FOR_A_TEAM else 1

    def _step(self, key: _Shape) -> _Step:
        """Made once for layers of equal shape."""
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
    """Address, and bytes from row to row and from head to head."""
    size = rows.element_size()
    return rows.data_ptr(), rows.stride(0) * size, rows.stride(1) * size


# --- whose keys a row sees ---


class _BranchRows(NamedTuple):
    """``rows``: (number in the batch, keys that it sees). ``groups``: those after the common ones."""

    rows: Sequence[tuple[int, int]]
    groups: Sequence[int | Sequence[int]]


class _RequestKeys(NamedTuple):
    """Groups of sixteen keys, by their first slot, or by all slots where they do not lie together."""

    common: Sequence[int | Sequence[int]]
    branches: Sequence[_BranchRows]


def _keys_of(request: RequestRows, block_size: int) -> _RequestKeys:
    """Common are all groups of a text, and of a tree those before its first node."""
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
    """Groups of the keys number ``first`` .. ``end - 1`` of a text; ``first`` begins one."""
    if block_size == LANES:
        return [block * LANES for block in table[first // LANES : -(-end // LANES)]]
    if block_size % LANES == 0:
        return [slot_of(table, key, block_size) for key in range(first, end, LANES)]
    return _grouped([slot_of(table, key, block_size) for key in range(first, end)])


def _grouped(slots: list[int]) -> list[int | Sequence[int]]:
    """Groups of the keys in these slots. The last slot fills up the last group, where nobody sees it."""
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
    """``start``: of the first group that is not common."""
    root_end = request.base + request.num_known
    first_row = request.first_row + request.num_known - request.num_stored
    end = root_end + len(nodes)
    rows = [(first_row + node, end - len(mine) + index + 1) for index, node in enumerate(mine)]
    places = [*range(start, root_end), *(root_end + node for node in nodes)]
    slots = [slot_of(request.block_table, place, block_size) for place in places]
    return _BranchRows(rows, _grouped(slots))


# --- tiles ---


class _Step:
    """The step's part of the arguments for layers of one shape, and what they point to."""

    def __init__(
        self,
        backend: PagedAttention,
        requests: Sequence[_RequestKeys],
        inputs: InputTensors,
        shape: _Shape,
        num_rows: int,
        num_threads: int,
    ) -> None:
        kernel = find_kernel(_KERNEL)
        kv_heads, num_heads, key_dim, value_dim = shape
        share = num_heads // kv_heads
        self._tables = tables = _Tables(kernel, share)
        for request in requests:
            tables.add(request)
        tables.divide(kv_heads, _TASKS_PER_THREAD * num_threads)
        products = sum(seen for _, seen, _ in tables.rows) * num_heads * (key_dim + value_dim)
        self.num_threads = num_threads if products >= _WORTH_A_TEAM else 1
        most = tables.most_queries
        size = -(-kernel.scratch_floats(most, key_dim, value_dim) // LANES) * LANES
        parts = tables.num_parts * kv_heads * kernel.part_floats(most, value_dim)
        if backend.scratch.size < size * num_threads + parts:
            backend.scratch = _lines(size * num_threads + parts)
        self._kept = (backend.scratch, inputs)
        scratch = backend.scratch.ctypes.data
        self._arrays = [
            np.array(each, dtype=np.int64).reshape(-1)
            for each in (tables.tiles, tables.rows, tables.groups, tables.branches, tables.slots)
        ]
        self._counters = np.zeros(tables.num_parts * kv_heads, dtype=np.int64)
        tiles, rows, groups, branches, slots = (each.ctypes.data for each in self._arrays)
        if len(self._arrays[0]):
            records = self._arrays[0].reshape(-1, kernel.TILE_INTS)
            records[:, :2] = rows + 8 * kernel.ROW_INTS * records[:, :2]
            records[:, 4:6] = branches + 8 * kernel.BRANCH_INTS * records[:, 4:6]
        self.arguments = np.array(
            [
                num_rows,
                inputs.slot_mapping.data_ptr(),
                len(tables.tiles) * kv_heads,
                tiles,
                rows,
                groups,
                branches,
                slots,
                most,
                scratch,
                4 * size,
                scratch + 4 * size * num_threads,
                self._counters.ctypes.data,
            ],
            dtype=np.int64,
        )


def _lines(size: int) -> Any:
    """So many floats, the first of which begins a line of a cache: sixteen that lie in two take twice the
    time."""
    floats = np.zeros(size + LANES, dtype=np.float32)
    start = -floats.ctypes.data // 4 % LANES
    return floats[start : start + size]


class _Tables:
    """Records as the kernel reads them; rows and branches by number."""

    def __init__(self, kernel: Any, share: int) -> None:
        self._kernel = kernel
        self._share = share
        self.most_queries = max(kernel.TILE_QUERIES, -(-share // LANES) * LANES)
        self.tiles: list[list[int]] = []
        self.rows: list[tuple[int, int, int]] = []
        self.groups: list[int] = []
        self.branches: list[tuple[int, int, int, int]] = []
        self.slots: list[int] = []
        self.num_parts = 0

    def add(self, request: _RequestKeys) -> None:
        """Tiles of as many rows as fit, of one branch after another."""
        num_common, common = len(request.common), self._put_groups(request.common)
        owns = [self._put_groups(branch.groups) for branch in request.branches]
        first_row, first_branch, num_queries = len(self.rows), len(self.branches), 0
        for branch, own in zip(request.branches, owns, strict=True):
            begin = num_queries
            for row, seen in branch.rows:
                if num_queries + self._share > self.most_queries:
                    self._close_branch(begin, num_queries, own, branch, num_common)
                    self._close_tile(first_row, first_branch, num_queries, common, num_common)
                    first_row, first_branch, begin, num_queries = (
                        len(self.rows), len(self.branches), 0, 0,
                    )  # fmt: skip
                self.rows.append((row, seen, num_queries))
                num_queries += self._share
            num_queries = self._padded(num_queries)
            self._close_branch(begin, num_queries, own, branch, num_common)
        self._close_tile(first_row, first_branch, num_queries, common, num_common)

    def _put_groups(self, groups: Sequence[int | Sequence[int]]) -> int:
        """Returns where they begin."""
        first = len(self.groups)
        for group in groups:
            if isinstance(group, int):
                self.groups.append(group)
            else:
                self.groups.append(-1 - len(self.slots) // LANES)
                self.slots += group
        return first

    def _padded(self, num_queries: int) -> int:
        multiple = self._kernel.QUERY_MULTIPLE
        return -(-num_queries // multiple) * multiple  # type: ignore[no-any-return]

    def _close_branch(
        self, begin: int, end: int, own: int, branch: _BranchRows, num_common: int
    ) -> None:
        if branch.groups and end > begin:
            self.branches.append((begin, self._padded(end), own, num_common + len(branch.groups)))

    def _close_tile(
        self, first_row: int, first_branch: int, num_queries: int, common: int, num_common: int
    ) -> None:
        rows = self.rows[first_row:]
        if not rows:
            return
        num_chunks = -(-max(seen for _, seen, _ in rows) // self._kernel.CHUNK)
        self.tiles.append(
            [
                *(first_row, len(self.rows)),
                *(0, num_chunks),
                *(first_branch, len(self.branches)),
                *(self._padded(num_queries), common, num_common),
                *(-1, num_chunks, 1),
            ]
        )

    def divide(self, kv_heads: int, wanted: int) -> None:
        """Where tasks are few, each tile's chunks go to several; ``wanted``: tasks."""
        pieces = -(-wanted // max(1, len(self.tiles) * kv_heads))
        if pieces < 2:
            return
        tiles = []
        for tile in self.tiles:
            num_chunks = tile[3]
            each = -(-num_chunks // min(pieces, num_chunks))
            starts = range(0, num_chunks, each)
            if len(starts) == 1:
                tiles.append(tile)
                continue
            for start in starts:
                end = min(start + each, num_chunks)
                tiles.append(
                    [*tile[:2], start, end, *tile[4:9], self.num_parts, num_chunks, len(starts)]
                )
            self.num_parts += num_chunks
        self.tiles = tiles
