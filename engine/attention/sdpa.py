"""Attention by torch: its fused kernel, or two batched products with a softmax between.

Requests with about as many rows and keys share a call, padded to the longest; long prompt chunks go
alone. Their blocks are gathered, or read in place where they lie together. A draft tree is masked: each
node sees its ancestors where they lie. Visibility is worked out once per step for all layers, windows
aside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from engine.attention.products import CallShapes, bmm_attention
from engine.batch import InputBatch, InputTensors, RequestRows
from engine.config import Determinism
from engine.machine import can_pack
from kvpool.store import KVStore

NUM_ROWS_ALONE = 32
"""Branches with more rows than this in a step (prompt chunks) attend by themselves: padding every
decoding neighbour to their length would cost more than a second call."""
_CALL_PAIRS = 4096
"""A kernel call costs about as much as so many pairs of a row and a key: 2-8 thousand on a CPU."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows that read one sequence of keys, from slot 0 of ``block_table`` on; the first row's own key is
    number ``base``. ``path_slots``: where the sequence's last keys lie in the store, if not in the
    table's order. ``tree``: rows see what they see in this request's draft tree; None: all keys up to
    their own.
    """

    rows: Sequence[int]
    base: int
    block_table: Sequence[int]
    path_slots: Sequence[int] = ()
    tree: RequestRows | None = None

    @property
    def num_keys(self) -> int:
        return self.base + len(self.rows) if self.tree is None else self.tree.end


@attention_backend("sdpa")
class SdpaAttention(AttentionBackend):
    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"fast"})

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.calls = CallShapes(fused=not can_pack(needs.device, needs.dtype))

    def branches(self, request: RequestRows) -> list[Branch]:
        """What of a request attends in one call."""
        rows = range(request.first_row, request.first_row + request.num_rows)
        tree = None if request.is_chain() else request
        return [Branch(rows, request.base, request.block_table, (), tree)]

    def plan(self, batch: InputBatch, inputs: InputTensors) -> SdpaPlan:
        branches = [branch for each in batch.requests for branch in self.branches(each)]
        called = _calls(branches, self.calls)
        device, block_size = self.store.device, self.store.block_size
        groups = [_build_group(each, block_size, self.calls, device) for each in called]
        lying = np.array([row for each in called for branch in each for row in branch.rows])
        order = None if np.all(lying[1:] > lying[:-1]) else _indices(np.argsort(lying), device)
        return SdpaPlan(self, inputs.slot_mapping, groups, order)


@dataclass(slots=True)
class AttentionGroup:
    """Branches that attend in one call."""

    query_rows: torch.Tensor | None  # [num_branches * rows_per_branch]; None: rows as they lie
    output_rows: torch.Tensor | None  # [group_rows] into the padded output; None likewise
    first_row: int
    num_rows: int
    num_branches: int
    rows_per_branch: int
    tile_rows: int
    """Of the fused kernel, whose tiles are a batch; bmm attention goes through its tiles one by one."""
    block_ids: torch.Tensor  # [num_branches * blocks_per_branch]
    contiguous_from: int | None
    """First block where a lone branch's blocks lie one after another: no gather needed."""
    path_slots: torch.Tensor | None  # [num_path_keys]
    path_keys: torch.Tensor | None
    """``[num_path_keys]`` into num_branches * num_keys: where they belong."""
    visible: np.ndarray[Any, Any]  # [num_branches, rows_per_branch, num_keys] bool, no window
    query_positions: np.ndarray[Any, Any]  # [num_branches, rows_per_branch]
    key_positions: np.ndarray[Any, Any]  # [num_branches, num_keys]
    masks: dict[tuple[int | None, int, int, bool], torch.Tensor] = field(default_factory=dict)
    """By (window, heads per key head, key heads, to be added)."""

    @property
    def num_tiles(self) -> int:
        return self.rows_per_branch // self.tile_rows

    def mask(
        self, window: int | None, share: int, num_kv_heads: int, like: torch.Tensor, additive: bool
    ) -> torch.Tensor:
        """What rows may see, in the shape of the call (see ``SdpaPlan``): to be added to scores, or their
        limits (see ``bmm_attention``). Made once per step and kind."""
        key = (window, share, num_kv_heads, additive)
        if key in self.masks:
            return self.masks[key]
        visible = self.visible
        if window is not None:
            distance = self.query_positions[:, :, None] - self.key_positions[:, None, :]
            visible = visible & (distance < window)
        branches, rows, keys = visible.shape
        seen = 0.0 if additive else float("inf")
        mask = torch.full((branches, rows, 1, keys), seen, dtype=like.dtype if additive else None)
        mask.masked_fill_(torch.from_numpy(~visible).unsqueeze(2), float("-inf"))
        mask = mask.to(like.device, non_blocking=True).expand(-1, -1, share, -1)
        mask = mask.reshape(branches, self.num_tiles, self.tile_rows * share, keys)
        if branches == 1:
            mask = mask.transpose(0, 1)  # [tiles, 1, tile * share, num_keys]
        elif self.num_tiles > 1:
            mask = mask.unsqueeze(1).expand(-1, num_kv_heads, -1, -1, -1).flatten(1, 2)
        self.masks[key] = mask
        return mask


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
        keys, values = _gather(self.backend.store, group, layer)
        if keys.dtype.itemsize == 1:  # a draft model's; the kernels know no 8-bit floats
            keys, values = keys.to(query.dtype), values.to(query.dtype)
        num_kv_heads = keys.shape[1]
        num_heads, head_dim = query.shape[1], query.shape[2]
        share = num_heads // num_kv_heads
        branches, rows = group.num_branches, group.rows_per_branch
        tile, tiles = group.tile_rows, group.num_tiles

        if group.query_rows is None:
            mine = query[group.first_row : group.first_row + group.num_rows]
        else:
            mine = query.index_select(0, group.query_rows)
        # The heads that share a key head become rows of one product: [branches, kv_heads * tiles, ...].
        mine = mine.view(branches, rows, num_kv_heads, share, head_dim).permute(0, 2, 1, 3, 4)
        mine = mine.reshape(branches, num_kv_heads * tiles, tile * share, head_dim)
        fused = self.backend.calls.fused and options.softcap is None and options.sinks is None
        mask = group.mask(options.window, share, num_kv_heads, query, additive=fused)
        if branches == 1 and tiles > 1:
            # One branch: its tiles are a batch over the same keys, and heads share the mask.
            mine = mine.view(num_kv_heads, tiles, tile * share, head_dim).transpose(0, 1)
            keys, values = keys.expand(tiles, -1, -1, -1), values.expand(tiles, -1, -1, -1)
        if fused:
            output = F.scaled_dot_product_attention(
                mine,
                keys,
                values,
                attn_mask=mask,
                scale=options.scaling,
                enable_gqa=mine.shape[1] != keys.shape[1],
            )
        else:
            calls = self.backend.calls
            output = bmm_attention(mine, keys, values, mask, share, options, calls)
        if branches == 1 and tiles > 1:
            output = output.transpose(0, 1)
        output = output.reshape(branches, num_kv_heads, rows, share, -1).permute(0, 2, 1, 3, 4)
        output = output.reshape(branches * rows, num_heads, -1)
        return output if group.output_rows is None else output.index_select(0, group.output_rows)


