"""Compiled: a step's rows in the tiles that ``paged_attention`` takes, and where the keys lie that they
see. What is told of each request: see ``Plan``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numba import njit

from compiled.loops import Loop
from compiled.records import Int64s, Memory, address_of, places_of
from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.records import Address, rooms

GROUP = LANES
CHUNK = 256
TILE_QUERIES = 64
QUERY_MULTIPLE = 4


class Row(Protocol):
    """A row: its number in the batch, how many keys of its text there are up to its own, its first query
    in the tile."""

    number: int
    num_seen: int
    query: int


class Branch(Protocol):
    """Queries of a tile, from a multiple of ``QUERY_MULTIPLE`` to one; ``groups``: number of the first of
    its own groups; ``end_group``: of its text, the group after the last."""

    first_query: int
    end_query: int
    groups: int
    end_group: int


class Tile(Protocol):
    """Rows, chunks and branches by number. No row sees a key before ``first_key``; each sees those up to
    its own, and those before ``block_end``. ``least_seen``: the fewest keys up to a row's own;
    ``most_seen``: the key after the last that a row sees; ``num_queries``: a multiple of
    ``QUERY_MULTIPLE``; ``groups``: number of the first of ``num_common`` groups that all rows share.
    ``first_part``: where sums of its chunks are left, if it is one of ``num_tiles`` that divide
    ``num_chunks``; -1: it is not."""

    first_row: int
    end_row: int
    first_chunk: int
    end_chunk: int
    first_branch: int
    end_branch: int
    first_key: int
    block_end: int
    least_seen: int
    most_seen: int
    num_queries: int
    groups: int
    num_common: int
    first_part: int
    num_chunks: int
    num_tiles: int


TILE_INTS, ROW_INTS, BRANCH_INTS = (len(places_of(each)) for each in (Tile, Row, Branch))


class Plan(Protocol):
    """``told`` of each of ``num_requests``: ``first_key`` and ``block_end`` as a ``Tile`` has them, how
    many keys all rows have in common, the numbers of blocks and of branches, the blocks; then of each
    branch the numbers of rows and of slots, the keys up to its first row's own, the rows' numbers in the
    batch, and the slots of keys after the common ones. A tile holds as many rows of one request as fit,
    branch after branch, of ``share`` queries each; tiles are divided by chunks where there are fewer than
    ``num_wanted``.

    ``tiles``, ``rows``, ``branches``, ``groups`` and ``slots`` are the result, in room for as many as
    there may be, as ``Step`` has them; ``num_parts``: of chunks of divided tiles; ``num_pairs``: of rows
    and keys that they see; the last are of the tile that is being filled."""

    told: Int64s
    tiles: Sequence[Tile]
    rows: Sequence[Row]
    branches: Sequence[Branch]
    groups: Int64s
    slots: Int64s
    num_requests: int
    block_size: int
    share: int
    most_queries: int
    num_wanted: int
    num_tiles: int
    num_rows: int
    num_branches: int
    num_groups: int
    num_slots: int
    num_parts: int
    num_pairs: int
    first_row: int
    first_branch: int
    num_queries: int


# --- groups of keys ---


@njit
def _slot(p: Plan, blocks: Any, key: int) -> int:
    return blocks[key // p.block_size] * p.block_size + key % p.block_size


@njit
def _put_blocks(p: Plan, blocks: Any, num_keys: int) -> None:
    """Lists the groups of a text's first keys."""
    for first in range(0, num_keys, LANES):
        if p.block_size % LANES == 0:
            p.groups[p.num_groups] = _slot(p, blocks, first)
            p.num_groups += 1
            continue
        for at in range(LANES):
            p.slots[p.num_slots + at] = _slot(p, blocks, min(first + at, num_keys - 1))
        _put_sixteen(p)


@njit
def _put_slots(p: Plan, slots: Any, count: int) -> None:
    """Lists the groups of keys in these slots."""
    for first in range(0, count, LANES):
        for at in range(LANES):
            p.slots[p.num_slots + at] = slots[min(first + at, count - 1)]
        _put_sixteen(p)


@njit
def _put_sixteen(p: Plan) -> None:
    """Lists the group of the next sixteen slots; they are kept if they do not lie together. The last
    key's slot fills up a group, unseen there."""
    slots = p.slots + p.num_slots
    lies_together = True
    for at in range(1, LANES):
        lies_together = lies_together and slots[at] == slots[0] + at
    if lies_together:
        p.groups[p.num_groups] = slots[0]
    else:
        p.groups[p.num_groups] = -1 - p.num_slots // LANES
        p.num_slots += LANES
    p.num_groups += 1


# --- tiles ---


@njit
def _close_tile(p: Plan, first_key: int, block_end: int, groups: int, num_common: int) -> None:
    if p.num_rows > p.first_row:
        least = most = p.rows[p.first_row].num_seen
        for row in range(p.first_row + 1, p.num_rows):
            least, most = min(least, p.rows[row].num_seen), max(most, p.rows[row].num_seen)
        t = p.tiles[p.num_tiles]
        p.num_tiles += 1
        t.first_row, t.end_row = p.first_row, p.num_rows
        t.first_branch, t.end_branch = p.first_branch, p.num_branches
        t.first_key, t.block_end = first_key, block_end
        t.least_seen, t.most_seen = least, max(most, block_end)
        t.num_queries, t.groups, t.num_common = p.num_queries, groups, num_common
        t.num_chunks = (t.most_seen + CHUNK - 1) // CHUNK
        t.first_chunk, t.end_chunk = 0, t.num_chunks
        t.first_part, t.num_tiles = -1, 1
    p.first_row, p.first_branch, p.num_queries = p.num_rows, p.num_branches, 0


