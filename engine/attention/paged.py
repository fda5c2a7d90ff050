"""Attention on CPUs that reads the block store in place: no gathering, no padding, no masks.

Its loops (``engine.kernels.paged_attention``) give a row the same bits whatever shares its step, on
every CPU, and a row costs its keys' bytes and its own products. A draft tree's context is read once for
all its branches; each branch reads the tree's keys that it sees, in the order of its text.

Rows of the store have a multiple of 16 dimensions, with zeros beyond a head's own. Keys of blocks whose
size is no multiple of 16 are read slot by slot, which is slower.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

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
from engine.batch import InputBatch, InputTensors, RequestRows, slot_of, slots_of
from engine.kernels import KINDS, LANES, STORED_KINDS, Renewal, Scratch, find_kernel
from engine.request.info import Determinism
from kvpool.store import KVStore

_WORTH_SHARING, _WORTH_A_TEAM = 1 << 16, 1 << 20
"""Pairs of a query and a key, times their dimensions: fewer are done sooner by one thread of a team that
waits meanwhile, or before a team has begun."""
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
        return output if own_dim == value_dim else output[..., :own_dim].contiguous()

    def keep(self) -> Callable[[], None]:
        return lambda: None  # rows are written where nothing is read that was there before

    def renewed(self, key: tuple[_Kind, bool]) -> tuple[int, int]:
        kind, is_attending = key
        step = self._step(kind)
        num_threads = self._num_threads if self._batch.num_rows >= _ROWS_FOR_A_TEAM else 1
        return step.record.data_ptr(), step.num_threads if is_attending else num_threads

    def wants_team(self, key: tuple[_Kind, bool]) -> bool:
        kind, is_attending = key
        return self._step(kind).is_heavy if is_attending else self.renewed(key)[1] > 1

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


_Branch = tuple[Sequence[int], int, Sequence[int]]
"""Its rows' numbers in the batch, the keys up to the first one's own, the slots of its own keys."""


class _Told:
    """A step's requests, as ``attention_tiles`` wants them ``Told``."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.numbers = array("q")
        self.num_groups = self.num_listed = self.num_branches = 0

    def add(self, request: RequestRows, sees_block: bool) -> None:
        """Adds a request. All rows of a chain see one list of keys; those of a tree, what comes before
        its first node."""
        numbers, block_size = self.numbers, self._block_size
        if request.is_chain():
            chain = range(request.first_row, request.first_row + request.num_rows)
            branches: list[_Branch] = [(chain, request.base + 1, ())]
            start = request.end
        else:
            start = request.known_end // LANES * LANES
            branches = [*self._branches(request, start)]
        blocks = request.block_table[: -(-start // block_size)]
        block_end = request.known_end if sees_block else 0
        numbers.extend((request.first_key, block_end, start, len(blocks), len(branches)))
        numbers.extend(iter(blocks))  # an array's numbers may be narrower
        num_own = 0
        for rows, first_seen, slots in branches:
            numbers.extend((len(rows), len(slots), first_seen))
            numbers.extend(rows)
            numbers.extend(slots)
            num_own += -(-len(slots) // LANES)
        num_groups = -(-start // LANES) + num_own
        self.num_groups += num_groups
        self.num_listed += num_groups if block_size % LANES else num_own
        self.num_branches += len(branches)

    def _branches(self, request: RequestRows, start: int) -> Iterator[_Branch]:
        """``start``: the first key of their own groups."""
        table, size, root_end = request.block_table, self._block_size, request.known_end
        first, root = request.first_row, slots_of(table, start, root_end, size)
        if request.num_known:
            # What no row sees may be read: sixteen slots side by side are read faster than fewer.
            end = root_end if size % LANES else _round_up(root_end, LANES)
            rows = range(first, first + request.num_known)
            yield rows, request.base + 1, slots_of(table, start, end, size)
        first += request.num_known - request.num_stored
        for nodes, mine in branches_of(request):
            slots = root + [slot_of(table, root_end + node, size) for node in nodes]
            yield [first + node for node in mine], root_end + len(nodes) - len(mine) + 1, slots


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
        kv_heads, num_heads, key_dim, value_dim, sees_block = kind
        told = _Told(backend.store.block_size)
        for request in batch.requests:
            told.add(request, sees_block)
        share, wanted = num_heads // kv_heads, -(-_TASKS_PER_THREAD * num_threads // kv_heads)
        tiles, chunks = find_kernel("attention_tiles"), find_kernel("attention_chunks")
        records = find_kernel("records")
        most = max(tiles.TILE_QUERIES, _round_up(share, LANES))
        sizes = tiles.Sizes(backend.store.block_size, share, most, wanted)
        plan, lists = tiles.lay_out(told, len(batch.requests), batch.num_rows, sizes)
        num_sums = plan["num_parts"] * kv_heads
        products = plan["num_pairs"] * num_heads * (key_dim + value_dim)
        self.num_threads = num_threads if products >= _WORTH_SHARING else 1
        self.is_heavy = products >= _WORTH_A_TEAM
        worker_floats = _round_up(chunks.scratch_floats(most, key_dim, value_dim), LANES)
        part_floats = num_sums * chunks.sums_floats(most, value_dim)
        scratch = backend.scratch.of(worker_floats * num_threads + part_floats)
        parts = scratch.data_ptr() + scratch.itemsize * worker_floats * num_threads
        step = find_kernel("attention_arguments").Step(
            inputs.slot_mapping,
            *lists,
            scratch=scratch,
            parts=records.Address(parts, scratch),
            counters=records.rooms([num_sums])[0],
            num_rows=batch.num_rows,
            num_tasks=plan["num_tiles"] * kv_heads,
            most_queries=most,
            scratch_size=worker_floats,
        )
        self.record = records.packed(step)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
