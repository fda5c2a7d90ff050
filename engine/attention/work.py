"""What a step's attention has to do, in ints that kernels read: which rows take which keys together.

A work item is a tile of one request's rows and a run of chunks of its keys. Chunks are counted from the
text's first key and have one length, and each has sums of its own, which are merged in the order of the
text: which items a text's chunks come in, and how many items there are, leaves no trace in a row's bits.

Rows that see a draft tree's nodes have a bit for each node (``masked``). Or, where a row is to have the
bits that it has in a text without strangers in between, each branch reads its own nodes behind the
text, by a list of their slots (the tail).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.attention.branches import branches_of
from engine.batch import RequestRows, slot_of

ITEM_INTS, ROW_INTS, JOIN_INTS = 11, 5, 3
"""As in ``engine.kernels.triton.ragged_attention``."""
_ALIGNED_INTS = 4
"""Programs are compiled for addresses of a multiple of 16 bytes, and once more for others."""
_NEVER = 1 << 30
"""A key number that no text reaches."""

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How work is cut. ``chunk``: keys; ``tile_pairs``: sizes of tiles, in pairs of a row and a head of
    those that share a key head, ``share`` of them at most; ``num_programs``: with so many a device is
    busy, each item being one for each of ``num_kv_heads``; ``max_partials``: rows times chunks whose
    sums may wait to be joined; ``in_text_order``: branches of draft trees read their keys so."""

    block_size: int
    chunk: int
    tile_pairs: Sequence[int]
    share: int
    num_kv_heads: int
    num_programs: int
    max_partials: int
    in_text_order: bool

    def tile_rows(self, requests: Iterable[RequestRows]) -> int:
        """The fewest that take a request's rows in one tile, or else the most."""
        sizes = [max(1, pairs // self.share) for pairs in self.tile_pairs]
        most = max((request.num_rows for request in requests), default=1)
        return next((size for size in sizes if size >= most), sizes[-1])


@dataclass(frozen=True, slots=True)
class Room:
    """What launches of fixed size and memory of fixed layout hold: of a captured step. ``num_ints``: of
    rows, block tables and draft trees."""

    tile_rows: int
    num_items: int
    num_joins: int
    num_ints: int

    @staticmethod
    def for_steps(
        cut: Cut, num_rows: int, num_requests: int, num_keys: int, num_nodes: int = 0
    ) -> Room:
        """For every step of at most so many rows and requests, each of at most ``num_keys`` keys, drafts
        included, and ``num_nodes`` draft nodes in a tree."""
        tile_rows = max(1, cut.tile_pairs[-1] // cut.share)
        num_items = num_rows // tile_rows + num_requests
        if cut.in_text_order and num_nodes:
            num_items += num_rows + num_requests  # each row a branch, known rows apart
        num_items += cut.num_programs // cut.num_kv_heads
        per_row = ROW_INTS + (num_nodes if cut.in_text_order else -(-num_nodes // 32))
        per_request = -(-num_keys // cut.block_size) + num_nodes
        return Room(
            tile_rows,
            num_items,
            min(num_rows, cut.max_partials),
            num_rows * per_row + num_requests * per_request,
        )


@dataclass(slots=True)
class _Tile:
    """Rows number ``first_row`` .. of a request's records, and chunks ``first_chunk`` .. ``end_chunk -
    1`` of their keys. ``is_divided``: sums are joined, be it one item or several."""

    first_row: int
    num_rows: int
    num_keys: int
    first_chunk: int
    end_chunk: int
    tail: Sequence[int] = ()
    tail_start: int = _NEVER
    draft_start: int = _NEVER
    is_divided: bool = False

    @property
    def num_chunks(self) -> int:
        return self.end_chunk - self.first_chunk


@dataclass(slots=True)
class _RequestWork:
    """``rows``: records; their last two columns are filled in where they are written. ``num_partials``:
    of each row, where its sums are joined; 0: they are not."""

    request: RequestRows
    rows: Ints
    tiles: list[_Tile]
    words: Ints
    num_partials: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.num_partials = np.zeros(len(self.rows), dtype=np.int32)


class Work:
    """Of one step. ``num_items`` and ``num_joins`` are those that are launched: as many as there are, or
    as many as there is ``room`` for, the rest of them empty. Raises ValueError where there is none."""

    def __init__(self, requests: Sequence[RequestRows], cut: Cut, room: Room | None = None) -> None:
        self._cut = cut
        self.tile_rows = cut.tile_rows(requests) if room is None else room.tile_rows
        self._requests = [self._of(request) for request in requests if request.num_rows]
        self._divide(room)
        self._pieces = [list(self._cut_up(each)) for each in self._requests]
        num_items = sum(len(pieces) for pieces in self._pieces)
        num_joins = sum(int(np.count_nonzero(each.num_partials)) for each in self._requests)
        self.num_partials = sum(int(each.num_partials.sum()) for each in self._requests)
        self.num_items = num_items if room is None else room.num_items
        self.num_joins = num_joins if room is None else room.num_joins
        self.joins_at = -(-self.num_items * ITEM_INTS // _ALIGNED_INTS) * _ALIGNED_INTS
        self._rest_at = self.joins_at + self.num_joins * JOIN_INTS
        self.unknown: list[tuple[int, torch.Tensor]] = []
        """Where words of draft nodes were written that are stand-ins, and what they should say."""
        self.num_ints = self._rest_at + sum(self._num_ints(each) for each in self._requests)
        if room is not None and (
            num_items > room.num_items
            or num_joins > room.num_joins
            or self.num_ints > self._rest_at + room.num_ints
        ):
            raise ValueError("the step does not fit into the room of its captured launch")

    def write(self, ints: Ints) -> None:
        """Into the first ``num_ints`` of ``ints``."""
        items: list[tuple[int, ...]] = []
        joins: list[Ints] = []
        at, next_partial = self._rest_at, 0
        for each, pieces in zip(self._requests, self._pieces, strict=True):
            writer = _Writer(ints, at)
            divided = each.num_partials > 0
            ends = np.cumsum(each.num_partials) + next_partial
            each.rows[:, 3] = np.where(divided, ends - each.num_partials, -1)
            next_partial = int(ends[-1])
            joins.append(
                np.stack([each.rows[:, 0], each.rows[:, 3], each.num_partials], axis=1)[divided]
            )
            words_at = writer.put(each.words.reshape(-1))
            if each.request.seen is not None and len(each.words):
                self.unknown.append((words_at, each.request.seen))
            is_masked = each.rows[:, 4] >= 0
            each.rows[:, 4] = np.where(is_masked, words_at + each.rows[:, 4], -1)
            rows_at = writer.put(each.rows.reshape(-1))
            table_at = writer.put(self._table(each))
            positions_at = writer.put(_node_positions(each.request)) if len(each.words) else 0
            tails: dict[int, int] = {}
            for tile, first_chunk, num_chunks in pieces:
                if tile.tail and id(tile) not in tails:
                    tails[id(tile)] = writer.put(tile.tail)
                items.append(
                    (
                        rows_at + tile.first_row * ROW_INTS,
                        tile.num_rows,
                        table_at,
                        first_chunk,
                        num_chunks,
                        tile.num_keys,
                        tails.get(id(tile), 0),
                        tile.tail_start,
                        tile.draft_start,
                        positions_at,
                        int(tile.is_divided),
                    )
                )
            at = writer.at
        ints[: self._rest_at] = 0
        if items:
            ints[: len(items) * ITEM_INTS].reshape(-1, ITEM_INTS)[:] = items
            joined = np.concatenate(joins).reshape(-1)
            ints[self.joins_at : self.joins_at + len(joined)] = joined

    # --- tiles ---

    def _of(self, request: RequestRows) -> _RequestWork:
        if request.is_chain():
            return self._chain(request)
        return self._branches(request) if self._cut.in_text_order else self._masked(request)

    def _chain(self, request: RequestRows) -> _RequestWork:
        rows = _text_rows(request, request.num_rows)
        return _RequestWork(request, rows, list(self._tiles(rows)), _no_words())

    def _masked(self, request: RequestRows) -> _RequestWork:
        known, root_end = request.num_known, request.base + request.num_known
        rows = _text_rows(request, request.num_rows)
        depths = np.array(request.depths(), dtype=np.int32)[request.num_stored :]
        rows[known:, 1] = root_end
        rows[known:, 2] = root_end - 1 + depths
        words = _ancestor_words(request)
        rows[known:, 4] = np.arange(len(words)) * words.shape[1]
        tiles = list(self._tiles(rows))
        for tile in tiles:
            if tile.first_row + tile.num_rows > known:
                tile.draft_start, tile.num_keys = root_end, request.end
                tile.end_chunk = self._chunks(request.end)
        return _RequestWork(request, rows, tiles, words)

    def _branches(self, request: RequestRows) -> _RequestWork:
        """Known rows first, then branch by branch. Chunks that end before the first node are every
        branch's, and may be taken for all of them together (``_share_text``)."""
        known, root_end = request.num_known, request.base + request.num_known
        rows = _text_rows(request, request.num_rows)
        tiles = list(self._tiles(rows[:known]))
        at, first_node_row = known, request.first_row + known - request.num_stored
        for nodes, mine in branches_of(request):
            slots = [
                slot_of(request.block_table, root_end + node, self._cut.block_size)
                for node in nodes
            ]
            end = root_end + len(nodes)
            rows[at : at + len(mine), 0] = [first_node_row + node for node in mine]
            rows[at : at + len(mine), 1] = np.arange(end - len(mine), end) + 1
            rows[at : at + len(mine), 2] = np.arange(end - len(mine), end)
            for tile in self._tiles(rows[at : at + len(mine)]):
                tile.first_row += at
                tile.tail, tile.tail_start = slots, root_end
                tiles.append(tile)
            at += len(mine)
        return _RequestWork(request, rows, tiles, _no_words())

    def _tiles(self, rows: Ints) -> Iterator[_Tile]:
        for first in range(0, len(rows), self.tile_rows):
            some = rows[first : first + self.tile_rows]
            num_keys = int(some[:, 1].max())
            yield _Tile(first, len(some), num_keys, 0, self._chunks(num_keys))

    def _chunks(self, num_keys: int) -> int:
        return -(-num_keys // self._cut.chunk)

    # --- division ---

    def _divide(self, room: Room | None) -> None:
        """Tiles of more than their share of all chunks, as long as there is memory for their sums."""
        cut = self._cut
        left = cut.max_partials
        for each in self._requests:
            left -= self._share_text(each, left)
        total = sum(tile.num_chunks for each in self._requests for tile in each.tiles)
        self._chunks_per_item = max(1, -(-total * cut.num_kv_heads // cut.num_programs))
        joins_left = _NEVER if room is None else room.num_joins
        for each in self._requests:
            for tile in each.tiles:
                needed = tile.num_rows * tile.num_chunks
                if (
                    tile.is_divided
                    or tile.num_chunks <= self._chunks_per_item
                    or needed > left
                    or tile.num_rows > joins_left
                ):
                    continue
                tile.is_divided = True
                left -= needed
                joins_left -= tile.num_rows
                each.num_partials[tile.first_row : tile.first_row + tile.num_rows] = tile.end_chunk

    def _share_text(self, each: _RequestWork, left: int) -> int:
        """Let branches of a tree take the chunks before it together. Returns how many sums that makes."""
        branches = [tile for tile in each.tiles if tile.tail]
        shared = min((tile.tail_start for tile in branches), default=0) // self._cut.chunk
        needed = sum(tile.num_rows * tile.end_chunk for tile in branches)
        if not shared or needed > left or len(branches) < 2:
            return 0
        for tile in branches:
            tile.first_chunk, tile.is_divided = shared, True
            each.num_partials[tile.first_row : tile.first_row + tile.num_rows] = tile.end_chunk
        first = branches[0].first_row
        for tile in self._tiles(each.rows[first:]):
            tile.first_row += first
            tile.num_keys, tile.end_chunk = shared * self._cut.chunk, shared
            tile.is_divided = True
            each.tiles.append(tile)
        return needed

    def _cut_up(self, each: _RequestWork) -> Iterator[tuple[_Tile, int, int]]:
        """Tiles with first chunk and number of chunks of each of their items."""
        for tile in each.tiles:
            if not tile.is_divided:
                yield tile, tile.first_chunk, tile.num_chunks
                continue
            for first in range(tile.first_chunk, tile.end_chunk, self._chunks_per_item):
                yield tile, first, min(self._chunks_per_item, tile.end_chunk - first)

    # --- sizes ---

    def _table(self, each: _RequestWork) -> Sequence[int]:
        return each.request.block_table[: -(-each.request.end // self._cut.block_size)]

    def _num_ints(self, each: _RequestWork) -> int:
        num_nodes = len(each.request.parents) if len(each.words) else 0
        tails = sum(len(tile.tail) for tile in each.tiles)
        return each.rows.size + each.words.size + len(self._table(each)) + num_nodes + tails


class _Writer:
    def __init__(self, ints: Ints, at: int) -> None:
        self._ints = ints
        self.at = at

    def put(self, values: Sequence[int] | Ints) -> int:
        """Returns where they begin."""
        begin, self.at = self.at, self.at + len(values)
        self._ints[begin : self.at] = values
        return begin


def _text_rows(request: RequestRows, count: int) -> Ints:
    """Records of a chain's rows."""
    rows = np.empty((count, ROW_INTS), dtype=np.int32)
    places = np.arange(count, dtype=np.int32)
    rows[:, 0] = request.first_row + places
    rows[:, 1] = request.base + 1 + places
    rows[:, 2] = request.base + places
    rows[:, 3:] = -1
    return rows


def _no_words() -> Ints:
    return np.empty((0, 0), dtype=np.int32)


def _ancestor_words(request: RequestRows) -> Ints:
    """Bits of each row's ancestors and itself, ``[num_node_rows, num_words]``; bit ``n % 32`` of word
    ``n // 32`` is node ``n``."""
    seen: list[int] = []
    for node, parent in enumerate(request.parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    num_words = -(-len(seen) // 32)
    packed = b"".join(bits.to_bytes(4 * num_words, "little") for bits in seen[request.num_stored :])
    return np.frombuffer(packed, dtype="<i4").reshape(-1, num_words)


def _node_positions(request: RequestRows) -> Sequence[int]:
    anchor = request.base + request.num_known - 1
    return [anchor + depth for depth in request.depths()]
