"""Attention by torch: its fused kernel, or two batched products with a softmax between.

Requests with about as many rows and keys share a call, padded to the longest; long prompt chunks go
alone. Their blocks are gathered once, in the layout that the products read, into memory that the backend
keeps; values of blocks that lie together are read in place. A draft tree is masked: each node sees its
ancestors where they lie. Visibility is worked out once per step for all layers, windows aside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    AttentionOptions,
    attention_backend,
)
from engine.attention.paths import Path, PathChunk, PathRows, lay_out
from engine.attention.products import MOST_SCORES, BmmCall, CallShapes, Limits
from engine.batch import InputBatch, InputTensors, RequestRows
from engine.config import Determinism
from engine.machine import can_pack
from kvpool.store import KVStore

NUM_ROWS_ALONE = 32
"""Branches with more rows than this in a step (prompt chunks) attend by themselves: padding every
decoding neighbour to their length would cost more than a second call."""
_CALL_PAIRS = 4096
"""A kernel call costs about as much as so many pairs of a row and a key: 2-8 thousand on a CPU."""
_LIMIT_MULTIPLE = 32
"""Limits begin at a multiple of so many keys: elementwise kernels like it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows that read one sequence of keys, from slot 0 of ``block_table`` on; the first row's own key is
    number ``base``, and all rows see the keys before number ``num_seen``. ``tree``: rows see what they
    see in this request's draft tree; None: all keys up to their own. ``paths``: which of them read their
    last keys in another order.
    """

    rows: range
    base: int
    num_seen: int
    block_table: Sequence[int]
    num_keys: int
    tree: RequestRows | None = None
    paths: Sequence[Path] = ()


class Scratch:
    """Memory that a backend's gathers go to, layer after layer, as large as the largest so far."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def take(self, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Contiguous tensors of these shapes, valid until the next call."""
        sizes = [math.prod(shape) for shape in shapes]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(
                sum(sizes), dtype=self._memory.dtype, device=self._memory.device
            )
        parts = self._memory[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@attention_backend("sdpa")
class SdpaAttention(AttentionBackend):
    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"fast"})

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.calls = CallShapes(fused=not can_pack(needs.device, needs.dtype))
        self.scratch = Scratch(store.device, store.dtype)

    def branches(self, request: RequestRows) -> list[Branch]:
        """What of a request attends in one call."""
        rows = range(request.first_row, request.first_row + request.num_rows)
        tree = None if request.is_chain() else request
        base, table = request.base, request.block_table
        return [Branch(rows, base, base, table, request.end, tree)]

    def plan(self, batch: InputBatch, inputs: InputTensors) -> SdpaPlan:
        branches = [branch for each in batch.requests for branch in self.branches(each)]
        num_heads = max(shape.num_heads for shape in self.needs.shapes)
        called = _calls(branches, self.calls, num_heads)
        device, block_size = self.store.device, self.store.block_size
        groups = [_build_group(each, block_size, self.calls, device) for each in called]
        lying = np.array([row for each in called for branch in each for row in branch.rows])
        order = None if np.all(lying[1:] > lying[:-1]) else _indices(np.argsort(lying), device)
        return SdpaPlan(self, inputs.slot_mapping, groups, order)


