"""Steps told now and then: nothing is lost, unlike ones are not mixed, and no ended request waits."""

from __future__ import annotations

from engine.process.tally import TELL_SECONDS, StepTally
from engine.request.stats import SpeculativeStats, StepStats


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def decoding(num_requests: int = 1, gamma: int = 2, drafter: str = "ngram") -> StepStats:
    account = SpeculativeStats()
    account.record(gamma, 1, 2, step_seconds=0.5, baseline_seconds=0.75)
    return StepStats(
        num_rows=3,
        by_drafter={drafter: account},
        step_seconds=0.5,
        baseline_seconds=0.75,
        num_running=num_requests,
        blocks={"free": gamma},
    )


def prompt() -> StepStats:
    return StepStats(num_rows=8, num_prompt_tokens=8, step_seconds=0.25, num_running=1)


def told(tally: StepTally, step: StepStats, some_end: bool = False) -> list[StepStats]:
    return tally.add(step, some_end=some_end)


def test_steps_of_the_same_requests_are_told_as_one_when_it_is_time() -> None:
    clock = Clock()
    tally = StepTally(clock)
    assert told(tally, decoding()) == [decoding()]  # a request has come
    for gamma in (2, 3, 0):
        assert told(tally, decoding(gamma=gamma)) == []
    clock.seconds += TELL_SECONDS
    (found,) = told(tally, decoding(gamma=4, drafter="suffix"))
    assert found.num_steps == 4
    assert found.num_rows == 12
    assert (found.step_seconds, found.baseline_seconds) == (2.0, 3.0)
    assert found.num_emitted_tokens == 8
    assert dict(found.by_drafter["ngram"].gammas) == {2: 1, 3: 1, 0: 1}
    assert found.by_drafter["ngram"].accepted[1] == 3
    assert found.by_drafter["suffix"].num_draft_tokens == 4
    # Gauges are the last step's.
    assert found.blocks == {"free": 4}
    assert told(tally, decoding()) == []


def test_steps_are_told_as_soon_as_requests_come_and_go() -> None:
    tally = StepTally(Clock())
    assert told(tally, decoding()) != []
    assert told(tally, decoding()) == []
    (found,) = told(tally, decoding(num_requests=2))
    assert (found.num_steps, found.num_running) == (2, 2)
    assert told(tally, decoding(num_requests=2)) == []
    (found,) = told(tally, decoding(num_requests=2), some_end=True)
    assert found.num_steps == 2


def test_steps_of_two_kinds_are_not_mixed() -> None:
    """The time of steps without a baseline is no part of what a speed-up is taken of."""
    tally = StepTally(Clock())
    told(tally, prompt())
    assert told(tally, prompt()) == []
    (first,) = told(tally, decoding())
    assert (first.num_steps, first.num_prompt_tokens, first.step_seconds) == (1, 8, 0.25)
    # A last look at the gauges is no step, and is not added to one.
    idle = StepStats(blocks={"free": 9})
    assert told(tally, idle, some_end=True) == [decoding(), idle]


def test_a_devices_memory_is_kept_until_it_is_told() -> None:
    tally = StepTally(Clock())
    told(tally, decoding())
    step = decoding()
    step.device_memory = {"used": 5.0}
    told(tally, step)
    (found,) = told(tally, decoding(), some_end=True)
    assert found.device_memory == {"used": 5.0}
