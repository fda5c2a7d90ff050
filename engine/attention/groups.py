"""Which rows of a step attend together, and what each of them may see.

Requests with about as many rows and keys share a kernel call, padded to the longest; long prompt chunks
go alone.
Visibility is worked out once per step for all layers, windows aside.

A fast step masks a draft tree: each node sees its ancestors where they lie. Skipped keys between them
change how a kernel groups its sums, though, and so a row's bits. In exact mode a tree is therefore taken
apart into strands, each of which reads its keys in the order of its text, as if that were all there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.batch import RequestRows, slot_of

NUM_ROWS_ALONE = 32
"""Requests with more rows than this in a step (prompt chunks) attend by themselves: padding every
decoding neighbour to their length would cost more than a second call."""

EXACT_KEY_MULTIPLE = 512
# Query rows (times the heads that share a key head) of a tile: enough to fill the kernel's registers.
EXACT_TILE_ROWS = 8
FREE_KEY_MULTIPLE = 128
"""What keys are padded to where nothing depends on it: few shapes, since a kernel is made for each."""
_CALL_PAIRS = 4096
"""A kernel call costs about as much as so many pairs of a row and a key: 2-8 thousand on a CPU."""


@dataclass(frozen=True, slots=True)
class Strand:
    """Rows that read one sequence of keys: a request's, or those of one branch of its draft tree.

    ``shape`` says where they stand in that sequence. ``path_slots``, of a branch: where the sequence's
    last keys lie in the store, in the order of the text.
    """

    rows: Sequence[int]
    shape: RequestRows
    path_slots: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class GroupShapes:
    """Which shapes a kernel call may have. ``tile_rows``: rows come in tiles of exactly so many; None:
    as they are. ``in_strands``: draft trees are taken apart."""

    tile_rows: int | None = None
    key_multiple: int = FREE_KEY_MULTIPLE
    in_strands: bool = False


MASKED = GroupShapes()
"""Fast: trees as they lie."""
FREE_STRANDS = GroupShapes(in_strands=True)
"""Exact where a row's bits do not depend on shapes."""


def exact_tiles(tile_rows: int) -> GroupShapes:
    """Exact where they do."""
    return GroupShapes(tile_rows, EXACT_KEY_MULTIPLE, in_strands=True)


@dataclass(slots=True)
class AttentionGroup:
    """Strands that attend in one kernel call; ``requests`` in names of shapes are strands."""

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
    path_slots: torch.Tensor | None  # [num_path_keys]
    path_keys: (
        torch.Tensor | None
    )  # [num_path_keys] into num_requests * num_keys: where they belong
    visible: np.ndarray[Any, Any]  # [num_requests, rows_per_request, num_keys] bool, no window
    query_positions: np.ndarray[Any, Any]  # [num_requests, rows_per_request]
    key_positions: np.ndarray[Any, Any]  # [num_requests, num_keys]
    shapes: GroupShapes
    masks: dict[tuple[int | None, int, int, bool], torch.Tensor] = field(default_factory=dict)
    """By (window, heads per key head, key heads, to be added)."""

    @property
    def is_tiled(self) -> bool:
        """Whether exactly these rows have to share a call."""
        return self.shapes.tile_rows is not None

    @property
    def num_tiles(self) -> int:
        return self.rows_per_request // self.tile_rows