@dataclass(slots=True)
class AttentionGroup:
    """Branches that attend in one call."""

    branches: Sequence[Branch]
    query_rows: torch.Tensor | None  # [num_branches * rows_per_branch]; None: rows as they lie
    output_rows: torch.Tensor | None  # [group_rows] into the padded output; None likewise
    first_row: int
    num_rows: int
    rows_per_branch: int
    num_keys: int
    block_ids: torch.Tensor  # [num_branches * blocks_per_branch]
    contiguous_from: int | None
    """First block where a lone branch's blocks lie one after another: no gather needed."""
    paths: PathRows | None = None
    masks: dict[tuple[int | None, bool], Limits] = field(default_factory=dict)
    """By (window, for the fused kernel)."""
    rows: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)
    """What the store gathers by, made once for layers of so many key heads: of its blocks (None), and
    of a path chunk's slots (its number)."""

    @property
    def num_branches(self) -> int:
        return len(self.branches)

    def limits(self, window: int | None, like: torch.Tensor) -> Limits:
        """What rows may see, made once per step and kind, in the type and on the device of ``like``."""
        if window is not None and window >= self.num_keys:
            window = None
        return self._mask((window, False), like)

    def added(self, window: int | None, like: torch.Tensor, share: int) -> torch.Tensor:
        """The same as a mask to be added to scores ``[num_branches, 1, rows * share, num_keys]``."""
        values = self._mask((window, True), like).values
        return values.expand(-1, -1, share, -1).flatten(1, 2).unsqueeze(1)

    def _mask(self, key: tuple[int | None, bool], like: torch.Tensor) -> Limits:
        if key not in self.masks:
            window, fused = key
            start = self._start() if window is None and not fused else 0
            visible, ends = visibility(
                self.branches, self.rows_per_branch, start, self.num_keys, window
            )
            mask = torch.full(visible.shape, 0.0 if fused else math.inf, dtype=like.dtype)
            mask.masked_fill_(torch.from_numpy(~visible), -math.inf)
            mask = mask.to(like.device, non_blocking=True)
            mask = mask.unsqueeze(2)
            self.masks[key] = Limits(start, mask, ends)
        return self.masks[key]

    def _start(self) -> int:
        """All rows see the keys before it."""
        return min(branch.num_seen for branch in self.branches) // _LIMIT_MULTIPLE * _LIMIT_MULTIPLE


