"""Times of batches by their size: nearby sizes share one, and estimates follow lasting changes only."""

from __future__ import annotations

from drafters.batch_times import BatchTimes


def test_sizes_between_two_powers_of_two_are_one() -> None:
    times = BatchTimes()
    times.observe(5, 60.0)  # the first may have warmed something up
    assert times.expect(4) == 0.0
    times.observe(4, 8.0)
    assert [times.expect(size) for size in (0, 4, 7)] == [0.0, 8.0, 8.0]


def test_sizes_that_were_not_timed_take_what_others_show_at_least() -> None:
    times = BatchTimes()
    for _ in range(2):
        times.observe(4, 8.0)
    assert [times.expect(size) for size in (1, 2, 3, 8, 100)] == [2.0, 4.0, 4.0, 8.0, 8.0]


def test_a_lasting_change_is_followed_and_one_outlier_is_not() -> None:
    times = BatchTimes()
    times.observe(1, 1.0)
    times.observe(1, 1000.0)
    assert 1.0 < times.expect(1) < 1.5
    for _ in range(60):
        times.observe(1, 3.0)
    assert abs(times.expect(1) - 3.0) < 0.1


def test_a_lucky_second_one_is_soon_made_up_for() -> None:
    times = BatchTimes()
    for seconds in (1.0, 1.0, *[3.0] * 4):
        times.observe(1, seconds)
    assert times.expect(1) > 2.4