def exact_tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a tile in exact mode: with the heads that share a key head they fill about
    ``EXACT_TILE_ROWS`` rows of the kernel."""
    return max(1, EXACT_TILE_ROWS // (num_heads // num_kv_heads))


@dataclass(slots=True)
class GroupedRows:
    """A step's rows in groups. ``order``: where each row's output lies among those of all groups, one
    after another; None: there."""

    groups: list[AttentionGroup]
    order: torch.Tensor | None  # [num_rows]


def group_rows(
    requests: Sequence[RequestRows],
    block_size: int,
    shapes: GroupShapes,
    device: torch.device,
) -> GroupedRows:
    """Long chunks alone, others with their like."""
    strands = [
        strand
        for request in requests
        for strand in (_strands(request, block_size) if shapes.in_strands else _whole(request))
    ]
    batches = _batches(strands, shapes)
    groups = [_build_group(batch, block_size, shapes, device) for batch in batches]
    lying = np.array([row for batch in batches for strand in batch for row in strand.rows])
    if np.all(lying[1:] > lying[:-1]):
        return GroupedRows(groups, None)
    return GroupedRows(groups, torch.from_numpy(np.argsort(lying)).to(device, non_blocking=True))


def _batches(strands: Sequence[Strand], shapes: GroupShapes) -> list[list[Strand]]:
    """Long strands alone, then the others by length, trunks before branches. All of a call are padded
    to its longest: a request with a deep draft or a long past must not make its neighbours pay for it.
    """
    alone: list[list[Strand]] = []
    alike: dict[bool, list[Strand]] = {False: [], True: []}
    for strand in strands:
        if len(strand.rows) > NUM_ROWS_ALONE:
            alone.append([strand])
        else:
            alike[bool(strand.path_slots)].append(strand)
    return [*alone, *_cut(alike[False], shapes), *_cut(alike[True], shapes)]


def _cut(strands: Sequence[Strand], shapes: GroupShapes) -> list[list[Strand]]:
    """In order of keys and rows, cut where calls of their own cost less than padding: the cheapest cuts
    of that order, by dynamic programming over the (few) different sizes."""
    by_size: dict[tuple[int, int], list[Strand]] = {}
    for strand in strands:
        keys = _round_up(strand.shape.base + len(strand.rows), shapes.key_multiple)
        by_size.setdefault((keys, _round_up(len(strand.rows), shapes.tile_rows or 1)), []).append(
            strand
        )
    sizes = sorted(by_size)
    # Of the first n sizes: the least cost, and where the last call of it begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(sizes) + 1):
        num_strands = most_rows = 0
        options = []
        for start in range(end - 1, -1, -1):
            num_strands += len(by_size[sizes[start]])
            most_rows = max(most_rows, sizes[start][1])
            # Half a pair more per key: it has to be gathered, whatever number of rows read it.
            pairs = num_strands * sizes[end - 1][0] * (2 * most_rows + 1) // 2
            options.append((best[start][0] + _CALL_PAIRS + pairs, start))
        best.append(min(options))
    batches: list[list[Strand]] = []
    end = len(sizes)
    while end:
        start = best[end][1]
        batches.append([strand for size in sizes[start:end] for strand in by_size[size]])
        end = start
    return batches[::-1]


def _whole(request: RequestRows) -> list[Strand]:
    return [Strand(range(request.first_row, request.first_row + request.num_rows), request)]


def _strands(request: RequestRows, block_size: int) -> list[Strand]:
    """The request's chains: known rows with the nodes that lie as their text does, then branch after
    branch, each as deep as it goes."""
    if request.num_stored:
        raise ValueError("exact mode takes whole draft trees only")
    parents, table = request.parents, request.block_table
    lead = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
    if lead == len(parents):
        return _whole(request)
    first, num_known = request.first_row, request.num_known
    trunk = RequestRows((), num_known, request.base, parents[:lead], table, 0, first_row=first)
    strands = _whole(trunk)
    placed = set(range(lead))
    for start in range(lead, len(parents)):
        if start in placed:
            continue
        branch = [start]
        for node in range(start + 1, len(parents)):
            if parents[node] == branch[-1] and node not in placed:
                branch.append(node)
        placed.update(branch)
        path = branch[:]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        anchor = request.base + num_known - 1
        base = anchor + 1 + len(path) - len(branch)
        slots = [slot_of(table, anchor + 1 + node, block_size) for node in path]
        rows = [first + num_known + node for node in branch]
        shape = RequestRows((), len(rows), base, (), table, 0, first_row=rows[0])
        strands.append(Strand(rows, shape, slots))
    return strands


def _build_group(
    strands: Sequence[Strand],
    block_size: int,
    shapes: GroupShapes,
    device: torch.device,
) -> AttentionGroup:
    requests = [strand.shape for strand in strands]
    num_requests = len(requests)
    rows = max(request.num_rows for request in requests)
    rows = _round_up(rows, shapes.tile_rows or 1)
    num_keys = max(request.end for request in requests)
    num_keys = _round_up(num_keys, math.lcm(block_size, shapes.key_multiple))
    num_blocks = num_keys // block_size

    # Tables shorter than the longest are padded with block 0: whatever it holds is masked.
    block_ids = np.zeros((num_requests, num_blocks), dtype=np.int64)
    for index, request in enumerate(requests):
        table = request.block_table[:num_blocks]
        block_ids[index, : len(table)] = table
    visible, query_positions, key_positions = _visibility(requests, rows, num_keys)
    query_rows, output_rows = _row_indices(strands, rows, device)
    path_slots, path_keys = _path_indices(strands, num_keys, device)
    return AttentionGroup(
        query_rows=query_rows,
        output_rows=output_rows,
        first_row=strands[0].rows[0],
        num_rows=sum(request.num_rows for request in requests),
        num_requests=num_requests,
        rows_per_request=rows,
        tile_rows=shapes.tile_rows or rows,
        block_ids=torch.from_numpy(block_ids.reshape(-1)).to(device, non_blocking=True),
        contiguous_from=_contiguous_from(strands, num_blocks),
        path_slots=path_slots,
        path_keys=path_keys,
        visible=visible,
        query_positions=query_positions,
        key_positions=key_positions,
        shapes=shapes,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _contiguous_from(strands: Sequence[Strand], num_blocks: int) -> int | None:
    if len(strands) != 1 or strands[0].path_slots:
        return None
    table = strands[0].shape.block_table
    first = table[0]
    if any(block != first + offset for offset, block in enumerate(table[:num_blocks])):
        return None
    return first


def _row_indices(
    strands: Sequence[Strand], rows: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where the padded rows come from, and where each real row lies among them."""
    total = sum(len(strand.rows) for strand in strands)
    first = strands[0].rows[0]
    if total == len(strands) * rows and [row for strand in strands for row in strand.rows] == list(
        range(first, first + total)
    ):
        return None, None
    query = np.empty((len(strands), rows), dtype=np.int64)
    output = np.empty(total, dtype=np.int64)
    done = 0
    for index, strand in enumerate(strands):
        count = len(strand.rows)
        query[index, :count] = strand.rows
        query[index, count:] = strand.rows[0]
        output[done : done + count] = np.arange(index * rows, index * rows + count)
        done += count
    return (
        torch.from_numpy(query.reshape(-1)).to(device, non_blocking=True),
        torch.from_numpy(output).to(device, non_blocking=True),
    )


def _path_indices(
    strands: Sequence[Strand], num_keys: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Slots whose keys lie elsewhere than in their text, and where they belong among those gathered."""
    slots: list[int] = []
    keys: list[int] = []
    for index, strand in enumerate(strands):
        end = index * num_keys + strand.shape.base + len(strand.rows)
        slots += strand.path_slots
        keys += range(end - len(strand.path_slots), end)
    if not slots:
        return None, None
    return torch.tensor(slots, device=device), torch.tensor(keys, device=device)


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
