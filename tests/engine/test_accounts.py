"""Accounts of steps whose forward took another time than the batch's own rows do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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


def steps(took: Callable[[int], int | None]) -> tuple[NotedCost, list[StepStats]]:
    """Returns the steps of a request whose drafts are always of three tokens. ``took``: the rows whose
    time a forward's is, by the batch's."""
    cost = NotedCost()
    core = TARGET.core(Setup(cost=cost))
    forward = core.runner.forward

    def timed(batch: InputBatch) -> ForwardOutput:
        return forward(batch)._replace(num_rows=took(batch.num_rows))

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


@pytest.mark.parametrize("padding", [0, 2])
def test_the_rows_that_a_step_took_are_learnt_with_their_padding(padding: int) -> None:
    cost, found = steps(lambda num_rows: num_rows + padding)
    assert cost.taught == [each.num_rows + padding for each in found]
    assert len({*cost.taught}) > 1


def test_a_forward_of_which_nothing_is_said_took_the_batchs_rows() -> None:
    cost, found = steps(lambda _: None)
    assert cost.taught == [each.num_rows for each in found]


def test_a_step_that_took_longer_than_the_next_will_is_neither_learnt_nor_a_gain() -> None:
    """Drafts whose rows were not recorded yet cost their request that time: without them nothing would
    have been recorded."""
    for rows, is_longer in ((0, True), (None, False)):
        cost, found = steps(lambda _, rows=rows: rows)  # type: ignore[misc]
        drafted = [each for each in found[1:] if each.num_rows > 1]
        assert drafted
        for each in drafted:
            assert (each.baseline_seconds < 1e-6) == is_longer
        assert bool(cost.taught) != is_longer