def _gather(store: KVStore, group: AttentionGroup, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[num_branches, num_kv_heads, num_keys, dim]``, without a copy if they lie
    together in the store."""
    num_ids = group.block_ids.shape[0]
    first = group.contiguous_from
    if first is not None and first + num_ids <= store.num_blocks:
        keys, values = store.slice_blocks(layer, first, num_ids)
    else:
        keys, values = store.gather_blocks(layer, group.block_ids)
        if group.path_slots is not None and group.path_keys is not None:
            for gathered, stored in ((keys, store.key[layer]), (values, store.value[layer])):
                path = stored.index_select(0, group.path_slots)
                gathered.view(-1, *stored.shape[1:]).index_copy_(0, group.path_keys, path)
    shape = (group.num_branches, group.visible.shape[2])
    return (
        keys.view(*shape, *keys.shape[2:]).transpose(1, 2),
        values.view(*shape, *values.shape[2:]).transpose(1, 2),
    )


def _calls(branches: Sequence[Branch], shapes: CallShapes) -> list[list[Branch]]:
    """Long branches alone, then the others by length, those whose keys lie in order before those whose
    keys do not. All of a call are padded to its longest: a request with a deep draft or a long past must
    not make its neighbours pay for it.
    """
    alone = [[branch] for branch in branches if len(branch.rows) > NUM_ROWS_ALONE]
    short = [branch for branch in branches if len(branch.rows) <= NUM_ROWS_ALONE]
    in_order = [branch for branch in short if not branch.path_slots]
    on_paths = [branch for branch in short if branch.path_slots]
    return [*alone, *_cut(in_order, shapes), *_cut(on_paths, shapes)]


def _cut(branches: Sequence[Branch], shapes: CallShapes) -> list[list[Branch]]:
    """In order of keys and rows, cut where calls of their own cost less than padding: the cheapest cuts
    of that order, by dynamic programming over the (few) different sizes."""
    by_size: dict[tuple[int, int], list[Branch]] = {}
    for branch in branches:
        keys = _round_up(branch.num_keys, shapes.key_multiple)
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
    visible, query_positions, key_positions = _visibility(branches, rows, num_keys)
    query_rows, output_rows = _row_indices(branches, rows, device)
    path_slots, path_keys = _path_indices(branches, num_keys, device)
    return AttentionGroup(
        query_rows=query_rows,
        output_rows=output_rows,
        first_row=branches[0].rows[0],
        num_rows=sum(len(branch.rows) for branch in branches),
        num_branches=len(branches),
        rows_per_branch=rows,
        tile_rows=(shapes.tile_rows if shapes.fused else None) or rows,
        block_ids=_indices(block_ids.reshape(-1), device),
        contiguous_from=_contiguous_from(branches, num_blocks),
        path_slots=path_slots,
        path_keys=path_keys,
        visible=visible,
        query_positions=query_positions,
        key_positions=key_positions,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _indices(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)


def _contiguous_from(branches: Sequence[Branch], num_blocks: int) -> int | None:
    if len(branches) != 1 or branches[0].path_slots:
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


def _path_indices(
    branches: Sequence[Branch], num_keys: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Slots whose keys lie elsewhere than in their text, and where they belong among those gathered."""
    slots: list[int] = []
    keys: list[int] = []
    for index, branch in enumerate(branches):
        end = index * num_keys + branch.num_keys
        slots += branch.path_slots
        keys += range(end - len(branch.path_slots), end)
    if not slots:
        return None, None
    return torch.tensor(slots, device=device), torch.tensor(keys, device=device)


def _visibility(
    branches: Sequence[Branch], rows: int, num_keys: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Who sees whom, windows aside: row i of a chain sees keys up to its own slot; a draft node sees
    the known tokens, its ancestors and itself."""
    bases = np.array([branch.base for branch in branches], dtype=np.int64)
    slots = np.arange(num_keys, dtype=np.int64)
    query_positions = bases[:, None] + np.arange(rows, dtype=np.int64)[None, :]
    visible = slots[None, None, :] <= query_positions[:, :, None]
    key_positions = np.broadcast_to(slots, (len(branches), num_keys))
    for index, branch in enumerate(branches):
        request = branch.tree
        if request is None:
            continue
        if not key_positions.flags.writeable:
            key_positions = key_positions.copy()
        anchor = request.base + request.num_known - 1
        count, stored = len(request.parents), request.num_stored
        positions = anchor + np.array(request.depths(), dtype=np.int64)
        query_positions[index, request.num_known : request.num_rows] = positions[stored:]
        key_positions[index, anchor + 1 : anchor + 1 + count] = positions
        seen = np.eye(count, dtype=bool)
        for node, parent in enumerate(request.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        tail = visible[index, request.num_known : request.num_rows]
        tail[:, anchor + 1 :] = False
        tail[:, anchor + 1 : anchor + 1 + count] = seen[stored:]
    return visible, query_positions, key_positions
