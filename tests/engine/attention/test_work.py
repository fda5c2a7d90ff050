"""A step's work, read as the programs read it: every row gets the keys of its text, each once, in chunks
that no batch changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.triton import TritonAttention
from engine.attention.work import ITEM_INTS, JOIN_INTS, ROW_INTS, Cut, Ints, Room, Work
from engine.batch import RequestRows, build_batch, slot_of
from kvpool.block_pool import BlockPool
from worlds.lanes import examples
from worlds.tiny_models import path_to, scattered_table

SIZE, CHUNK = 16, 64
MOST_ROWS, MOST_REQUESTS, MOST_KEYS, MOST_NODES = 200, 4, 900, 40
Slots = list[int]
"""Where the keys of a row are."""


def cut(
    num_programs: int = 8,
    max_partials: int = 4096,
    pairs: Sequence[int] = (16, 32, 64),
    most_chunks: int = 100,
) -> Cut:
    return Cut(SIZE, CHUNK, 4 * CHUNK, most_chunks, pairs, 4, 2, num_programs, max_partials)


@st.composite
def batches(draw: Any) -> list[RequestRows]:
    found, first_block = [], 0
    for seed in range(draw(st.integers(1, MOST_REQUESTS))):
        base = draw(st.one_of(st.integers(0, 70), st.integers(500, 800)))
        num_nodes = draw(st.sampled_from([0, 0, 1, 4, 20, MOST_NODES]))
        parents = draw(
            st.one_of(
                st.just(tuple(range(-1, num_nodes - 1))),
                st.tuples(*(st.integers(-1, node - 1) for node in range(num_nodes))),
            )
        )
        stored = draw(st.integers(0, num_nodes - 1)) if num_nodes and draw(st.booleans()) else 0
        known = 0 if stored else draw(st.sampled_from([1, 1, 2, 9, 50]))
        if base + known == 0:
            continue
        needed = -(-(base + known + num_nodes) // SIZE)
        table = scattered_table(seed, needed, first=first_block, among=needed)
        first_block += needed
        count = known + num_nodes - stored
        first_key = draw(st.sampled_from([0, 0, min(1, base), base // 2, base]))
        found.append(
            RequestRows([0] * count, known, base, parents, table, count, stored, first_key)
        )
    build_batch(found, SIZE)
    return found


def expected(request: RequestRows, sees_block: bool = False) -> Iterator[Slots]:
    """Yields the slots that each row sees, in the order of its text, from the text's first key on."""
    root_end = request.base + request.num_known
    for index in range(request.num_rows):
        node = index - request.num_known + request.num_stored
        path = path_to(node, request.parents) if index >= request.num_known else []
        own_end = root_end if sees_block else min(request.base + index + 1, root_end)
        places = [*range(own_end), *(root_end + n for n in path)]
        yield [slot_of(request.block_table, place, SIZE) for place in places]


