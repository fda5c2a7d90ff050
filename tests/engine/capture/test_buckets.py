"""Buckets: the smallest that has room, and padding that touches nobody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import NO_SLOT, Bucket, InputBatch, RequestRows, build_batch, pad_batch
from engine.capture.buckets import find_bucket, make_buckets

SIZE = 4


def batch_of(rows: list[int]) -> InputBatch:
    requests = [
        RequestRows([7] * count, count, 3, (), range(12 * index, 12 * index + 12), num_logits=count)
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
        if sum(rows) <= bucket.num_rows and len(rows) <= bucket.num_requests
    ]
    assert found == (fit[0] if fit else None)
    # Only what is too large for all goes without.
    assert (found is None) == (sum(rows) > most_rows)


def test_a_few_requests_do_not_pay_for_many() -> None:
    buckets = make_buckets(64, 64)
    assert find_bucket(buckets, batch_of([6, 6, 6])) == Bucket(24, 4)
    assert find_bucket(buckets, batch_of([2] * 9)) == Bucket(24, 16)
    assert find_bucket(buckets, batch_of([1] * 20)) == Bucket(24, 24)
    assert find_bucket(buckets, batch_of([40])) == Bucket(48, 1)
    assert make_buckets(0, 64) == ()


@given(st.lists(st.integers(1, 6), max_size=10), st.integers(0, 20))
def test_padding_leaves_the_batch_as_it_is_and_is_stored_nowhere(
    rows: list[int], further: int
) -> None:
    batch = batch_of(rows)
    before = (list(batch.token_ids), list(batch.logits_indices))
    bucket = Bucket(batch.num_rows + further, len(rows))
    padded = pad_batch(batch, bucket)
    assert (batch.token_ids, batch.logits_indices) == before
    columns = [padded.token_ids, padded.positions, padded.slot_mapping, padded.logits_indices]
    assert {len(column) for column in columns} == {bucket.num_rows}
    own = [batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices]
    for column, mine in zip(columns, own, strict=True):
        assert column[: len(mine)] == mine
    assert set(padded.slot_mapping[batch.num_rows :]) <= {NO_SLOT}
    assert padded.requests is batch.requests
    assert padded.bucket == bucket
