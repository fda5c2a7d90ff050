"""What steps would have taken without drafts, by a cost model that is told."""

from __future__ import annotations

import pytest

from engine.request.stats import SpeculativeStats
from engine.speculation.baseline import EarlyFinishers, estimate_baseline
from worlds.engine_harness import DictatedCost


class LinearCost(DictatedCost):
    """One second and a tenth per row."""

    def step_seconds(
        self, num_rows: int, num_kv_tokens: int, num_requests: int, has_drafts: bool = False
    ) -> float:
        assert num_kv_tokens >= 0
        assert not has_drafts or num_rows > num_requests
        assert num_requests > 0
        return 1.0 + 0.1 * num_rows


COST = LinearCost()


def test_a_step_without_drafts_is_its_own_baseline() -> None:
    baseline = estimate_baseline(
        COST, 0.7, num_rows=4, num_base_rows=4, num_sampling=4, num_kv_tokens=100, num_requests=4
    )
    assert baseline.seconds(1) == pytest.approx(0.7)


def test_the_baseline_takes_away_draft_rows() -> None:
    # A machine twice as slow as the model thinks: 6 seconds for the rows' 3.
    baseline = estimate_baseline(
        COST, 6.0, num_rows=20, num_base_rows=5, num_sampling=5, num_kv_tokens=0, num_requests=5
    )
    assert baseline.seconds(1) == pytest.approx(3.0)
    assert baseline.seconds(3) == pytest.approx(9.0)


def test_prompt_rows_are_charged_to_the_first_token_only() -> None:
    baseline = estimate_baseline(
        COST, 6.0, num_rows=50, num_base_rows=42, num_sampling=2, num_kv_tokens=0, num_requests=2
    )
    assert baseline == pytest.approx((5.2, 1.2, 2))
    assert baseline.seconds(3) == pytest.approx(5.2 + 2 * 1.2)
    assert baseline.seconds(0) == pytest.approx(5.2)


def test_a_step_of_prompts_alone_gains_and_loses_nothing() -> None:
    baseline = estimate_baseline(
        COST, 2.0, num_rows=64, num_base_rows=64, num_sampling=0, num_kv_tokens=0, num_requests=1
    )
    assert baseline.seconds(1) == pytest.approx(2.0)


def test_a_batch_that_ends_with_its_slowest_request_gains_what_that_one_gains() -> None:
    """Eight requests of 40 tokens. Seven write five per step, one writes one; the steps of all eight cost
    twice those at gamma 0, the slow one's own nothing more."""
    early, accounts = EarlyFinishers(), [SpeculativeStats() for _ in range(8)]
    for _ in accounts:
        early.start()
    plain, baseline, spent = COST.step_seconds(8, 80, 8), 0.0, 0.0
    for step in range(40):
        num_running = 8 if step < 8 else 1
        num_rows = 26 if step < 8 else 1
        seconds = COST.step_seconds(num_rows, 0, num_running)
        found = estimate_baseline(
            COST,
            seconds,
            num_rows=num_rows,
            num_base_rows=num_running,
            num_sampling=num_running,
            num_kv_tokens=10 * num_running,
            num_requests=num_running,
            num_early=len(early),
        )
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
