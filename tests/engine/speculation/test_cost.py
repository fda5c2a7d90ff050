from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.cost import CostModel, bucket_row_counts, measure
from worlds.lanes import examples

ROWS = (1, 2, 4, 8, 16, 32, 64)


def true_seconds(num_rows: int, num_kv_tokens: int = 0, num_requests: int = 1) -> float:
    """A weight-bound machine: 16 rows cost 1.45 times one row. Context costs once where it is read, and
    again for every row that reads it."""
    pairs = num_rows * num_kv_tokens / num_requests
    return 0.040 + 0.0012 * num_rows + 2e-6 * num_kv_tokens + 3e-7 * pairs


def measured_exactly() -> CostModel:
    far = [(1, 512, 1), (8, 512, 1), (8, 4096, 8), (32, 4096, 8)]
    points = [(rows, 0, true_seconds(rows), 1) for rows in ROWS]
    points += [(*size[:2], true_seconds(*size), size[2]) for size in far]
    return CostModel(points)


@pytest.mark.parametrize(
    ("points", "seconds"),
    [
        ([(1, 0, 1.0), (2, 0, 1.5), (4, 0, 1.6)], {1: 1.0, 2: 1.5, 3: 1.55, 4: 1.6}),
        ([(4, 0, 1.0)], {1: 1.0, 4: 1.0, 8: 2.0}),
    ],
)
def test_measured_points_are_reproduced_and_between_them_it_is_linear(
    points: list[tuple[int, int, float]], seconds: dict[int, float]
) -> None:
    """A single one is a floor below it, and taken as proportional above."""
    model = CostModel(points)
    assert {rows: model.step_seconds(rows, 0, 1) for rows in seconds} == pytest.approx(seconds)


@pytest.mark.parametrize("size", [(1, 0, 1), (5, 300, 1), (64, 4000, 16), (16, 8000, 16)])
def test_context_costs_where_it_is_read_and_for_every_row_that_reads_it(
    size: tuple[int, int, int],
) -> None:
    assert measured_exactly().step_seconds(*size) == pytest.approx(true_seconds(*size))


def test_context_that_makes_steps_cheaper_is_not_believed() -> None:
    model = CostModel([(1, 0, 1.0), (8, 0, 1.5), (1, 512, 0.8), (8, 512, 1.4), (8, 4096, 1.6, 8)])
    assert model.kv_slope >= 0.0
    assert model.pair_slope >= 0.0
    assert model.step_seconds(8, 4096, 8) >= model.step_seconds(8, 0, 8)


@pytest.mark.parametrize("points", [[], [(0, 0, 1.0)], [(1, 0, 0.0)], [(1, 0, float("nan"))]])
def test_what_is_no_measurement_is_refused(points: list[tuple[int, int, float]]) -> None:
    with pytest.raises(ValueError, match="measure"):
        CostModel(points)


MEASUREMENTS = st.lists(
    st.tuples(
        st.integers(1, 100), st.sampled_from([0, 64, 512]), st.floats(1e-4, 10.0), st.integers(1, 9)
    ),
    min_size=1,
    max_size=12,
)
STEPS = st.lists(
    st.tuples(st.integers(1, 150), st.integers(0, 2000), st.integers(1, 9), st.floats(1e-5, 100.0)),
    max_size=30,
)


@settings(max_examples=examples(150))
@given(points=MEASUREMENTS, steps=STEPS, first=st.integers(1, 120), context=st.integers(0, 999))
def test_cost_is_positive_and_never_falls_in_rows_whatever_was_measured_and_observed(
    points: list[tuple[int, int, float, int]],
    steps: list[tuple[int, int, int, float]],
    first: int,
    context: int,
) -> None:
    model = CostModel(points)
    for step in steps:
        model.observe(*step)
    table = model.step_seconds_table(first, 60, context, 3)
    assert table[0] > 0.0
    for low, high in zip(table, table[1:], strict=False):
        assert high >= low * (1 - 1e-9)
    one_by_one = [model.step_seconds(first + k, context, 3) for k in range(61)]
    assert table == pytest.approx(one_by_one, rel=1e-9)


