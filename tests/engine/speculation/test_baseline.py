"""Times of steps without drafts, by a cost model that is told."""

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


@pytest.mark.parametrize(
    ("seconds", "num_rows", "num_base_rows", "num_sampling", "num_requests", "first", "further"),
    [
        (0.7, 4, 4, 4, 4, 0.7, 0.7),  # without drafts a step is its own baseline
        (6.0, 20, 5, 5, 5, 3.0, 3.0),  # a machine twice as slow as believed: 6 s for the rows' 3
        (6.0, 50, 42, 2, 2, 5.2, 1.2),  # prompt rows are charged to the first token
        (2.0, 64, 64, 0, 1, 2.0, 2 * 1.1 / 7.4),  # prompts alone gain and lose nothing
    ],
)
def test_the_baseline_is_what_was_measured_without_draft_rows(
    seconds: float,
    num_rows: int,
    num_base_rows: int,
    num_sampling: int,
    num_requests: int,
    first: float,
    further: float,
) -> None:
    baseline = estimate_baseline(
        COST,
        seconds,
        num_rows=num_rows,
        num_base_rows=num_base_rows,
        num_sampling=num_sampling,
        num_kv_tokens=100,
        num_requests=num_requests,
    )
    assert baseline == pytest.approx((first, further, max(1, num_sampling)))
    assert baseline.seconds(0) == baseline.seconds(1) == pytest.approx(first)
    assert baseline.seconds(3) == pytest.approx(first + 2 * further)


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
