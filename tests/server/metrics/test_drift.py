"""Acceptance of late against the past: what moves it, how fast, and what does not."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.request.stats import SpeculativeStats, StepStats
from server.metrics.drift import AcceptanceDrift
from server.metrics.prometheus import Metrics
from worlds.scripted_engine import engine_info

GAMMA = 4


def step(num_right: int, num_drafts: int = 10, gamma: int = GAMMA) -> SpeculativeStats:
    """Returns the figures of so many drafts, of those whose first token was accepted, and of a step
    without a draft."""
    return SpeculativeStats(
        gammas=Counter({gamma: num_drafts, 0: 1}),
        accepted=Counter({2: num_right, 0: num_drafts - num_right + 1}),
    )


def after(*parts: tuple[int, int], seconds: float = 0.01) -> AcceptanceDrift:
    """``parts``: of steps with 40 draft tokens each, how many and how many drafts were right."""
    drift = AcceptanceDrift()
    for num_steps, num_right in parts:
        for _ in range(num_steps):
            drift.observe(step(num_right), seconds)
    return drift


def test_a_drafter_that_stays_as_it_was_is_as_good_as_its_past_from_the_first_step() -> None:
    for num_steps in (1, 50, 5000):
        drift = after((num_steps, 6))
        assert drift.recent.rate() == pytest.approx(0.6)
        assert drift.past.rate() == pytest.approx(0.6)


def test_what_changes_is_recent_soon_and_past_late() -> None:
    drift = after((5000, 8), (150, 2))  # 6,000 draft tokens: three lifetimes of what is recent
    assert drift.recent.rate() == pytest.approx(0.2 + 0.6 * 0.05, abs=0.005)
    assert drift.past.rate() == pytest.approx(0.8, abs=0.02)
    assert drift.recent.rate() < 0.7 * drift.past.rate()


def test_a_busy_server_does_not_forget_its_past_in_minutes() -> None:
    """200,000 draft tokens in a quarter of an hour: both must still differ at its end."""
    drift = after((5000, 8), (5000, 2), seconds=900 / 5000)
    assert drift.recent.rate() == pytest.approx(0.2, abs=0.001)
    assert drift.past.rate() == pytest.approx(0.5, abs=0.01)


def test_an_idle_servers_past_is_bounded_by_draft_tokens() -> None:
    slow = after((5000, 8), (10_000, 2), seconds=60.0)  # two lifetimes of 200,000 draft tokens
    assert slow.past.rate() == pytest.approx(0.25, abs=0.03)


def test_how_deep_drafts_are_changes_nothing() -> None:
    drift = after((500, 6))
    for _ in range(500):
        drift.observe(step(6, gamma=16), 0.01)
    assert drift.recent.rate() == pytest.approx(0.6)


def exported(metrics: Metrics, name: str) -> dict[str, float]:
    (family,) = (each for each in metrics.registry.collect() if each.name == name)
    return {sample.labels["drafter"]: sample.value for sample in family.samples}


def test_each_drafter_is_compared_with_itself() -> None:
    metrics = Metrics(engine_info(), "m", lambda: True)
    recent, past = (f"slipstream_drafter_acceptance_{name}" for name in ("recent", "past"))
    metrics.observe_step(StepStats(by_drafter={"none": step(0, 0)}))
    assert exported(metrics, recent) == exported(metrics, past) == {}
    for num_right in (8, 2):
        for _ in range(1000):
            both = {"left": step(num_right), "right": step(5)}
            metrics.observe_step(StepStats(by_drafter=both, step_seconds=0.1))
    assert exported(metrics, recent) == pytest.approx({"left": 0.2, "right": 0.5}, abs=0.001)
    assert exported(metrics, past) == pytest.approx({"left": 0.5, "right": 0.5}, abs=0.02)
    # A step without drafts says nothing, and makes nothing older.
    metrics.observe_step(StepStats(by_drafter={"left": step(0, 0)}, step_seconds=1e6))
    assert exported(metrics, past)["left"] == pytest.approx(0.5, abs=0.02)