@njit
def _fill(p: Plan, numbers: Any, first_seen: int, count: int, own: int, end_group: int) -> int:
    """Puts as many of a branch's rows into the tile as fit; returns how many. ``own``: number of the
    first of its own groups, -1: it has none."""
    first = p.num_queries
    count = min(count, (p.most_queries - first) // p.share)
    for at in range(count):
        row = p.rows[p.num_rows]
        row.number, row.num_seen, row.query = numbers[at], first_seen + at, first + p.share * at
        p.num_rows += 1
        p.num_pairs += first_seen + at
    end = first + p.share * count + QUERY_MULTIPLE - 1
    p.num_queries = end - end % QUERY_MULTIPLE
    if own >= 0 and count:
        branch = p.branches[p.num_branches]
        branch.first_query, branch.end_query = first, p.num_queries
        branch.groups, branch.end_group = own, end_group
        p.num_branches += 1
    return count


@njit
def _put_request(p: Plan, told: Any) -> Any:
    """Returns what is told of the next one."""
    first_key, block_end, num_keys = told[0], told[1], told[2]
    num_blocks, num_branches = told[3], told[4]
    common = p.num_groups
    _put_blocks(p, told + 5, num_keys)
    num_common = p.num_groups - common
    told = told + (5 + num_blocks)
    for _ in range(num_branches):
        num_rows, num_slots, seen, numbers = told[0], told[1], told[2], told + 3
        own = p.num_groups if num_slots else -1
        _put_slots(p, numbers + num_rows, num_slots)
        end_group, done = num_common + p.num_groups - own, 0
        while done < num_rows:
            left = num_rows - done
            done += _fill(p, numbers + done, seen + done, left, own, end_group)
            if done < num_rows:
                _close_tile(p, first_key, block_end, common, num_common)
        told = numbers + (num_rows + num_slots)
    _close_tile(p, first_key, block_end, common, num_common)
    return told


# --- parts of tiles ---


@njit
def _chunks_of_a_part(num_chunks: int, num_pieces: int) -> int:
    num_pieces = min(num_pieces, num_chunks)
    return (num_chunks + num_pieces - 1) // num_pieces


@njit
def _divide(p: Plan) -> None:
    """Divides tiles by chunks where they are few; from the last one on, since they take more room."""
    num_pieces = (p.num_wanted + p.num_tiles - 1) // max(1, p.num_tiles)
    if num_pieces <= 1:
        return
    end = 0
    for number in range(p.num_tiles):
        tile = p.tiles[number]
        size = _chunks_of_a_part(tile.num_chunks, num_pieces)
        tile.num_tiles = (tile.num_chunks + size - 1) // size
        if tile.num_tiles > 1:
            tile.first_part = p.num_parts
            p.num_parts += tile.num_chunks
        end += tile.num_tiles
    first, p.num_tiles = p.num_tiles, end
    for number in range(first - 1, -1, -1):
        tile = p.tiles[number]
        count, num_chunks = tile.num_tiles, tile.num_chunks
        size = _chunks_of_a_part(num_chunks, num_pieces)
        for part in range(count - 1, -1, -1):
            end -= 1
            _copy(p, number, end)
            piece = p.tiles[end]
            piece.first_chunk, piece.end_chunk = part * size, min((part + 1) * size, num_chunks)


@njit
def _copy(p: Plan, source: int, target: int) -> None:
    ints = v.as_elements_of(p.groups, p.tiles)
    for at in range(TILE_INTS):
        ints[TILE_INTS * target + at] = ints[TILE_INTS * source + at]


def _lay(p: Plan) -> None:
    told = p.told
    for _ in range(p.num_requests):
        told = _put_request(p, told)
    _divide(p)


lay = Loop(_lay)
"""Lays the rows out."""


class Told(Protocol):
    """``numbers`` as ``Plan.told`` has them; ``num_groups``: of keys, of which ``num_listed`` may be
    listed slot by slot."""

    numbers: array[int]
    num_branches: int
    num_groups: int
    num_listed: int


class Sizes(NamedTuple):
    """As a ``Plan`` has them."""

    block_size: int
    share: int
    most_queries: int
    num_wanted: int


def lay_out(
    told: Told, num_requests: int, num_rows: int, sizes: Sizes
) -> tuple[Memory, list[Address]]:
    """Returns the plan, and where its lists are."""
    lists = rooms(
        (
            TILE_INTS * (num_rows + sizes.num_wanted),
            ROW_INTS * num_rows,
            BRANCH_INTS * (told.num_branches + num_rows),
            told.num_groups,
            LANES * told.num_listed,
        )
    )
    plan, addresses = Memory(Plan), (each.address for each in lists)
    plan.fill(address_of(told.numbers), *addresses, num_requests, *sizes)
    lay.compile()(plan.address)
    return plan, lists