def test_it_converges_to_the_true_costs_under_noise_where_start_up_was_wrong() -> None:
    """Noise of 10 %; every row count is seen 250 times, of which the filter remembers about ten: an error
    of about 3 % (one standard deviation), and a pull of 1 % towards start-up."""
    rng = random.Random(5)
    wrong = {1: 1.0, 2: 0.9, 4: 1.2, 8: 1.5, 16: 1.3, 32: 0.8, 64: 1.0}
    model = CostModel([(rows, 0, 1.3 * wrong[rows] * true_seconds(rows)) for rows in ROWS])
    for _ in range(250 * len(ROWS)):
        rows = rng.choice(ROWS)
        model.observe(rows, 100, 1, true_seconds(rows, 100) * rng.lognormvariate(0.0, 0.1))
    for rows in ROWS:
        assert model.step_seconds(rows, 100, 1) == pytest.approx(true_seconds(rows, 100), rel=0.1)


def test_a_few_steps_tell_what_start_up_got_wrong() -> None:
    """Draft rows at half their price; ten steps with and without them later it is known."""
    model = CostModel([(rows, 0, true_seconds(1) + 0.0006 * (rows - 1)) for rows in ROWS])

    def ratio() -> float:
        return model.step_seconds(48, 0, 1) / model.step_seconds(16, 0, 1)

    expected = true_seconds(48) / true_seconds(16)
    assert ratio() < 0.85 * expected
    for _ in range(10):
        for rows in (16, 48):
            model.observe(rows, 0, 1, true_seconds(rows))
    assert ratio() == pytest.approx(expected, rel=0.05)


def test_a_machine_that_stays_slower_is_learnt_for_all_row_counts() -> None:
    """Only single rows run meanwhile; more rows must not come to look cheap next to them."""
    model = measured_exactly()
    for _ in range(1500):
        model.observe(1, 0, 1, 2 * true_seconds(1))
    for rows in ROWS:
        assert model.step_seconds(rows, 0, 1) == pytest.approx(2 * true_seconds(rows), rel=0.05)


def test_a_slow_spell_at_high_row_counts_is_forgotten_when_they_are_not_visited() -> None:
    """Otherwise gamma would stay at 0 for ever: it never sees that rows are cheap again."""
    model = measured_exactly()
    for _ in range(200):
        model.observe(1, 0, 1, true_seconds(1))
        model.observe(16, 0, 1, 2 * true_seconds(16))

    def ratio() -> float:
        return model.step_seconds(16, 0, 1) / model.step_seconds(1, 0, 1)

    true_ratio = true_seconds(16) / true_seconds(1)
    assert ratio() > 1.6 * true_ratio
    for _ in range(1500):
        model.observe(1, 0, 1, true_seconds(1))
    assert ratio() < 1.05 * true_ratio


def test_overhead_is_added_to_every_step_and_learnt_apart_from_the_rows() -> None:
    model = CostModel([(1, 0, 1.0), (2, 0, 1.5)], overhead_seconds=0.5)
    assert model.step_seconds_table(1, 1, 0, 1) == pytest.approx([1.5, 2.0])
    for _ in range(400):
        model.observe_overhead(0.25)
        model.observe(1, 0, 1, 1.0)
    assert model.step_seconds(1, 0, 1) == pytest.approx(1.25, rel=0.01)
    assert model.overhead_seconds == pytest.approx(0.25, rel=0.01)


