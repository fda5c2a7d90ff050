"""The work of a step's attention, in ints that kernels read: which rows take which keys together.

A work item is a tile of one request's rows and a run of chunks of its keys. Chunks are counted from the
text's first key and have one length, and each has sums of its own, which are merged in the order of the
text: which items a text's chunks come in, and how many items there are, leaves no trace in a row's bits.

Rows that see a draft tree's nodes have a bit for each node (``masked``). Or, where a row is to have the
bits that it has in a text without strangers in between, each branch reads its own nodes behind the
text, by a list of their slots (the tail).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    """``first``: where its rows begin among those of the step. ``rows``: their records, of the step's;
    their last two columns are filled in where they are written. ``num_partials``: of each row, where its
    sums are joined; 0: they are not."""

    request: RequestRows
    first: int
    rows: Ints
    num_partials: Ints
    tiles: list[_Tile]
    words: Ints


class Work:
    """Of one step. ``num_items`` and ``num_joins`` are those that are launched: as many as there are, or
    as many as there is ``room`` for, the rest of them empty. Raises ValueError where there is none."""

    def __init__(self, requests: Sequence[RequestRows], cut: Cut, room: Room | None = None) -> None:
        self._cut = cut
        requests = [request for request in requests if request.num_rows]
        self.tile_rows = cut.tile_rows(requests) if room is None else room.tile_rows
        # Of the whole step, since small operations are what planning takes its time with.
        self._rows, ends = _text_rows(requests)
        self._num_partials = np.zeros(len(self._rows), dtype=np.int32)
        firsts = [0, *ends][:-1]
        self._requests = [self._of(*each) for each in zip(requests, firsts, ends, strict=True)]
        self._divide(room)
        self._pieces = [list(self._cut_up(each)) for each in self._requests]
        num_items = sum(len(pieces) for pieces in self._pieces)
        num_joins = int(np.count_nonzero(self._num_partials))
        self.num_partials = int(self._num_partials.sum())
        self.num_items = num_items if room is None else room.num_items
        self.num_joins = num_joins if room is None else room.num_joins
        self.joins_at = -(-self.num_items * ITEM_INTS // _ALIGNED_INTS) * _ALIGNED_INTS
        self._rest_at = self.joins_at + self.num_joins * JOIN_INTS
        self.num_ints = self._rest_at + self._rows.size
        self.num_ints += sum(self._num_ints(each) for each in self._requests)
        if room is not None and (
            num_items > room.num_items
            or num_joins > room.num_joins
            or self.num_ints > self._rest_at + room.num_ints
        ):
            raise ValueError("the step does not fit into the room of its captured launch")

    def write(self, ints: Ints) -> None:
        """Into the first ``num_ints`` of ``ints``."""
        rows, num_partials = self._rows.copy(), self._num_partials
        divided = num_partials > 0
        rows[:, 3] = np.where(divided, np.cumsum(num_partials) - num_partials, -1)
        joins = np.stack([rows[:, 0], rows[:, 3], num_partials], axis=1)[divided]
        writer = _Writer(ints, self._rest_at + rows.size)
        items: list[tuple[int, ...]] = []
        for each, pieces in zip(self._requests, self._pieces, strict=True):
            positions_at = 0
            if len(each.words):
                words_at = writer.put(each.words.reshape(-1))
                mine = rows[each.first : each.first + len(each.rows), 4]
                mine[mine >= 0] += words_at
                positions_at = writer.put(_node_positions(each.request))
            rows_at = self._rest_at + each.first * ROW_INTS
            table_at = writer.put(self._table(each))
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
        ints[: self._rest_at] = 0
        ints[self._rest_at : self._rest_at + rows.size] = rows.reshape(-1)
        if items:
            ints[: len(items) * ITEM_INTS].reshape(-1, ITEM_INTS)[:] = items
            ints[self.joins_at : self.joins_at + joins.size] = joins.reshape(-1)

    # --- tiles ---

    def _of(self, request: RequestRows, first: int, end: int) -> _RequestWork:
        each = _RequestWork(
            request, first, self._rows[first:end], self._num_partials[first:end], [], _NO_WORDS
        )
        if request.is_chain():
            each.tiles += self._tiles(each.rows)
        elif self._cut.in_text_order:
            self._add_branches(each)
        else:
            self._add_masked(each)
        return each

    def _add_masked(self, each: _RequestWork) -> None:
        request, rows = each.request, each.rows
        known, root_end = request.num_known, request.base + request.num_known
        depths = np.array(request.depths(), dtype=np.int32)[request.num_stored :]
        rows[known:, 1] = root_end
        rows[known:, 2] = root_end - 1 + depths
        each.words = _ancestor_words(request)
        rows[known:, 4] = np.arange(len(each.words)) * each.words.shape[1]
        each.tiles += self._tiles(rows)
        for tile in each.tiles:
            if tile.first_row + tile.num_rows > known:
                tile.draft_start, tile.num_keys = root_end, request.end
                tile.end_chunk = self._chunks(request.end)

    def _add_branches(self, each: _RequestWork) -> None:
        """Known rows first, then branch by branch. Chunks that end before the first node are every
        branch's, and may be taken for all of them together (``_share_text``)."""
        request, rows = each.request, each.rows
        known, root_end = request.num_known, request.base + request.num_known
        each.tiles += self._tiles(rows[:known])
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
                each.tiles.append(tile)
            at += len(mine)

    def _tiles(self, rows: Ints) -> Iterator[_Tile]:
        """Of rows none of which sees more of the text than the next."""
        for first in range(0, len(rows), self.tile_rows):
            count = min(self.tile_rows, len(rows) - first)
            num_keys = int(rows[first + count - 1, 1])
            yield _Tile(first, count, num_keys, 0, self._chunks(num_keys))

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
        return each.request.block_table[: self._num_blocks(each)]

    def _num_blocks(self, each: _RequestWork) -> int:
        """Read of its table, which names them all."""
        return -(-each.request.end // self._cut.block_size)

    def _num_ints(self, each: _RequestWork) -> int:
        num_nodes = len(each.request.parents) if len(each.words) else 0
        tails = sum(len(tile.tail) for tile in each.tiles)
        return each.words.size + self._num_blocks(each) + num_nodes + tails


class _Writer:
    def __init__(self, ints: Ints, at: int) -> None:
        self._ints = ints
        self.at = at

    def put(self, values: Sequence[int] | Ints) -> int:
        """Returns where they begin."""
        begin, self.at = self.at, self.at + len(values)
        self._ints[begin : self.at] = values
        return begin


_NO_WORDS: Ints = np.empty((0, 0), dtype=np.int32)


def _text_rows(requests: Sequence[RequestRows]) -> tuple[Ints, list[int]]:
    """Records as of chains' rows, request after request, and where each one's end."""
    told = [(each.num_rows, each.first_row, each.base) for each in requests]
    counts, first_rows, bases = np.array(told, dtype=np.int32).reshape(-1, 3).T
    ends = np.cumsum(counts)
    rows = np.empty((int(counts.sum()), ROW_INTS), dtype=np.int32)
    places = np.arange(len(rows), dtype=np.int32) - np.repeat(ends - counts, counts)
    rows[:, 0] = np.repeat(first_rows, counts) + places
    rows[:, 2] = np.repeat(bases, counts) + places
    rows[:, 1] = rows[:, 2] + 1
    rows[:, 3:] = -1
    return rows, ends.tolist()


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
