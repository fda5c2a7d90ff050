from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stats import (
    EarlyFinishers,
    RequestStats,
    SpeculativeStats,
    StepClock,
    StepShape,
    estimate_baseline,
)


class LinearCost:
    """One second and a tenth per row."""

    def step_seconds(
        self, num_rows: int, num_kv_tokens: int, num_requests: int, has_drafts: bool = False
    ) -> float:
        assert num_kv_tokens >= 0
        assert not has_drafts or num_rows > num_requests
        assert num_requests > 0
        return 1.0 + 0.1 * num_rows


def record(stats: RequestStats, gamma: int, num_accepted: int, reason: str = "") -> None:
    stats.note_gamma(gamma, reason)
    stats.record(
        gamma,
        num_accepted,
        num_accepted + 1,
        reason,
        draft_seconds=0.001,
        verify_seconds=0.010,
        step_seconds=0.050,
        baseline_seconds=0.040 * (num_accepted + 1),
    )


STEPS = st.lists(
    st.integers(0, 6).flatmap(lambda gamma: st.tuples(st.just(gamma), st.integers(0, gamma))),
    max_size=120,
)


@given(STEPS)
def test_counts_agree_with_each_other(steps: list[tuple[int, int]]) -> None:
    stats = RequestStats(drafter="ngram")
    for gamma, num_accepted in steps:
        record(stats, gamma, num_accepted)
    histogram = stats.acceptance_histogram
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_steps
    assert sum(histogram) == stats.num_steps == len(steps)
    assert sum(k * count for k, count in enumerate(histogram)) == stats.num_accepted_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert list(stats.accepted_per_position) == [
        sum(num_accepted > depth for _, num_accepted in steps)
        for depth in range(max((accepted for _, accepted in steps), default=0))
    ]
    assert stats.num_draft_tokens == sum(gamma for gamma, _ in steps)
    moves = sum(
        a != b for a, b in zip([0, *[g for g, _ in steps]], [g for g, _ in steps], strict=False)
    )
    assert stats.num_gamma_changes == moves
    assert len(stats.gamma_changes) == min(moves, 64)


def test_rates_and_times_of_a_known_run() -> None:
    stats = RequestStats(drafter="ngram")
    record(stats, 4, 3)
    record(stats, 4, 1)
    record(stats, 0, 0, "no_match")
    assert stats.acceptance_rate == pytest.approx(0.5)
    assert stats.tokens_per_step == pytest.approx(7 / 3)
    assert stats.mean_gamma == pytest.approx(8 / 3)
    assert stats.acceptance_histogram == (1, 1, 0, 1)
    assert stats.accepted_per_position == (2, 1, 1)
    assert stats.estimated_speedup == pytest.approx(7 * 0.040 / (3 * 0.050))
    assert stats.draft_seconds == pytest.approx(0.003)
    assert stats.verify_seconds == pytest.approx(0.030)


def test_without_steps_or_drafts_there_are_no_rates() -> None:
    stats = RequestStats()
    assert stats.tokens_per_step is None
    assert stats.estimated_speedup is None
    record(stats, 0, 0)
    assert stats.acceptance_rate is None
    assert stats.accepted_per_position == ()


def test_gamma_changes_carry_step_and_reason_and_the_latest_are_kept() -> None:
    stats = RequestStats(drafter="ngram")
    for gamma, reason in ((0, "no_match"), (3, ""), (3, ""), (0, "overload")):
        record(stats, gamma, 0, reason)
    changes = [(change.step, change.gamma, change.reason) for change in stats.gamma_changes]
    assert changes == [(1, 3, "granted"), (3, 0, "overload")]
    for step in range(100):
        record(stats, 1 + step % 2, 0)
    assert stats.num_gamma_changes == 102
    assert [change.step for change in stats.gamma_changes] == list(range(40, 104))


@given(STEPS, st.integers(0, 120))
def test_accounts_of_parts_add_up_to_that_of_the_whole(
    steps: list[tuple[int, int]], cut: int
) -> None:
    whole, first, rest = RequestStats(), RequestStats(), RequestStats()
    for index, (gamma, num_accepted) in enumerate(steps):
        for account in (whole, first if index < cut else rest):
            record(account, gamma, num_accepted, "overload" if gamma == 0 else "")
    total = sum([first, rest], SpeculativeStats())
    for name in ("gammas", "accepted", "disabled", "num_emitted_tokens", "num_draft_tokens"):
        assert getattr(total, name) == getattr(whole, name)
    for name in ("draft_seconds", "verify_seconds", "step_seconds", "baseline_seconds"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name))
    assert total.acceptance_histogram == whole.acceptance_histogram
    assert total.disabled["overload"] == sum(gamma == 0 for gamma, _ in steps)
    assert total.num_drafts == sum(gamma > 0 for gamma, _ in steps)


