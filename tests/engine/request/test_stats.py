from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request.stats import RequestStats, SpeculativeStats, StepClock


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


def test_plain_decoding_takes_a_step_per_token_whatever_ends_the_text() -> None:
    """The step that decided on EOS emits nothing, and made 0.99 of a token per step."""
    stopped, cut = RequestStats(), RequestStats()
    for _ in range(3):
        stopped.record(0, 0, 1)
        cut.record(0, 0, 1)
    stopped.record(0, 0, 0, num_stop_tokens=1)
    both = SpeculativeStats()
    both.add(stopped)
    both.add(cut)
    assert [each.num_emitted_tokens for each in (stopped, cut, stopped + cut)] == [3, 3, 6]
    assert {each.tokens_per_step for each in (stopped, cut, stopped + cut, both)} == {1.0}


def test_rates_and_times_of_a_known_run() -> None:
    stats = RequestStats(drafter="ngram")
    assert stats.tokens_per_step is None
    assert stats.estimated_speedup is None
    record(stats, 0, 0, "no_match")
    assert stats.acceptance_rate is None
    assert stats.accepted_per_position == ()
    record(stats, 4, 3)
    record(stats, 4, 1)
    assert stats.acceptance_rate == pytest.approx(0.5)
    assert stats.tokens_per_step == pytest.approx(7 / 3)
    assert stats.mean_gamma == pytest.approx(8 / 3)
    assert stats.acceptance_histogram == (1, 1, 0, 1)
    assert stats.accepted_per_position == (2, 1, 1)
    assert stats.estimated_speedup == pytest.approx(7 * 0.040 / (3 * 0.050))
    assert stats.draft_seconds == pytest.approx(0.003)
    assert stats.verify_seconds == pytest.approx(0.030)


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
