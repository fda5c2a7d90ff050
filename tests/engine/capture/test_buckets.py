"""Buckets: the smallest that has room, and padding that touches nobody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Bucket, InputBatch, RequestRows, build_batch, pad_batch
from engine.capture.buckets import find_bucket, make_buckets

SIZE = 4
TRASH = 50


def batch_of(rows: list[int]) -> InputBatch:
    requests = [
        RequestRows([7] * count, count, 3, (), range(8 * index, 8 * index + 8), num_logits=count)
        for index, count in enumerate(rows)
    ]
    return build_batch(requests, SIZE)


@given(st.integers(1, 300), st.integers(1, 80), st.lists(st.integers(1, 6), max_size=40))
def test_a_batch_goes_into_the_smallest_bucket_that_has_room(
    most_rows: int, most_requests: int, rows: list[int]
) -> None:
    rows = rows[:most_requests]
    buckets = make_buckets(most_rows, most_requests)
    assert list(buckets) == sorted(set(buckets))
    found = find_bucket(buckets, batch_of(rows))
    fit = [
        bucket
        for bucket in buckets
        if sum(rows) <= bucket.num_rows
        and len(rows) + (sum(rows) < bucket.num_rows) <= bucket.num_requests
    ]
    assert found == (fit[0] if fit else None)
    # Only what is too large for all goes without.
    assert (found is None) == (sum(rows) > most_rows)


def test_a_few_requests_do_not_pay_for_many() -> None:
    buckets = make_buckets(64, 64)
    assert find_bucket(buckets, batch_of([6, 6, 6])) == Bucket(24, 4)
    assert find_bucket(buckets, batch_of([2] * 9)) == Bucket(24, 16)
    assert find_bucket(buckets, batch_of([1] * 20)) == Bucket(24, 25)
    assert make_buckets(0, 64) == ()


@given(st.lists(st.integers(1, 6), max_size=10), st.integers(0, 20))
def test_padding_leaves_the_batch_and_writes_to_the_trash_alone(
    rows: list[int], further: int
) -> None:
    batch = batch_of(rows)
    before = (list(batch.token_ids), list(batch.logits_indices), len(batch.requests))
    bucket = Bucket(batch.num_rows + further, len(rows) + 1)
    padded = pad_batch(batch, bucket, SIZE, TRASH)
    assert (batch.token_ids, batch.logits_indices, len(batch.requests)) == before
    columns = [padded.token_ids, padded.positions, padded.slot_mapping, padded.logits_indices]
    assert {len(column) for column in columns} == {bucket.num_rows}
    own = [batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices]
    for column, mine in zip(columns, own, strict=True):
        assert column[: len(mine)] == mine
    added = padded.slot_mapping[batch.num_rows :]
    assert {slot // SIZE for slot in added} <= {TRASH}
    assert sum(request.num_rows for request in padded.requests) == bucket.num_rows
    assert len(padded.requests) <= bucket.num_requests
