"""From requests to flat rows: every row's token, position, slot and logits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import NUM_ROWS_ALONE, BatchRequest, build_batch, slot_of

SIZE = 4


def test_a_chunk_a_tree_and_a_lone_row_worked_out_by_hand() -> None:
    chunk = BatchRequest([10, 11, 12], 3, 2, (), [5, 1], 0)
    tree = BatchRequest([20, 21, 22, 23, 24], 2, 7, (-1, -1, 1), [3, 0, 2], 4)
    lone = BatchRequest([30], 1, 0, (), [9], 1)
    batch = build_batch([chunk, tree, lone], SIZE)
    assert batch.token_ids == [10, 11, 12, 20, 21, 22, 23, 24, 30]
    # Known rows count on; siblings share a position.
    assert batch.positions == [2, 3, 4, 7, 8, 9, 9, 10, 0]
    # Slots count on, whatever the positions: 5*4+2, 5*4+3, then block 1; block 0's last, then block 2.
    assert batch.slots == [22, 23, 4, 3, 8, 9, 10, 11, 36]
    assert batch.logit_rows == [4, 5, 6, 7, 8]
    assert batch.first_logit_row == [0, 0, 4]
    assert batch.num_rows == 9
    assert batch.num_kv_tokens == 5 + 12 + 1


def test_long_chunks_lie_first_and_logits_keep_the_callers_order() -> None:
    short = BatchRequest([1], 1, 0, (), [0], 1)
    just_short = BatchRequest([2] * NUM_ROWS_ALONE, NUM_ROWS_ALONE, 0, (), range(1, 20), 2)
    long = BatchRequest([3] * (NUM_ROWS_ALONE + 1), NUM_ROWS_ALONE + 1, 0, (), range(20, 40), 3)
    batch = build_batch([short, just_short, long], SIZE)
    assert batch.token_ids == [*long.token_ids, 1, *just_short.token_ids]
    assert batch.first_logit_row == [3, 4, 0]
    assert [request.first_row for request in batch.requests] == [0, 33, 34]


@st.composite
def requests(draw: st.DrawFn) -> list[BatchRequest]:
    """Up to five requests with blocks of their own and random trees."""
    drawn = []
    for index in range(draw(st.integers(1, 5))):
        base = draw(st.integers(0, 30))
        num_known = draw(st.integers(1, 40))
        num_nodes = draw(st.integers(0, 8))
        parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
        num_rows = num_known + num_nodes
        needed = -(-(base + num_rows) // SIZE)
        table = draw(st.permutations(range(100 * index, 100 * index + needed)))
        num_logits = draw(st.sampled_from([0, 1 + num_nodes, num_rows]))
        token_ids = [1000 * index + row for row in range(num_rows)]
        drawn.append(BatchRequest(token_ids, num_known, base, parents, table, num_logits))
    return drawn


@settings(max_examples=150, deadline=None)
@given(given=requests())
def test_every_row_is_where_its_request_says(given: list[BatchRequest]) -> None:
    batch = build_batch(given, SIZE)
    assert sorted(batch.token_ids) == sorted(t for each in given for t in each.token_ids)
    assert len(set(batch.slots)) == batch.num_rows == len(batch.positions)
    assert sorted(batch.logit_rows) == batch.logit_rows
    next_row = 0
    for rows in batch.requests:
        assert rows.first_row == next_row
        next_row += rows.num_rows
    row_of = {token_id: row for row, token_id in enumerate(batch.token_ids)}
    for request, first_logit in zip(given, batch.first_logit_row, strict=True):
        with_logits = request.token_ids[len(request.token_ids) - request.num_logit_rows :]
        reported = batch.logit_rows[first_logit : first_logit + request.num_logit_rows]
        assert [batch.token_ids[row] for row in reported] == list(with_logits)
        for index, token_id in enumerate(request.token_ids):
            row = row_of[token_id]
            slot = batch.slots[row]
            assert slot // SIZE == request.block_table[(request.base + index) // SIZE]
            assert slot == slot_of(request.block_table, request.base + index, SIZE)
            if index < request.num_known:
                assert batch.positions[row] == request.base + index
                continue
            parent = request.parents[index - request.num_known]
            above = row_of[request.token_ids[request.num_known + parent]]
            assert batch.positions[row] == batch.positions[above] + 1
