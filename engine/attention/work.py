"""The work of a step's attention, in ints that kernels read: which rows take which keys together.

A work item is a tile of one request's rows and a run of chunks of its keys. Chunks are counted from the
text's first key, and each has sums of its own, which are merged in the order of the text. How long they
are follows from how many keys the row sees: short ones, so that even one text gives many programs work,
and longer ones where there would be too many sums to merge. So which items a text's chunks come in, how
many items there are, and what else is in the step leaves no trace in a row's bits.

A row of a draft tree has the bits that it has in a text without strangers in between: each branch reads
its own nodes behind the text, by a list of their slots (the tail).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.branches import branches_of
from engine.batch import RequestRows, slot_of

ITEM_INTS, ROW_INTS, JOIN_INTS = 12, 3, 3
"""As in ``engine.kernels.triton.ragged_attention``."""
_ALIGNED_INTS = 4
"""Programs are compiled for addresses of a multiple of 16 bytes, and once more for others."""
_NEVER = 1 << 30
"""A key number that no text reaches."""

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Parameters for cutting work into items. ``chunk``: keys of the shortest chunk; beyond
    ``most_chunks`` chunks their length doubles, up to ``longest_chunk``, a multiple by a power of two;
    ``tile_pairs``: tile sizes, in pairs of a row and a head, for at most ``share`` heads that share a
    key head; ``num_programs``: as many items keep a device busy, each item counting once per
    ``num_kv_heads``; ``max_partials``: the most rows times chunks whose sums may wait to be joined."""

    block_size: int
    chunk: int
    longest_chunk: int
    most_chunks: int
    tile_pairs: Sequence[int]
    share: int
    num_kv_heads: int
    num_programs: int
    max_partials: int

    def tile_rows(self, requests: Iterable[RequestRows]) -> int:
        """Returns the fewest that take a request's rows in one tile, or else the most."""
        sizes = [max(1, pairs // self.share) for pairs in self.tile_pairs]
        most = max((request.num_rows for request in requests), default=1)
        return next((size for size in sizes if size >= most), sizes[-1])

    def chunk_for(self, num_keys: int) -> int:
        """Returns the length of the chunks of a row that sees so many keys, whatever else there is."""
        chunk = self.chunk
        while num_keys > self.last_key(chunk):
            chunk *= 2
        return chunk

    def last_key(self, chunk: int) -> int:
        """Returns how many keys a row with such chunks sees at most."""
        return chunk * self.most_chunks if chunk < self.longest_chunk else _NEVER


@dataclass(frozen=True, slots=True)
class Room:
    """Bounds of a captured step, whose launches have a fixed size and whose memory a fixed layout.
    ``num_ints``: of rows, block tables and tails."""

    tile_rows: int
    num_items: int
    num_joins: int
    num_ints: int

    @staticmethod
    def for_steps(
        cut: Cut, num_rows: int, num_requests: int, num_keys: int, num_nodes: int = 0
    ) -> Room:
        """Returns the room for every step of at most so many rows and requests, each of at most
        ``num_keys`` keys, drafts included, and ``num_nodes`` draft nodes in a tree."""
        tile_rows = max(1, cut.tile_pairs[-1] // cut.share)
        # Rows with chunks of two lengths share no tile.
        num_parts = 2 + num_rows // cut.last_key(cut.chunk)
        num_items = num_rows // tile_rows + num_requests * num_parts
        num_items += cut.num_programs // cut.num_kv_heads
        if num_nodes:
            num_items += num_rows + num_requests  # each row a branch, known rows apart
        per_request = -(-num_keys // cut.block_size)
        num_ints = num_rows * (ROW_INTS + num_nodes) + num_requests * per_request
        return Room(tile_rows, num_items, min(num_rows, cut.max_partials), num_ints)


@dataclass(slots=True)
class _Tile:
    """Rows ``first_row`` .. of the step's records, and chunks ``first_chunk`` .. ``end_chunk - 1`` of
    their keys, of ``chunk`` keys each. ``tail``: slots of the keys from ``tail_start`` on.
    ``is_divided``: sums are joined, be it one item or several."""

    first_row: int
    num_rows: int
    num_keys: int
    chunk: int
    first_chunk: int
    end_chunk: int
    tail: Sequence[int] = ()
    tail_start: int = _NEVER
    is_divided: bool = False

    @property
    def num_chunks(self) -> int:
        return self.end_chunk - self.first_chunk


class Work:
    """The work of one step, for layers that agree in ``sees_block``. ``num_items`` and ``num_joins``
    are the launched ones: as many as exist, or as many as there is ``room`` for, with the rest empty.
    Raises ValueError if there is no room."""

    def __init__(
        self,
        requests: Sequence[RequestRows],
        cut: Cut,
        room: Room | None = None,
        sees_block: bool = False,
    ) -> None:
        self._cut = cut
        self._sees_block = sees_block
        requests = [request for request in requests if request.num_rows]
        self.tile_rows = cut.tile_rows(requests) if room is None else room.tile_rows
        # Of the whole step, since small operations are what planning takes its time with.
        self._rows, ends = _text_rows(requests)
        # Of each row, where its sums are joined; 0: they are not.
        self._num_partials = np.zeros(len(self._rows), dtype=np.int32)
        firsts = [0, *ends][:-1]
        self._requests = [
            (request, self._tiles_of(request, first, end))
            for request, first, end in zip(requests, firsts, ends, strict=True)
        ]
        self._divide(room)
        tiles = [tile for _, mine in self._requests for tile in mine]
        num_items = sum(len(self._pieces(tile)) for tile in tiles)
        num_joins = int(np.count_nonzero(self._num_partials))
        self.num_partials = int(self._num_partials.sum())
        self.num_items = num_items if room is None else room.num_items
        self.num_joins = num_joins if room is None else room.num_joins
        self.joins_at = -(-self.num_items * ITEM_INTS // _ALIGNED_INTS) * _ALIGNED_INTS
        self._rest_at = self.joins_at + self.num_joins * JOIN_INTS
        self.num_ints = self._rest_at + self._rows.size
        self.num_ints += sum(len(self._table(each)) for each, _ in self._requests)
        self.num_ints += sum(len(tile.tail) for tile in tiles)
        if room is not None and (
            num_items > room.num_items
            or num_joins > room.num_joins
            or self.num_ints > self._rest_at + room.num_ints
        ):
            raise ValueError("the step does not fit into the room of its captured launch")

    def row_ends(self, ints: torch.Tensor) -> torch.Tensor:
        """Returns a view of the ends of what rows see, among the ints of chains, in the batch's order."""
        records = ints[self._rest_at : self._rest_at + self._rows.size]
        return records.view(-1, ROW_INTS)[:, 1]

    def write(self, ints: Ints) -> None:
        """Writes to the first ``num_ints`` of ``ints``."""
        rows, num_partials = self._rows.copy(), self._num_partials
        divided = num_partials > 0
        rows[:, 2] = np.where(divided, np.cumsum(num_partials) - num_partials, -1)
        joins = np.stack([rows[:, 0], rows[:, 2], num_partials], axis=1)[divided]
        items: list[tuple[int, ...]] = []
        rest_at, rest = self._rest_at + rows.size, list[int]()
        for request, tiles in self._requests:
            table_at = rest_at + len(rest)
            rest += self._table(request)
            limits = request.first_key, self._block_end(request)
            for tile in tiles:
                row_at, tail_at = self._rest_at + tile.first_row * ROW_INTS, rest_at + len(rest)
                rest += tile.tail
                keys = tile.num_keys, tail_at, tile.tail_start, int(tile.is_divided)
                items += [
                    (row_at, tile.num_rows, table_at, *piece, *keys, *limits, tile.chunk)
                    for piece in self._pieces(tile)
                ]
        ints[: self._rest_at] = 0
        ints[self._rest_at : rest_at] = rows.reshape(-1)
        ints[rest_at : self.num_ints] = rest
        if items:
            ints[: len(items) * ITEM_INTS].reshape(-1, ITEM_INTS)[:] = items
            ints[self.joins_at : self.joins_at + joins.size] = joins.reshape(-1)

    def _table(self, request: RequestRows) -> Sequence[int]:
        return request.block_table[: -(-request.end // self._cut.block_size)]

    def _block_end(self, request: RequestRows) -> int:
        """Returns the key after the last that all of a request's rows see, wherever their own are."""
        return request.known_end if self._sees_block else 0

    # --- tiles ---

    def _tiles_of(self, request: RequestRows, first: int, end: int) -> list[_Tile]:
        """Returns the tiles of a request, whose rows are ``first`` .. ``end - 1`` of the step: of a tree
        known rows first, then branch by branch. Chunks that end before the first node are every
        branch's, and may be taken for all of them together (``_share_text``)."""
        block_end = self._block_end(request)
        if request.is_chain():
            return list(self._tiles(first, end, block_end=block_end))
        rows, root_end = self._rows, request.known_end
        at = first + request.num_known
        tiles = list(self._tiles(first, at, block_end=block_end))
        first_node_row = request.first_row + request.num_known - request.num_stored
        for nodes, mine in branches_of(request):
            places = [root_end + node for node in nodes]
            tail = [slot_of(request.block_table, each, self._cut.block_size) for each in places]
            after, num_keys = at + len(mine), root_end + len(nodes)
            rows[at:after, 0] = [first_node_row + node for node in mine]
            rows[at:after, 1] = np.arange(num_keys - len(mine), num_keys) + 1
            tiles += self._tiles(at, after, tail, root_end)
            at = after
        return tiles

    def _tiles(
        self,
        first: int,
        end: int,
        tail: Sequence[int] = (),
        tail_start: int = _NEVER,
        block_end: int = 0,
    ) -> Iterator[_Tile]:
        """Yields tiles of rows, where each row sees one more key of the text than the one before, plus
        the keys before ``block_end``."""
        at = first
        while at < end:
            first_end = int(self._rows[at, 1])
            chunk = self._cut.chunk_for(max(block_end, first_end))
            count = min(self.tile_rows, end - at, self._cut.last_key(chunk) - first_end + 1)
            num_keys = max(block_end, first_end + count - 1)
            num_chunks = -(-num_keys // chunk)
            yield _Tile(at, count, num_keys, chunk, 0, num_chunks, tail, tail_start)
            at += count

    # --- division ---

    def _divide(self, room: Room | None) -> None:
        """Divides tiles of more than their share of all keys, as long as there is memory for their
        sums."""
        cut = self._cut
        left, joins_left = cut.max_partials, _NEVER if room is None else room.num_joins
        for _, tiles in self._requests:
            left -= self._share_text(tiles, left)
        every = [tile for _, tiles in self._requests for tile in tiles]
        total = sum(tile.num_chunks * tile.chunk for tile in every)
        self._keys_per_item = max(1, -(-total * cut.num_kv_heads // cut.num_programs))
        for tile in every:
            needed = tile.num_rows * tile.num_chunks
            is_worth_it = not tile.is_divided and tile.num_chunks > self._chunks_per_item(tile)
            if is_worth_it and needed <= left and tile.num_rows <= joins_left:
                left -= needed
                joins_left -= tile.num_rows
                self._join(tile)

    def _chunks_per_item(self, tile: _Tile) -> int:
        return -(-self._keys_per_item // tile.chunk)

    def _join(self, tile: _Tile) -> None:
        tile.is_divided = True
        self._num_partials[tile.first_row : tile.first_row + tile.num_rows] = tile.end_chunk

    def _share_text(self, tiles: list[_Tile], left: int) -> int:
        """Lets branches of a tree take the chunks before it together. Returns how many sums that
        makes."""
        branches = [tile for tile in tiles if tile.tail]
        if len(branches) < 2:
            return 0
        chunk, tail_start = branches[0].chunk, branches[0].tail_start
        shared = tail_start // chunk
        needed = sum(tile.num_rows * tile.end_chunk for tile in branches)
        if not shared or needed > left or any(tile.chunk != chunk for tile in branches):
            return 0
        for tile in branches:
            tile.first_chunk = shared
            self._join(tile)
        end = branches[-1].first_row + branches[-1].num_rows
        for at in range(branches[0].first_row, end, self.tile_rows):
            count = min(self.tile_rows, end - at)
            tiles.append(_Tile(at, count, shared * chunk, chunk, 0, shared, is_divided=True))
        return needed

    def _pieces(self, tile: _Tile) -> list[tuple[int, int]]:
        """Returns first chunk and number of chunks of each of a tile's items."""
        each = self._chunks_per_item(tile) if tile.is_divided else _NEVER
        starts = range(tile.first_chunk, tile.end_chunk, each)
        return [(start, min(each, tile.end_chunk - start)) for start in starts]


def _text_rows(requests: Sequence[RequestRows]) -> tuple[Ints, list[int]]:
    """Returns records as of chains' rows, request after request, and where each one's end."""
    told = [(each.num_rows, each.first_row, each.base) for each in requests]
    counts, first_rows, bases = np.array(told, dtype=np.int32).reshape(-1, 3).T
    ends = np.cumsum(counts)
    rows = np.empty((int(counts.sum()), ROW_INTS), dtype=np.int32)
    places = np.arange(len(rows), dtype=np.int32) - np.repeat(ends - counts, counts)
    rows[:, 0] = np.repeat(first_rows, counts) + places
    rows[:, 1] = np.repeat(bases, counts) + places + 1
    rows[:, 2] = -1
    return rows, ends.tolist()
