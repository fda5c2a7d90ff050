"""Runs contenders in turn over the same jobs, so that a slow spell of the machine hits all alike: those
that can be stepped change every so many milliseconds, the others after each job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bench.contenders import (
    Contender,
    ContenderFailedError,
    Job,
    Run,
    Sampling,
    SteppedContender,
    Steps,
    whole,
)
from bench.workloads import Prompt
from slipstream.client.energy import EnergyMeter

_FIRST_SEED = 1000
_WARM_UP_TOKENS = 4
_TURN_SECONDS = 0.05
"""Seconds that one is stepped before another is: caches are cold after a change."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of comparison: a workload at a batch size under a sampling."""

    workload: str
    batch_size: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Measured:
    """``runs[contender][round][job]``: every contender did every job once per round. ``failed``: why
    others did not, by name."""

    cell: Cell
    jobs: tuple[Job, ...]
    runs: dict[str, list[list[Run]]]
    failed: dict[str, str] = field(default_factory=dict)


def make_jobs(
    cell: Cell, prompts: Sequence[Prompt], num_new_tokens: int, *, steady: bool = False
) -> tuple[Job, ...]:
    """Full batches of the prompts in order; the seed of a request is that of its prompt. ``steady``:
    one job of all prompts, a batch of them at a time."""
    size = len(prompts) if steady else cell.batch_size
    starts = range(0, len(prompts) - size + 1, size)
    return tuple(
        Job(
            prompts=tuple(prompt.token_ids for prompt in prompts[at : at + size]),
            num_new_tokens=num_new_tokens,
            sampling=cell.sampling,
            seed=_FIRST_SEED + at,
            expected=tuple(prompt.expected for prompt in prompts[at : at + size]),
            num_running=cell.batch_size,
            laps=tuple(prompt.lap for prompt in prompts[at : at + size]),
            follow_ups=tuple(prompt.follow_up for prompt in prompts[at : at + size]),
        )
        for at in starts
    )


def contenders_for(cell: Cell, contenders: Sequence[Contender]) -> list[Contender]:
    return [
        each
        for each in contenders
        if each.max_batch_size is None or cell.batch_size <= each.max_batch_size
    ]


class Round(NamedTuple):
    """``runs[contender][job]``, of those that did all jobs. ``failed``: why others did not, by name."""

    number: int
    runs: dict[str, list[Run]]
    failed: Mapping[str, str]


def measure_rounds(
    cell: Cell,
    jobs: tuple[Job, ...],
    contenders: Sequence[Contender],
    rounds: Iterable[int],
    tick: Callable[[str], None],
) -> Iterator[Round]:
    """One untimed short run each, then the rounds of these numbers as they come; who goes first changes
    with the number and the job. Who fails once takes no further part."""
    taking_part = contenders_for(cell, contenders)
    failed: dict[str, str] = {}

    def run(contenders: Sequence[Contender], job: Job) -> dict[str, Run]:
        able = [each for each in contenders if each.name not in failed]
        try:
            return _run_together(able, job)
        except ContenderFailedError as error:
            failed[able[0].name] = str(error)
            return {}

    for together in _turns(taking_part):
        run(together, _shortened(jobs[0]))
    for number in rounds:
        runs: dict[str, list[Run]] = {each.name: [] for each in taking_part}
        for index, job in enumerate(jobs):
            first = (number + index) % len(taking_part)
            for together in _turns((*taking_part[first:], *taking_part[:first])):
                for each in together:
                    tick(each.name)
                for name, done in run(together, job).items():
                    runs[name].append(done)
        whole_ones = {name: each for name, each in runs.items() if name not in failed}
        yield Round(number, whole_ones, dict(failed))


def _turns(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Returns who runs together, in order: those that can be stepped, and each of the others alone."""
    stepped: list[Contender] = [each for each in contenders if isinstance(each, SteppedContender)]
    others = [[each] for each in contenders if each not in stepped]
    return [stepped, *others] if stepped else others


def _run_together(contenders: Sequence[Contender], job: Job) -> dict[str, Run]:
    """Returns their runs by name. Of several, the one that has taken least time is stepped next. Raises
    ContenderFailedError, as only one that runs alone does."""
    if len(contenders) == 1:
        meter = EnergyMeter()
        run = whole(_all_turns(contenders[0], job))
        return {contenders[0].name: replace(run, joules=meter.read())}
    left = {each.name: _all_turns(each, job) for each in contenders}
    seconds, done = dict.fromkeys(left, 0.0), dict[str, Run]()
    while left:
        name = min(left, key=seconds.__getitem__)
        end = seconds[name] + _TURN_SECONDS
        try:
            while seconds[name] < end:
                seconds[name] += next(left[name])
        except StopIteration as stop:
            done[name] = stop.value
            del left[name]
    return done


def _all_turns(contender: Contender, job: Job) -> Steps:
    """Each contender's second turns follow its own answers."""
    run = yield from _steps_of(contender, job)
    second = job.second_turn(run.output_token_ids)
    return run if second is None else run.then((yield from _steps_of(contender, second)))


def _steps_of(contender: Contender, job: Job) -> Steps:
    if isinstance(contender, SteppedContender):
        return (yield from contender.steps(job))
    return contender.run(job)


def measure_cell(
    cell: Cell,
    jobs: tuple[Job, ...],
    contenders: Sequence[Contender],
    num_rounds: int,
    tick: Callable[[str], None],
) -> Measured:
    """``num_rounds`` rounds. What somebody did who failed later counts for nothing."""
    rounds = list(measure_rounds(cell, jobs, contenders, range(num_rounds), tick))
    last = rounds[-1]
    done = {name: [each.runs[name] for each in rounds] for name in last.runs}
    return Measured(cell, jobs, done, dict(last.failed))


def _shortened(job: Job) -> Job:
    return replace(job, num_new_tokens=min(_WARM_UP_TOKENS, job.num_new_tokens))