def test_a_call_of_a_drafter_costs_what_calls_for_about_as_many_took() -> None:
    model = measured_exactly()
    assert model.draft_seconds("ngram", 8) == 0.0
    for _ in range(400):
        model.observe_draft("ngram", 8, 0.040)
        model.observe_draft("ngram", 3, 0.020)
        model.observe_draft("model", 4, 0.008)
    model.observe_draft("model", 4, 10.0)
    assert model.draft_seconds("ngram", 9) == pytest.approx(0.040, rel=0.05)
    assert model.draft_seconds("ngram", 2) == pytest.approx(0.020, rel=0.05)
    assert model.draft_seconds("model", 4) == pytest.approx(0.008, rel=0.4)
    assert model.draft_seconds("ngram", 100) == model.draft_seconds("ngram", 9)


def test_steps_that_mix_numbers_of_rows_are_learnt_apart() -> None:
    """Drafts of several requests cost a third on top, of one request nothing."""
    model = measured_exactly()
    plain = model.step_seconds(8, 800, 8)
    for step in range(600):
        rows = 20 if step % 2 else 8
        seconds = true_seconds(rows, 800, 8) * (4 / 3 if step % 2 else 1)
        model.observe(rows, 800, 8, seconds, has_drafts=rows > 8)
    assert model.step_seconds(8, 800, 8) == pytest.approx(plain, rel=0.03)
    table = model.step_seconds_table(8, 12, 800, 8)
    assert table[0] == model.step_seconds(8, 800, 8)
    assert table[12] == pytest.approx(true_seconds(20, 800, 8) * 4 / 3, rel=0.06)
    assert table[1] / table[0] > 1.15
    alone = model.step_seconds_table(1, 4, 100, 1)
    assert alone[1] == pytest.approx(model.step_seconds(2, 100, 1))


def test_measuring_takes_the_fastest_of_interleaved_rounds() -> None:
    calls: list[tuple[int, int, int]] = []

    def run(*size: int) -> float:
        calls.append(size)  # type: ignore[arg-type]
        slow = calls.count(size) != 3  # type: ignore[arg-type]
        return true_seconds(*size) * (5.0 if slow else 1.0)

    points = measure(run, max_rows=40, repeats=3, budget_seconds=60.0)
    assert calls == calls[: len(points)] * 4
    assert [point.num_rows for point in points if point.num_kv_tokens == 0] == bucket_row_counts(40)
    assert {(1, 512, 1), (8, 512, 1), (8, 4096, 8), (32, 4096, 8)} <= set(calls)
    model = CostModel(points)
    for size in ((1, 0, 1), (7, 100, 1), (20, 2000, 1), (33, 16_000, 11)):
        assert model.step_seconds(*size) == pytest.approx(true_seconds(*size))


@pytest.mark.parametrize(
    ("max_rows", "max_kv_tokens", "expected"),
    [
        (64, None, {(1, 512, 1), (8, 512, 1), (8, 4096, 8), (32, 4096, 8)}),
        (64, 1600, {(1, 512, 1), (8, 512, 1), (3, 1536, 3), (12, 1536, 3)}),
        (8, None, {(1, 512, 1), (8, 512, 1), (2, 1024, 2), (8, 1024, 2)}),
        (64, 600, {(1, 512, 1), (8, 512, 1)}),
        (4, None, {(1, 512, 1)}),
    ],
)
def test_context_is_measured_with_as_many_requests_as_there_is_room_for(
    max_rows: int, max_kv_tokens: int | None, expected: set[tuple[int, int, int]]
) -> None:
    calls: set[tuple[int, int, int]] = set()

    def run(*size: int) -> float:
        calls.add(size)  # type: ignore[arg-type]
        return 0.001

    measure(run, max_rows, repeats=1, max_kv_tokens=max_kv_tokens)
    assert {size for size in calls if size[1]} == expected
    calls.clear()
    measure(run, max_rows, repeats=1, far_context=0)
    assert {size[1:] for size in calls} == {(0, 1)}


