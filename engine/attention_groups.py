"""Which rows of a step attend together, and what each of them may see.

Requests with few rows share one kernel call, padded to the longest of them; long prompt chunks go alone.
Visibility is worked out once per step for all layers, windows aside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

EXACT_KEY_MULTIPLE = 512
# Query rows (times the heads that share a key head) of a tile: enough to fill the kernel's registers.
EXACT_TILE_ROWS = 8
NUM_ROWS_ALONE = 32
"""Requests with more rows than this in a step (prompt chunks) attend by themselves: padding every
decoding neighbour to their length would cost more than a second call."""


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's rows of a step: ``num_known`` tokens in a chain (prompt chunk or anchor), then
    draft nodes. ``parents`` as in DraftTree: -1 is the last known row."""

    first_row: int
    num_known: int
    base: int
    parents: Sequence[int]
    block_table: Sequence[int]

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.parents)

    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))


@dataclass(slots=True)
class AttentionGroup:
    """Requests that attend in one kernel call."""

    query_rows: torch.Tensor | None  # [num_requests * rows_per_request]; None: rows as they lie
    output_rows: torch.Tensor | None  # [group_rows] into the padded output; None likewise
    first_row: int
    num_rows: int
    num_requests: int
    rows_per_request: int
    tile_rows: int
    block_ids: torch.Tensor  # [num_requests * blocks_per_request]
    contiguous_from: int | None
    """First block where a lone request's blocks lie one after another: no gather needed."""
    visible: np.ndarray[Any, Any]  # [num_requests, rows_per_request, num_keys] bool, no window
    query_positions: np.ndarray[Any, Any]  # [num_requests, rows_per_request]
    key_positions: np.ndarray[Any, Any]  # [num_requests, num_keys]
    masks: dict[tuple[int | None, int, int], torch.Tensor] = field(default_factory=dict)
    """By (window, heads per key head, key heads)."""

    @property
    def num_tiles(self) -> int:
        return self.rows_per_request // self.tile_rows


def exact_tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a tile in exact mode: with the heads that share a key head they fill about
    ``EXACT_TILE_ROWS`` rows of the kernel."""
    return max(1, EXACT_TILE_ROWS // (num_heads // num_kv_heads))


def build_groups(
    requests: Sequence[RequestRows],
    block_size: int,
    tile_rows: int | None,
    device: torch.device,
) -> list[AttentionGroup]:
    """Long chunks alone, all other requests together. ``tile_rows`` None: fast mode, no tiles."""
    together = [request for request in requests if request.num_rows <= NUM_ROWS_ALONE]
    alone = [request for request in requests if request.num_rows > NUM_ROWS_ALONE]
    batches = [[request] for request in alone] + ([together] if together else [])
    return [_build_group(batch, block_size, tile_rows, device) for batch in batches]


def _build_group(
    requests: Sequence[RequestRows],
    block_size: int,
    tile_rows: int | None,
    device: torch.device,
) -> AttentionGroup:
    num_requests = len(requests)
    rows = max(request.num_rows for request in requests)
    rows = rows if tile_rows is None else _round_up(rows, tile_rows)
    num_keys = max(request.base + request.num_rows for request in requests)
    multiple = block_size if tile_rows is None else math.lcm(block_size, EXACT_KEY_MULTIPLE)
    num_keys = _round_up(num_keys, multiple)
    num_blocks = num_keys // block_size

    # Tables shorter than the longest are padded with block 0: whatever it holds is masked.
    block_ids = np.zeros((num_requests, num_blocks), dtype=np.int64)
    for index, request in enumerate(requests):
        table = request.block_table[:num_blocks]
        block_ids[index, : len(table)] = table
    visible, query_positions, key_positions = _visibility(requests, rows, num_keys)
    total = sum(request.num_rows for request in requests)
    query_rows, output_rows = _row_indices(requests, rows, total, device)
    return AttentionGroup(
        query_rows=query_rows,
        output_rows=output_rows,
        first_row=requests[0].first_row,
        num_rows=total,
        num_requests=num_requests,
        rows_per_request=rows,
        tile_rows=rows if tile_rows is None else tile_rows,
        block_ids=torch.from_numpy(block_ids.reshape(-1)).to(device, non_blocking=True),
        contiguous_from=_contiguous_from(requests, num_blocks),
        visible=visible,
        query_positions=query_positions,
        key_positions=key_positions,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _contiguous_from(requests: Sequence[RequestRows], num_blocks: int) -> int | None:
    if len(requests) != 1:
        return None
    table = requests[0].block_table
    first = table[0]
    if any(block != first + offset for offset, block in enumerate(table[:num_blocks])):
        return None
    return first


def _row_indices(
    requests: Sequence[RequestRows], rows: int, total: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the padded rows come from, and where each real row lies among them."""
    if total == len(requests) * rows:
        return None, None
    query = np.empty((len(requests), rows), dtype=np.int64)
    output = np.empty(total, dtype=np.int64)
    done = 0
    for index, request in enumerate(requests):
        count = request.num_rows
        query[index, :count] = np.arange(request.first_row, request.first_row + count)
        query[index, count:] = request.first_row
        output[done : done + count] = np.arange(index * rows, index * rows + count)
        done += count
    return (
        torch.from_numpy(query.reshape(-1)).to(device, non_blocking=True),
        torch.from_numpy(output).to(device, non_blocking=True),
    )


def _visibility(
    requests: Sequence[RequestRows], rows: int, num_keys: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Who sees whom, windows aside: row i of a chain sees keys up to its own slot; a draft node sees
    the known tokens, its ancestors and itself."""
    bases = np.array([request.base for request in requests], dtype=np.int64)
    slots = np.arange(num_keys, dtype=np.int64)
    query_positions = bases[:, None] + np.arange(rows, dtype=np.int64)[None, :]
    visible = slots[None, None, :] <= query_positions[:, :, None]
    key_positions = np.broadcast_to(slots, (len(requests), num_keys))
    for index, request in enumerate(requests):
        if request.is_chain():
            continue
        if not key_positions.flags.writeable:
            key_positions = key_positions.copy()
        anchor = request.base + request.num_known - 1
        count = len(request.parents)
        positions = anchor + np.array(request.depths(), dtype=np.int64)
        query_positions[index, request.num_known : request.num_known + count] = positions
        key_positions[index, anchor + 1 : anchor + 1 + count] = positions
        seen = np.eye(count, dtype=bool)
        for node, parent in enumerate(request.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        tail = visible[index, request.num_known : request.num_known + count]
        tail[:, anchor + 1 :] = False
        tail[:, anchor + 1 : anchor + 1 + count] = seen
    return visible, query_positions, key_positions