@dataclass(slots=True)
class SdpaPlan:
    """``order``: where each row's output lies among those of all groups, one after another; None:
    there."""

    backend: SdpaAttention
    slot_mapping: torch.Tensor
    groups: list[AttentionGroup]
    order: torch.Tensor | None  # [num_rows]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.backend.write(layer, self.slot_mapping, key, value)
        outputs = [self._attend(group, layer, query, options) for group in self.groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if self.order is None else output.index_select(0, self.order)

    def _attend(
        self, group: AttentionGroup, layer: int, query: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """One call: ``[group_rows, num_heads, value_dim]``."""
        if group.query_rows is None:
            mine = query[group.first_row : group.first_row + group.num_rows]
        else:
            mine = query.index_select(0, group.query_rows)
        keys, values = self._gather(group, layer)
        if keys.dtype.itemsize == 1:  # torch's kernels know no 8-bit floats
            keys, values = keys.to(query.dtype), values.to(query.dtype)
        calls = self.backend.calls
        if calls.fused and options.softcap is None and options.sinks is None:
            output = _fused(mine, keys, values, group, options)
        else:
            limits = group.limits(options.window, query)
            read = partial(self._path_values, group, layer)
            call = BmmCall(limits, calls, options, group.paths, read)
            output = call.attend(mine, keys, values)
        return output if group.output_rows is None else output.index_select(0, group.output_rows)

    def _gather(self, group: AttentionGroup, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[num_kv_heads, num_branches, num_keys, dim]``; of values that lie together in
        the store a view. (Products with transposed keys are slow where heads lie apart.)"""
        store, scratch = self.backend.store, self.backend.scratch
        kv_heads, _, key_dim = store.key_shape(layer)
        value_dim = store.value_shape(layer)[2]
        first, count = group.contiguous_from, group.num_keys // store.block_size
        size = (kv_heads, group.num_branches * group.num_keys)
        if first is not None and first + count <= store.num_blocks:
            lying, values = store.slice_blocks(layer, first, count)
            (keys,) = scratch.take((*size, key_dim))
            keys.copy_(lying)
        else:
            if (kv_heads, None) not in group.rows:
                group.rows[kv_heads, None] = store.rows_of(group.block_ids, kv_heads)
            out = scratch.take((*size, key_dim), (*size, value_dim))
            keys, values = store.gather_blocks(layer, group.rows[kv_heads, None], (out[0], out[1]))
        shape = (group.num_branches, group.num_keys)
        return keys.unflatten(1, shape), values.unflatten(1, shape)

    def _path_values(self, group: AttentionGroup, layer: int, chunk: PathChunk) -> torch.Tensor:
        store = self.backend.store
        key = (store.value_shape(layer)[0], chunk.number)
        if key not in group.rows:
            group.rows[key] = store.slot_rows_of(chunk.slots, key[0])
        return store.gather_values(layer, group.rows[key])


def _fused(
    query: torch.Tensor,  # [num_branches * rows, num_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    group: AttentionGroup,
    options: AttentionOptions,
) -> torch.Tensor:
    """``[num_branches * rows, num_heads, value_dim]``. The heads that share a key head become rows."""
    kv_heads, branches = keys.shape[:2]
    num_rows, num_heads, dim = query.shape
    share = num_heads // kv_heads
    folded = query.view(branches, -1, kv_heads, share, dim).transpose(1, 2).flatten(2, 3)
    output = F.scaled_dot_product_attention(
        folded,
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=group.added(options.window, query, share),
        scale=options.scaling,
    )
    output = output.view(branches, kv_heads, -1, share, output.shape[3]).transpose(1, 2)
    return output.reshape(num_rows, num_heads, -1)


def _calls(branches: Sequence[Branch], shapes: CallShapes, num_heads: int) -> list[list[Branch]]:
    """Long branches alone, then the others by length. All of a call are padded to its longest: a request
    with a deep draft or a long past must not make its neighbours pay for it. A call is no larger than
    what ``MOST_SCORES`` holds.
    """
    alone = [[branch] for branch in branches if len(branch.rows) > NUM_ROWS_ALONE]
    short = [branch for branch in branches if len(branch.rows) <= NUM_ROWS_ALONE]
    calls = []
    for call in _cut(short, shapes):
        rows = _round_up(max(len(branch.rows) for branch in call), shapes.padded_rows)
        keys = shapes.pad_keys(max(branch.num_keys for branch in call))
        most = max(1, MOST_SCORES // (rows * keys * num_heads))
        calls += [call[first : first + most] for first in range(0, len(call), most)]
    return [*alone, *calls]


def _cut(branches: Sequence[Branch], shapes: CallShapes) -> list[list[Branch]]:
    """In order of keys and rows, cut where calls of their own cost less than padding: the cheapest cuts
    of that order, by dynamic programming over the (few) different sizes."""
    by_size: dict[tuple[int, int], list[Branch]] = {}
    for branch in branches:
        keys = shapes.pad_keys(branch.num_keys)
        rows = _round_up(len(branch.rows), shapes.padded_rows)
        by_size.setdefault((keys, rows), []).append(branch)
    sizes = sorted(by_size)
    # Of the first n sizes: the least cost, and where the last call of it begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(sizes) + 1):
        num_branches = most_rows = 0
        options = []
        for start in range(end - 1, -1, -1):
            num_branches += len(by_size[sizes[start]])
            most_rows = max(most_rows, sizes[start][1])
            # Half a pair more per key: it has to be gathered, whatever number of rows read it.
            pairs = num_branches * sizes[end - 1][0] * (2 * most_rows + 1) // 2
            options.append((best[start][0] + _CALL_PAIRS + pairs, start))
        best.append(min(options))
    calls: list[list[Branch]] = []
    end = len(sizes)
    while end:
        start = best[end][1]
        calls.append([branch for size in sizes[start:end] for branch in by_size[size]])
        end = start
    return calls[::-1]


def _build_group(
    branches: Sequence[Branch], block_size: int, shapes: CallShapes, device: torch.device
) -> AttentionGroup:
    rows = _round_up(max(len(branch.rows) for branch in branches), shapes.padded_rows)
    num_keys = max(branch.num_keys for branch in branches)
    num_keys = _round_up(num_keys, math.lcm(block_size, shapes.key_multiple))
    num_blocks = num_keys // block_size

    # Tables shorter than the longest are padded with block 0: whatever it holds is masked.
    block_ids = np.zeros((len(branches), num_blocks), dtype=np.int64)
    for index, branch in enumerate(branches):
        table = branch.block_table[:num_blocks]
        block_ids[index, : len(table)] = table
    query_rows, output_rows = _row_indices(branches, rows, device)
    paths = lay_out(
        [branch.paths for branch in branches],
        rows,
        shapes.padded_rows,
        num_keys,
        shapes.key_chunk,
        block_ids,
        device,
    )
    return AttentionGroup(
        branches=branches,
        query_rows=query_rows,
        output_rows=output_rows,
        first_row=branches[0].rows[0],
        num_rows=sum(len(branch.rows) for branch in branches),
        rows_per_branch=rows,
        num_keys=num_keys,
        block_ids=_indices(block_ids.reshape(-1), device),
        contiguous_from=_contiguous_from(branches, num_blocks),
        paths=paths,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _indices(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def _contiguous_from(branches: Sequence[Branch], num_blocks: int) -> int | None:
    if len(branches) != 1:
        return None
    table = branches[0].block_table
    first = table[0]
    if any(block != first + offset for offset, block in enumerate(table[:num_blocks])):
        return None
    return first


def _row_indices(
    branches: Sequence[Branch], rows: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the padded rows come from, and where each real row lies among them."""
    lying = [row for branch in branches for row in branch.rows]
    total, first = len(lying), lying[0]
    if total == len(branches) * rows and lying == list(range(first, first + total)):
        return None, None
    query = np.empty((len(branches), rows), dtype=np.int64)
    output = np.empty(total, dtype=np.int64)
    done = 0
    for index, branch in enumerate(branches):
        count = len(branch.rows)
        query[index, :count] = branch.rows
        query[index, count:] = branch.rows[0]
        output[done : done + count] = np.arange(index * rows, index * rows + count)
        done += count
    return _indices(query.reshape(-1), device), _indices(output, device)


def _tree_part(request: RequestRows, start: int) -> tuple[slice, slice]:
    """Rows and keys of a draft's nodes, keys counted from number ``start`` on."""
    first = request.base + request.num_known - start
    return slice(request.num_known, request.num_rows), slice(first, first + len(request.parents))


def visibility(
    branches: Sequence[Branch], rows: int, start: int, num_keys: int, window: int | None
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Who sees whom of the keys from number ``start`` on: a row in the order of its text sees keys up to
    its own; a draft node of a tree that is masked sees the known tokens, its ancestors and itself.
    ``[num_branches, rows, num_keys - start]`` bool, and the end of what each row sees in any branch."""
    bases = np.array([branch.base for branch in branches], dtype=np.int64)
    slots = np.arange(start, num_keys, dtype=np.int64)
    places = bases[:, None] + np.arange(rows, dtype=np.int64)[None, :]
    for index, branch in enumerate(branches):
        for path in branch.paths:
            places[index, path.rows] = path.first_place + np.arange(len(path.rows))
        places[index, len(branch.rows) :] = places[index, 0]
    ends = places + 1
    key_places = np.broadcast_to(slots, (len(branches), len(slots)))
    visible = slots[None, None, :] <= places[:, :, None]
    for index, branch in enumerate(branches):
        if branch.tree is None:
            continue
        if not key_places.flags.writeable:
            key_places = key_places.copy()
        request = branch.tree
        nodes, columns = _tree_part(request, start)
        anchor = request.base + request.num_known - 1
        count, stored = len(request.parents), request.num_stored
        positions = anchor + np.array(request.depths(), dtype=np.int64)
        places[index, nodes] = positions[stored:]
        ends[index, nodes] = request.end
        key_places[index, columns] = positions
        seen = np.eye(count, dtype=bool)
        for node, parent in enumerate(request.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        visible[index, nodes, columns.start :] = False
        visible[index, nodes, columns] = seen[stored:]
    if window is not None:
        visible &= places[:, :, None] - key_places[:, None, :] < window
    return visible, ends.max(axis=0).tolist()
