"""Requests past their deadline end, wherever they are, and hold nothing."""

from __future__ import annotations

from dataclasses import replace

from engine.request.errors import DeadlineExceededError
from engine.request.params import SamplingParams
from worlds.engine_harness import ErrorDriver, Setup, drafting, request, traces_of
from worlds.scripted_target import ScriptedTarget

TARGET = ScriptedTarget(8)
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5]


def told(error: Exception) -> int:
    assert isinstance(error, DeadlineExceededError)
    return error.num_output_tokens


class World:
    def __init__(self, max_num_seqs: int) -> None:
        self.now = 100.0
        setup = Setup(max_num_seqs=max_num_seqs, check_integrity=True, clock=lambda: self.now)
        self.core = TARGET.core(setup)
        self.driver = ErrorDriver(self.core)

    @property
    def num_written(self) -> dict[str, int]:
        """Tokens of requests that ended at their deadline."""
        return {name: told(error) for name, error in self.driver.errors.items()}

    def submit(self, name: str, deadline: float | None, num_tokens: int = 40) -> None:
        made = request(
            name, PROMPT, SamplingParams(max_tokens=num_tokens), drafting("ngram", num_tokens=4)
        )
        self.driver.submit(replace(made, deadline=deadline))


def test_a_running_request_ends_at_its_deadline_and_its_blocks_are_free() -> None:
    world = World(max_num_seqs=2)
    world.submit("late", deadline=110.0)
    world.submit("other", deadline=None)
    for _ in range(3):
        world.driver.step()
    written = len(world.driver.token_ids["late"])
    assert written
    world.now = 109.9
    world.driver.step()
    assert not world.num_written
    written = len(world.driver.token_ids["late"])
    world.now = 110.0
    world.driver.step()
    assert world.num_written == {"late": written}
    assert traces_of(world.core, ["late"]) == []
    world.driver.run()
    assert len(world.driver.token_ids["other"]) == 40
    assert world.core.pool.counts()["committed"] == 0


def test_a_waiting_request_past_its_deadline_is_never_scheduled() -> None:
    world = World(max_num_seqs=1)
    world.submit("first", deadline=None)
    world.submit("late", deadline=105.0)
    world.submit("patient", deadline=500.0)
    world.submit("too late", deadline=99.0)
    world.driver.step()
    world.now = 106.0
    world.driver.run()
    assert world.num_written == {"late": 0, "too late": 0}
    assert "late" not in world.driver.first_step
    assert set(world.driver.finishes) == {"first", "patient"}


def test_who_is_done_in_time_hears_nothing_of_it() -> None:
    world = World(max_num_seqs=1)
    world.submit("quick", deadline=101.0)
    world.driver.run()
    world.now = 200.0
    world.driver.run(request("next", PROMPT))
    assert world.num_written == {}
    assert set(world.driver.finishes) == {"quick", "next"}
