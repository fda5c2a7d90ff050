from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stats import (
    Baseline,
    RequestSpeculationStats,
    StepGauges,
    StepSeconds,
    StepShape,
    StepStatsBuilder,
    estimate_baseline,
)


class LinearCost:
    """One second and a tenth per row."""

    def step_seconds(self, num_rows: int, num_kv_tokens: int, num_requests: int) -> float:
        assert num_kv_tokens >= 0
        assert num_requests > 0
        return 1.0 + 0.1 * num_rows


def record(stats: RequestSpeculationStats, gamma: int, num_accepted: int, reason: str = "") -> None:
    stats.record_step(
        gamma,
        num_accepted,
        num_accepted + 1,
        draft_seconds=0.001,
        verify_seconds=0.010,
        step_seconds=0.050,
        baseline_seconds=0.040 * (num_accepted + 1),
        reason=reason,
    )


STEPS = st.lists(
    st.integers(0, 6).flatmap(lambda gamma: st.tuples(st.just(gamma), st.integers(0, gamma))),
    max_size=120,
)


@given(STEPS)
def test_counts_agree_with_each_other(steps: list[tuple[int, int]]) -> None:
    stats = RequestSpeculationStats("ngram")
    for gamma, num_accepted in steps:
        record(stats, gamma, num_accepted)
    frozen = stats.freeze()
    histogram = frozen.acceptance_histogram
    assert frozen.num_emitted_tokens == frozen.num_accepted_tokens + frozen.num_steps
    assert sum(histogram) == frozen.num_steps == len(steps)
    assert sum(k * count for k, count in enumerate(histogram)) == frozen.num_accepted_tokens
    assert sum(frozen.accepted_per_position) == frozen.num_accepted_tokens
    assert list(frozen.accepted_per_position) == [
        sum(num_accepted > depth for _, num_accepted in steps)
        for depth in range(max((accepted for _, accepted in steps), default=0))
    ]
    assert frozen.num_draft_tokens == sum(gamma for gamma, _ in steps)
    moves = sum(
        a != b for a, b in zip([0, *[g for g, _ in steps]], [g for g, _ in steps], strict=False)
    )
    assert frozen.num_gamma_changes == moves
    assert len(frozen.gamma_changes) == min(moves, 64)


def test_rates_and_times_of_a_known_run() -> None:
    stats = RequestSpeculationStats("ngram")
    record(stats, 4, 3)
    record(stats, 4, 1)
    record(stats, 0, 0, "no_match")
    stats.record_failed_draft()
    frozen = stats.freeze()
    assert frozen.acceptance_rate == pytest.approx(0.5)
    assert frozen.tokens_per_step == pytest.approx(7 / 3)
    assert frozen.mean_gamma == pytest.approx(8 / 3)
    assert frozen.acceptance_histogram == (1, 1, 0, 1)
    assert frozen.accepted_per_position == (2, 1, 1)
    assert frozen.estimated_speedup == pytest.approx(7 * 0.040 / (3 * 0.050))
    assert frozen.draft_ms == pytest.approx(3.0)
    assert frozen.verify_ms == pytest.approx(30.0)
    assert frozen.num_failed_drafts == 1


def test_without_steps_or_drafts_there_are_no_rates() -> None:
    stats = RequestSpeculationStats("none")
    assert stats.freeze().tokens_per_step is None
    assert stats.freeze().estimated_speedup is None
    record(stats, 0, 0)
    assert stats.freeze().acceptance_rate is None
    assert stats.freeze().accepted_per_position == ()


def test_gamma_changes_carry_step_and_reason_and_the_latest_are_kept() -> None:
    stats = RequestSpeculationStats("ngram")
    for gamma, reason in ((0, "no_match"), (3, ""), (3, ""), (0, "overload")):
        record(stats, gamma, 0, reason)
    changes = [
        (change.step, change.gamma, change.reason) for change in stats.freeze().gamma_changes
    ]
    assert changes == [(1, 3, "granted"), (3, 0, "overload")]
    for step in range(100):
        record(stats, 1 + step % 2, 0)
    frozen = stats.freeze()
    assert frozen.num_gamma_changes == 102
    assert [change.step for change in frozen.gamma_changes] == list(range(40, 104))


def test_a_frozen_account_does_not_move_any_more() -> None:
    stats = RequestSpeculationStats("ngram")
    record(stats, 2, 2)
    frozen = stats.freeze()
    record(stats, 5, 5)
    assert frozen.num_steps == 1
    assert frozen.acceptance_histogram == (0, 0, 1)
    assert len(frozen.gamma_changes) == 1