def test_requests_measured_side_by_side_fit_into_the_store_in_whole_blocks() -> None:
    def run(num_rows: int, num_kv_tokens: int, num_requests: int) -> float:
        per_request = num_rows // num_requests + num_kv_tokens // num_requests
        assert num_requests * -(-per_request // 16) * 16 <= 1024
        return 0.001

    sizes = measure(run, 64, repeats=1, far_context=192, max_kv_tokens=1024, block_size=16)
    assert max(size.num_requests for size in sizes) == 4


def test_what_takes_long_runs_twice_once_the_budget_is_spent_and_the_better_run_counts() -> None:
    calls: list[tuple[int, ...]] = []

    def run(*size: int) -> float:
        calls.append(size)
        return true_seconds(*size) * (2.0 if calls.count(size) == 2 else 1.0)

    points = measure(run, max_rows=1024, repeats=3, budget_seconds=0.4)
    assert [each.num_rows for each in points if each.num_kv_tokens == 0] == bucket_row_counts(64)
    for each in points:
        size = (each.num_rows, each.num_kv_tokens, each.num_requests)
        assert calls.count(size) == (4 if true_seconds(*size) <= 0.05 else 2)
        assert each.seconds == true_seconds(*size), "one slow run is not believed"
    assert {calls.count(size) for size in calls} == {2, 4}


def test_row_counts_that_take_an_eighth_of_the_budget_are_left_out() -> None:
    points = measure(true_seconds, max_rows=1024, repeats=3, budget_seconds=4.0)
    # 256 rows would take 0.39 s, going by 128; 512 would take 0.69 s, more than an eighth.
    assert max(each.num_rows for each in points) == 256
    model = CostModel(points)
    assert model.step_seconds(1024, 0, 1) == pytest.approx(true_seconds(1024))


def test_large_row_counts_run_twice_and_the_better_run_counts() -> None:
    calls: list[int] = []

    def run(num_rows: int, *_: int) -> float:
        calls.append(num_rows)
        return (3.0 if calls.count(num_rows) == 1 else 1.0) * 1e-4 * num_rows

    points = measure(run, max_rows=512, repeats=2, far_context=0)
    assert [calls.count(rows) for rows in (64, 128, 512)] == [3, 2, 2]
    assert [point.seconds for point in points[-3:]] == pytest.approx([0.0128, 0.0256, 0.0512])
    assert bucket_row_counts(100) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100]
    assert bucket_row_counts(1) == [1]


# --- what steps teach ---


@pytest.mark.parametrize("speed", [0.75, 1.3])
def test_a_machine_of_another_speed_than_at_start_up_does_not_change_what_rows_cost(
    speed: float,
) -> None:
    model = CostModel([(rows, 0, 0.05 + 0.004 * rows) for rows in (1, 4, 8, 12, 16)])
    seconds = model.step_seconds(12, 0, 8, has_drafts=True)
    before = seconds / model.step_seconds(8, 0, 8)
    for _ in range(60):
        model.observe(12, 0, 8, speed * seconds, has_drafts=True)
    after = model.step_seconds(12, 0, 8, has_drafts=True)
    assert after == pytest.approx(speed * seconds, rel=0.02)
    assert after / model.step_seconds(8, 0, 8) == pytest.approx(before, rel=0.02)


def test_a_device_that_goes_on_by_itself_waits_where_drafts_are_asked_for() -> None:
    model = CostModel([(1, 0, 1.0), (2, 0, 1.5)], overhead_seconds=0.5)
    assert model.waiting_seconds == 0.0
    for _ in range(100):
        model.observe_overhead(0.1, is_hidden=True)
    assert model.overhead_seconds == 0.5
    assert model.waiting_seconds == pytest.approx(0.4)
    assert model.step_seconds(1, 0, 1) == pytest.approx(1.1)
    assert model.step_seconds(2, 0, 1, has_drafts=True) == pytest.approx(2.0)
    assert model.step_seconds_table(1, 1, 0, 1) == pytest.approx([1.5, 2.0])
    for _ in range(400):
        model.observe_overhead(0.9, is_hidden=True)
    assert model.waiting_seconds == 0.0, "a step gains nothing by waiting"
