"""The wait that a client is told when it is turned away, from figures alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from engine.process.backlog import Backlog
from engine.request.stats import SpeculativeStats, StepStats


@dataclass
class Open:
    """A request that is open: decoding unless it has a prompt."""

    num_tokens_left: int
    num_output_tokens: int = 0
    num_new_tokens: int = 1


def step(
    seconds: float,
    num_emitted: int,
    *,
    num_prompt: int = 0,
    num_draft: int = 0,
    num_waiting: int = 1,
) -> StepStats:
    account = SpeculativeStats(gammas=Counter(), num_emitted_tokens=num_emitted)
    return StepStats(
        num_rows=num_prompt + num_emitted + num_draft,
        num_prompt_tokens=num_prompt,
        by_drafter={"none": account},
        step_seconds=seconds,
        num_running=64,
        num_waiting=num_waiting,
    )


def full(seconds: float = 0.1, num_emitted: int = 64) -> Backlog:
    backlog = Backlog()
    for _ in range(50):
        backlog.observe_step(step(seconds, num_emitted))
    return backlog


def test_the_wait_is_what_is_ahead_at_the_measured_pace() -> None:
    # 640 tokens a second; 320 requests of 24 tokens are done in 12 seconds, wherever they stand.
    assert full().seconds([Open(24)] * 320) == pytest.approx(12.0)
    assert full().seconds([Open(12, 12)] * 64 + [Open(24)] * 256) == pytest.approx(10.8)
    assert full().seconds([]) == Backlog().seconds([Open(24)] * 320) == 0.0


@pytest.mark.parametrize("more", [step(0.1, 64, num_waiting=256), step(0.05, 1, num_waiting=0)])
def test_neither_long_queues_nor_steps_that_were_not_full_change_the_pace(more: StepStats) -> None:
    """They did once: the longer the queue had been, the longer a client was told to stay away."""
    backlog = full()
    for _ in range(1000):
        backlog.observe_step(more)
    assert backlog.seconds([Open(24)] * 320) == pytest.approx(12.0)


def test_prompts_ahead_cost_their_own_pace() -> None:
    backlog = Backlog()
    for _ in range(50):
        # 448 rows of prompts and 64 of decoding in 0.4 seconds: a row costs as much as another.
        backlog.observe_step(step(0.4, 64, num_prompt=448))
    waiting = [Open(10, num_new_tokens=1001)] * 8
    row_seconds = 0.4 / 512
    assert backlog.seconds(waiting) == pytest.approx(8 * 1010 * row_seconds)


def test_drafts_that_are_accepted_shorten_the_wait() -> None:
    plain, drafted = Backlog(), Backlog()
    for _ in range(50):
        plain.observe_step(step(0.1, 64))
        drafted.observe_step(step(0.12, 192, num_draft=256))
    ahead = [Open(100)] * 64
    assert drafted.seconds(ahead) == pytest.approx(plain.seconds(ahead) * 1.2 / 3)


def test_the_latest_pace_counts() -> None:
    backlog = full()
    for _ in range(500):
        backlog.observe_step(step(0.2, 64))
    assert backlog.seconds([Open(24)] * 320) == pytest.approx(24.0, rel=0.01)


def test_requests_that_end_early_make_others_be_expected_to() -> None:
    backlog = full()
    for _ in range(200):
        backlog.observe_end(Open(num_tokens_left=90, num_output_tokens=10))
    for _ in range(200):
        backlog.observe_end(Open(num_tokens_left=100))  # left while it waited
    assert backlog.seconds([Open(1000)] * 64) == pytest.approx(10.0, rel=0.01)
    # One that has already written more is still taken to go on.
    assert 0 < backlog.seconds([Open(500, 500)]) < 0.01
