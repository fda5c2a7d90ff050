"""Accounts of steps whose forward took another time than the batch's own rows do."""

from __future__ import annotations

from typing import Any

from engine.batch import ForwardOutput, InputBatch
from engine.request.params import SamplingParams
from engine.request.stats import StepStats
from worlds.engine_harness import DictatedCost, Setup, circle_prompt, drafting, request
from worlds.scripted_target import ScriptedTarget

TARGET = ScriptedTarget(64)


class NotedCost(DictatedCost):
    """Keeps the numbers of rows that it was taught. Steps are said to take next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.taught: list[int] = []

    def observe(self, num_rows: int, *more: Any) -> None:
        super().observe(num_rows, *more)
        self.taught.append(num_rows)

    def step_seconds(self, *sizes: Any) -> float:
        return 1e-9 * super().step_seconds(*sizes)


def steps(took_longer: bool) -> tuple[NotedCost, list[StepStats]]:
    """Returns the steps of a request whose drafts are always of three tokens."""
    cost = NotedCost()
    core = TARGET.core(Setup(cost=cost))
    forward = core.runner.forward

    def timed(batch: InputBatch) -> ForwardOutput:
        return forward(batch)._replace(took_longer=took_longer)

    core.runner.forward = timed  # type: ignore[method-assign]
    wanted = drafting("nasd", num_tokens=3)
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    core.submit(core.prepare(request("a", circle_prompt(1), sampling, wanted)))
    found = []
    while core.has_work:
        stats = core.step().stats
        assert stats is not None
        found.append(stats)
    return cost, found


def test_the_rows_that_a_step_took_are_learnt() -> None:
    cost, found = steps(took_longer=False)
    assert cost.taught == [each.num_rows for each in found]
    assert len({*cost.taught}) > 1


def test_a_step_that_took_longer_than_the_next_will_is_neither_learnt_nor_a_gain() -> None:
    """Drafts whose rows were not recorded yet cost their request that time: without them nothing would
    have been recorded."""
    for is_longer in (True, False):
        cost, found = steps(is_longer)
        drafted = [each for each in found[1:] if each.num_rows > 1]
        assert drafted
        for each in drafted:
            assert (each.baseline_seconds < 1e-6) == is_longer
        assert bool(cost.taught) != is_longer