def test_a_trimmed_run_counts_what_was_emitted() -> None:
    stats = RequestSpeculationStats("ngram")
    stats.record_step(
        4, 2, 2, draft_seconds=0, verify_seconds=0, step_seconds=1, baseline_seconds=2
    )
    frozen = stats.freeze()
    assert (frozen.num_accepted_tokens, frozen.num_emitted_tokens) == (2, 2)


def test_a_step_without_drafts_is_its_own_baseline() -> None:
    shape = StepShape(
        num_rows=4, num_base_rows=4, num_sampling_requests=4, num_kv_tokens=100, num_requests=4
    )
    baseline = estimate_baseline(LinearCost(), shape, step_seconds=0.7, draft_seconds=0.0)
    assert baseline.seconds(1) == pytest.approx(0.7)


def test_the_baseline_takes_away_draft_rows_and_drafting() -> None:
    shape = StepShape(
        num_rows=20, num_base_rows=5, num_sampling_requests=5, num_kv_tokens=0, num_requests=5
    )
    # A machine twice as slow as the model thinks: 6 seconds for the rows' 3.
    baseline = estimate_baseline(LinearCost(), shape, step_seconds=6.5, draft_seconds=0.5)
    assert baseline.seconds(1) == pytest.approx(3.0)
    assert baseline.seconds(3) == pytest.approx(9.0)


def test_prompt_rows_are_charged_to_the_first_token_only() -> None:
    shape = StepShape(
        num_rows=50, num_base_rows=42, num_sampling_requests=2, num_kv_tokens=0, num_requests=2
    )
    baseline = estimate_baseline(LinearCost(), shape, step_seconds=6.0, draft_seconds=0.0)
    assert baseline == pytest.approx((5.2, 1.2))
    assert baseline.seconds(3) == pytest.approx(5.2 + 2 * 1.2)
    assert baseline.seconds(0) == pytest.approx(5.2)


def test_a_step_of_prompts_alone_gains_and_loses_nothing() -> None:
    shape = StepShape(
        num_rows=64, num_base_rows=64, num_sampling_requests=0, num_kv_tokens=0, num_requests=1
    )
    baseline = estimate_baseline(LinearCost(), shape, step_seconds=2.0, draft_seconds=0.0)
    stats = StepStatsBuilder().build(shape, StepSeconds(0, 2, 0, 2), baseline, StepGauges())
    assert stats.baseline_seconds == pytest.approx(stats.step_seconds)


def test_a_steps_numbers_are_kept_by_drafter() -> None:
    builder = StepStatsBuilder()
    builder.add_request("ngram", gamma=4, num_accepted=2, num_emitted=3)
    builder.add_request("ngram", gamma=2, num_accepted=1, num_emitted=2)
    builder.add_request("ngram", gamma=0, num_accepted=0, num_emitted=1, reason="overload")
    builder.add_request("nasd", gamma=3, num_accepted=0, num_emitted=1, reason="low_acceptance")
    builder.add_request("nasd", gamma=0, num_accepted=0, num_emitted=1)
    builder.add_draft_failure()
    stats = builder.build(
        StepShape(
            num_rows=24, num_base_rows=15, num_sampling_requests=5, num_kv_tokens=9, num_requests=5
        ),
        StepSeconds(draft=0.1, forward=1.0, verify=0.2, step=1.5),
        Baseline(first_seconds=0.8, next_seconds=0.5),
        StepGauges(
            num_running=5,
            num_waiting=2,
            num_preemptions=1,
            num_prompt_tokens=10,
            blocks={"free": 3, "draft": 1},
            prefix_cache_queries=10,
            prefix_cache_hits=4,
        ),
    )
    assert stats.drafted == {"ngram": 6, "nasd": 3}
    assert stats.accepted == {"ngram": 3, "nasd": 0}
    assert stats.emitted == {"ngram": 6, "nasd": 2}
    assert stats.accepted_per_position == {"ngram": [2, 1], "nasd": []}
    assert stats.gammas == {"ngram": [4, 2, 0], "nasd": [3, 0]}
    assert stats.disabled == {("ngram", "overload"): 1}
    assert (stats.num_rows, stats.num_prompt_tokens, stats.num_emitted_tokens) == (24, 10, 8)
    assert stats.other_seconds == pytest.approx(0.2)
    assert stats.baseline_seconds == pytest.approx(0.8 + 0.6 * 0.5)
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (5, 2, 1)
    assert stats.blocks == {"free": 3, "draft": 1}
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 4)
    assert stats.num_draft_failures == 1
