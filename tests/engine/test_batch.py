"""From requests to flat rows: every row's token, position, slot and logits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import InputBuffers, RequestRows, build_batch, slot_of
from worlds.lanes import examples

SIZE = 4


def test_inputs_of_steps_of_equal_size_lie_at_the_same_addresses() -> None:
    buffers = InputBuffers(torch.device("cpu"), max_num_rows=8)
    steps = [
        RequestRows([10, 11, 12], 3, 2, (), [5, 1], 2),
        RequestRows([30], 1, 0, (), [9], 0),
        RequestRows([5, 6, 7], 1, 4, (-1, 0), [2, 1], 3),
        RequestRows(list(range(8)), 8, 0, (), [3, 4], 8),
        RequestRows([1], 1, 7, (), [9, 3], 1),
    ]
    addresses = {1: set(), 3: set(), 8: set()}
    for step in steps:
        batch = build_batch([step], SIZE)
        inputs = buffers.fill(batch)
        assert inputs.token_ids.tolist() == step.token_ids
        assert inputs.positions.tolist() == batch.positions
        assert inputs.slot_mapping.tolist() == batch.slot_mapping
        # A model is asked for one row's logits at least.
        assert inputs.logits_indices.tolist() == (batch.logits_indices or [0])
        assert all(each.is_contiguous() and each.element_size() == 8 for each in inputs)
        assert {each.dtype for each in inputs[:-1]} == {torch.long}
        assert inputs.temperatures.dtype == torch.float64
        addresses[len(step.token_ids)].add(tuple(each.data_ptr() for each in inputs))
    assert [len(found) for found in addresses.values()] == [1, 1, 1]
    more = build_batch([RequestRows(list(range(20)), 20, 0, (), range(5), 20)], SIZE)
    assert buffers.fill(more).token_ids.tolist() == list(range(20))
    # What was captured over the smaller memory finds it where it was.
    again = buffers.fill(build_batch(steps[:1], SIZE))
    assert tuple(each.data_ptr() for each in again) in addresses[3]
    assert again.token_ids.tolist() == steps[0].token_ids


@st.composite
def requests(draw: st.DrawFn) -> list[RequestRows]:
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
        drawn.append(RequestRows(token_ids, num_known, base, parents, table, num_logits))
    return drawn


@settings(max_examples=examples(150))
@given(given=requests())
def test_every_row_is_where_its_request_says(given: list[RequestRows]) -> None:
    batch = build_batch(given, SIZE)
    assert batch.token_ids == [t for each in given for t in each.token_ids]
    assert len(set(batch.slot_mapping)) == batch.num_rows == len(batch.positions)
    assert batch.num_kv_tokens == sum(each.base + len(each.token_ids) for each in given)
    assert sorted(batch.logits_indices) == batch.logits_indices
    next_row = 0
    for rows in batch.requests:
        assert rows.first_row == next_row
        next_row += rows.num_rows
    row_of = {token_id: row for row, token_id in enumerate(batch.token_ids)}
    for request in given:
        with_logits = request.token_ids[len(request.token_ids) - request.num_logits :]
        first = request.first_logit
        reported = batch.logits_indices[first : first + request.num_logits]
        assert [batch.token_ids[row] for row in reported] == list(with_logits)
        for index, token_id in enumerate(request.token_ids):
            row = row_of[token_id]
            slot = batch.slot_mapping[row]
            assert slot // SIZE == request.block_table[(request.base + index) // SIZE]
            assert slot == slot_of(request.block_table, request.base + index, SIZE)
            if index < request.num_known:
                assert batch.positions[row] == request.base + index
                continue
            parent = request.parents[index - request.num_known]
            above = row_of[request.token_ids[request.num_known + parent]]
            assert batch.positions[row] == batch.positions[above] + 1