def read(work: Work, ints: Ints) -> dict[int, dict[int, Slots]]:
    """Returns each row's keys by chunk. Chunks of one row come from one item each, have one length, which
    follows from the keys that it sees, and are joined if they come from several."""
    rows: dict[int, dict[int, Slots]] = {}
    partials: dict[int, tuple[int, int]] = {}
    used: set[int] = set()
    for record in ints[work.joins_at :][: work.num_joins * JOIN_INTS].reshape(-1, JOIN_INTS):
        row, first, count = record.tolist()
        if count:
            assert not used & set(range(first, first + count)), "sums of two rows in one place"
            used |= set(range(first, first + count))
            partials[row] = (first, count)
    assert len(used) <= work.num_partials
    for record in ints[: work.num_items * ITEM_INTS].reshape(-1, ITEM_INTS):
        (at, num_rows, table, first_chunk, num_chunks, num_keys, tail, tail_start,
         is_divided, first_key, block_end, length) = record.tolist()  # fmt: skip
        assert num_rows <= work.tile_rows
        for row, end, partial in ints[at : at + num_rows * ROW_INTS].reshape(-1, ROW_INTS).tolist():
            mine = rows.setdefault(row, {})
            assert length == work._cut.chunk_for(max(end, block_end))
            assert (row in partials) == bool(is_divided)
            if is_divided:
                assert partial == partials[row][0]
            for chunk in range(first_chunk, first_chunk + num_chunks):
                assert chunk not in mine
                assert not is_divided or chunk < partials[row][1]
                first, last = max(chunk * length, first_key), max(end, block_end)
                mine[chunk] = [
                    int(ints[tail + key - tail_start])
                    if key >= tail_start
                    else slot_of(ints[table:].tolist()[: key // SIZE + 1], key, SIZE)
                    for key in range(first, min((chunk + 1) * length, num_keys, last))
                ]
            # A row is one item's altogether, or each of its chunks is somebody's.
            assert is_divided or (first_chunk == 0 and sorted(mine) == [*range(num_chunks)])
    for row, (_, count) in partials.items():
        assert sorted(rows[row]) == [*range(count)], "a sum that is joined is nobody's"
    return rows


def check(work: Work, requests: Sequence[RequestRows], sees_block: bool = False) -> None:
    ints = np.full(work.num_ints, 7, dtype=np.int32)
    work.write(ints)
    rows = read(work, ints)
    assert sorted(rows) == list(range(sum(each.num_rows for each in requests)))
    for request in requests:
        first = request.first_key
        for row, wanted in enumerate(expected(request, sees_block), request.first_row):
            length = work._cut.chunk_for(len(wanted))
            for chunk, keys in rows[row].items():
                assert keys == wanted[max(first, chunk * length) : (chunk + 1) * length]
            read_in_order = [key for chunk in sorted(rows[row]) for key in rows[row][chunk]]
            assert read_in_order == wanted[first:]


@settings(deadline=None, max_examples=examples(100))
@given(
    requests=batches(),
    pairs=st.sampled_from([(64,), (16, 32, 64)]),
    num_programs=st.sampled_from([1, 8, 100]),
    max_partials=st.sampled_from([0, 40, 4096]),
    most_chunks=st.sampled_from([1, 2, 9, 100]),
    has_room=st.booleans(),
    sees_block=st.booleans(),
)
def test_every_row_gets_the_keys_of_its_text_each_once(
    requests: list[RequestRows],
    pairs: Sequence[int],
    num_programs: int,
    max_partials: int,
    most_chunks: int,
    has_room: bool,
    sees_block: bool,
) -> None:
    made = cut(num_programs, max_partials, pairs, most_chunks)
    room = Room.for_steps(made, 400, MOST_REQUESTS, MOST_KEYS, MOST_NODES) if has_room else None
    work = Work(requests, made, room, sees_block)
    assert work.num_partials <= max_partials
    if room is not None:
        assert (work.num_items, work.num_joins) == (room.num_items, room.num_joins)
    check(work, requests, sees_block)


@settings(deadline=None, max_examples=examples(10))
@given(data=st.data())
def test_a_step_reads_the_blocks_that_requests_hold_now(data: Any) -> None:
    """Whatever became of them since the step before: grown, leased for drafts and given back, taken over
    by accepted drafts, freed and begun anew, shared."""
    pool = BlockPool(96, SIZE)
    made, buffer = cut(), np.zeros(1 << 14, dtype=np.int32)
    lengths: dict[str, int] = {}
    for _ in range(data.draw(st.integers(2, 5))):
        for name in "ab":
            if name in lengths and data.draw(st.booleans()):
                pool.free(name)
                del lengths[name]
            if name not in lengths:
                lengths[name] = pool.open(name, range(1000), "", 64)
        parts = []
        for name, base in lengths.items():
            known = data.draw(st.sampled_from([1, 1, 3, 20]))
            parents = data.draw(st.sampled_from([(), (-1, 0, 1), (-1, -1, 0, 1, 1)]))
            end = base + known + len(parents)
            assert pool.allocate(name, base + known)
            assert pool.allocate_draft(name, end) >= end
            rows = known + len(parents)
            table = pool.block_table(name)
            parts.append(RequestRows([0] * rows, known, base, parents, table, rows))
        requests = build_batch(parts, SIZE).requests
        work = Work(requests, made)
        work.write(buffer[: work.num_ints])
        rows_of = read(work, buffer[: work.num_ints])
        for request in requests:
            for row, wanted in enumerate(expected(request), request.first_row):
                got = [slot for chunk in rows_of[row].values() for slot in chunk]
                assert sorted(got) == sorted(wanted)
        for name, request in zip(lengths, requests, strict=True):
            lengths[name] += request.num_known + data.draw(st.integers(0, 1))
            lengths[name] = min(lengths[name], request.end)
            pool.promote(name, range(1000), lengths[name])
            pool.free_draft(name)
            pool.check_integrity()


def text(base: int, known: int = 1, parents: Sequence[int] = ()) -> RequestRows:
    count = known + len(parents)
    table = range(-(-(base + count) // SIZE))
    return RequestRows([0] * count, known, base, parents, table, count)


def test_an_idle_device_gets_a_long_text_in_pieces_and_a_busy_one_whole() -> None:
    long, short = text(64 * 20 - 1), text(30)
    requests = build_batch([long, short], SIZE).requests
    assert Work(requests, cut(num_programs=84)).num_items == 20 + 1
    assert Work(requests, cut(num_programs=14)).num_items == 7 + 1  # of three chunks each
    assert Work(requests, cut(num_programs=2)).num_items == 2
    assert Work(requests, cut(num_programs=84, max_partials=19)).num_items == 2


def test_tiles_are_as_small_as_a_step_s_requests_allow() -> None:
    for known, rows in ((1, 4), (4, 4), (5, 8), (9, 16), (40, 16)):
        requests = build_batch([text(7), text(3, known)], SIZE).requests
        assert Work(requests, cut()).tile_rows == rows
        assert Work(requests, cut(pairs=(64,))).tile_rows == 16


def test_branches_share_the_chunks_before_their_tree() -> None:
    parents = (-1, -1, -1, 0, 1)
    requests = build_batch([text(64 * 5 + 3, 1, parents)], SIZE).requests
    work = Work(requests, cut(num_programs=1))
    ints = np.zeros(work.num_ints, dtype=np.int32)
    work.write(ints)
    items = ints[: work.num_items * ITEM_INTS].reshape(-1, ITEM_INTS)
    read_chunks = sorted(items[:, [1, 3, 4]].tolist())
    # Rows, first chunk, chunks: the known row; three branches' ends; their text.
    assert read_chunks == [[1, 0, 6], [1, 5, 1], [2, 5, 1], [2, 5, 1], [5, 0, 5]]


def on_a_gpu() -> Cut:
    """For 8 key heads of 128 dimensions that 4 heads share each, in bf16, on a device of 132
    processors."""
    chunks = TritonAttention.chunk, TritonAttention.longest_chunk, TritonAttention.most_chunks
    return Cut(SIZE, *chunks, (16, 32, 64), 4, 8, 4 * 132, 4096)


def test_chunks_are_longer_where_there_would_be_many() -> None:
    made = on_a_gpu()
    assert [made.chunk_for(each) for each in (1, 1025, 1536, 1537, 3073, 6145, 1 << 20)] == [
        *(64, 64, 64),
        *(128, 256, 512, 512),
    ]


@pytest.mark.parametrize("num_keys", [1025, 1536, 1537, 4097, 8192, 100_000])
def test_one_long_text_keeps_a_device_busy(num_keys: int) -> None:
    """104 programs of 132 at least, and one for each right after 1,024 tokens."""
    work = Work(build_batch([text(num_keys - 1)], SIZE).requests, on_a_gpu())
    assert 8 * work.num_items >= (132 if num_keys == 1025 else 104)


@pytest.mark.parametrize(
    ("num_requests", "num_keys", "num_drafts", "most"),
    [
        (16, 2048, 0, 1.07),
        (16, 2048, 4, 1.34),
        (16, 8192, 0, 1.02),
        (16, 8192, 4, 1.09),
        (64, 8192, 0, 1.01),
        (64, 8192, 4, 1.01),
        (1, 1024, 0, 1.13),
    ],
)
def test_a_step_moves_hardly_more_than_each_key_and_value_once(
    num_requests: int, num_keys: int, num_drafts: int, most: float
) -> None:
    """Loads are counted here, and ``test_triton.py`` finds that the interpreter does as many. Sums that
    wait are written and read."""
    parents, count = range(-1, num_drafts - 1), 1 + num_drafts
    table = range(-(-(num_keys + num_drafts) // SIZE))
    rows = [
        RequestRows([0] * count, 1, num_keys - 1, parents, table, count)
        for _ in range(num_requests)
    ]
    work = Work(build_batch(rows, SIZE).requests, on_a_gpu())
    ints = np.zeros(work.num_ints, dtype=np.int32)
    work.write(ints)
    items = ints[: work.num_items * ITEM_INTS].reshape(-1, ITEM_INTS).astype(np.int64)
    first, chunks, ends, length = items[:, 3], items[:, 4], items[:, 5], items[:, 11]
    keys = int((np.minimum((first + chunks) * length, ends) - first * length).sum())
    assert keys == sum(request.end for request in rows)
    key_bytes, sum_bytes = 8 * 2 * 128 * 2, 2 * 32 * (128 + 2) * 4
    moved = keys * key_bytes + work.num_partials * sum_bytes + work.num_ints * 4
    assert moved < most * keys * key_bytes