def test_a_sum_shares_nothing_with_its_parts() -> None:
    part = RequestStats()
    record(part, 2, 2)
    total = part + SpeculativeStats()
    record(part, 5, 5)
    assert total.num_steps == 1
    assert total.acceptance_histogram == (0, 0, 1)


def test_a_trimmed_run_counts_what_was_emitted() -> None:
    stats = RequestStats(drafter="ngram")
    stats.record(4, 2, 2)
    assert (stats.num_accepted_tokens, stats.num_emitted_tokens) == (2, 2)


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
    assert baseline == pytest.approx((5.2, 1.2, 2))
    assert baseline.seconds(3) == pytest.approx(5.2 + 2 * 1.2)
    assert baseline.seconds(0) == pytest.approx(5.2)


def test_a_batch_that_ends_with_its_slowest_request_gains_what_that_one_gains() -> None:
    """Eight requests of 40 tokens. Seven write five per step, one writes one; the steps of all eight cost
    twice those at gamma 0, the slow one's own nothing more."""
    early, accounts = EarlyFinishers(), [SpeculativeStats() for _ in range(8)]
    for _ in accounts:
        early.start()
    plain, baseline, spent = LinearCost().step_seconds(8, 80, 8), 0.0, 0.0
    for step in range(40):
        num_running = 8 if step < 8 else 1
        num_rows = 26 if step < 8 else 1
        shape = StepShape(
            num_rows, num_running, num_running, 10 * num_running, num_running, len(early)
        )
        seconds = LinearCost().step_seconds(num_rows, 0, num_running)
        found = estimate_baseline(LinearCost(), shape, seconds, draft_seconds=0.0)
        early.step(seconds, num_running if step != 7 else 1)
        for rank in range(num_running):
            num_emitted = 5 if rank else 1
            accounts[rank].record(
                4 * (rank > 0),
                num_emitted - 1,
                num_emitted,
                step_seconds=seconds,
                baseline_seconds=found.seconds(num_emitted),
            )
            if rank and step == 7:
                early.finish(accounts[rank])
        baseline += found.batch_seconds(36 if num_running == 8 else 1)
        spent += seconds
    truth = 40 * plain / spent
    assert baseline / spent == pytest.approx(truth, rel=0.02)


def test_who_finished_early_is_missed_until_another_comes_or_their_time_is_over() -> None:
    early = EarlyFinishers()
    quick, slow = SpeculativeStats(), SpeculativeStats()
    quick.record(4, 4, 5, step_seconds=1.0, baseline_seconds=4.0)
    slow.record(4, 0, 1, step_seconds=1.0, baseline_seconds=0.8)
    early.finish(slow)
    assert len(early) == 0
    early.finish(quick)
    early.finish(quick)
    early.step(2.0, 3)
    assert len(early) == 2
    early.start()
    assert len(early) == 1
    early.step(1.5, 3)
    assert len(early) == 0
    early.finish(quick)
    early.step(0.1, 0)  # nobody is left
    assert len(early) == 0


def test_a_step_of_prompts_alone_gains_and_loses_nothing() -> None:
    shape = StepShape(
        num_rows=64, num_base_rows=64, num_sampling_requests=0, num_kv_tokens=0, num_requests=1
    )
    baseline = estimate_baseline(LinearCost(), shape, step_seconds=2.0, draft_seconds=0.0)
    assert baseline.seconds(1) == pytest.approx(2.0)


def test_a_clock_gives_every_second_to_a_phase_or_to_the_engine() -> None:
    clock = StepClock()
    for _ in range(2):
        with clock.measure("draft"):
            sum(range(1000))
    with pytest.raises(ZeroDivisionError), clock.measure("forward"):
        _ = 1 / 0
    clock.stop()
    assert min(clock.draft, clock.forward, clock.other) > 0
    assert clock.verify == 0
    assert clock.step == pytest.approx(clock.draft + clock.forward + clock.other)


def test_what_a_device_ran_after_its_launch_was_the_forward() -> None:
    """The caller's clock saw it launched in 1 s and waited 4 s for what was read."""
    clock = StepClock(forward=1.0, verify=4.0)
    clock.forward_took(3.5)
    assert (clock.forward, clock.verify) == (3.5, 1.5)
    clock.forward_took(9.0)  # never more than was seen of both
    assert (clock.forward, clock.verify) == (5.0, 0.0)
