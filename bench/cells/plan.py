"""Plans cells and estimates how long they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean

from bench.cells.contenders import default_drafter
from bench.cells.options import SAMPLINGS, Options
from bench.cells.records import CellKey, Results
from bench.contenders import Contender, Job
from bench.runner import Cell, make_jobs
from bench.workloads import Prompt, PromptSource, load_prompts

_STEADY_BATCHES = 2
"""Batches of prompts: those that begin together, and those that follow them."""
_FEW_TOKENS, _MORE_TOKENS = 2, 18


@dataclass(frozen=True, slots=True)
class CellPlan:
    key: CellKey
    cell: Cell
    jobs: tuple[Job, ...]

    @property
    def mean_prompt_tokens(self) -> float:
        return mean(len(prompt) for job in self.jobs for prompt in job.prompts)


def make_plans(
    options: Options, source: PromptSource, contenders: Sequence[Contender]
) -> list[CellPlan]:
    """All cells, with the same prompts for all contenders and as few new ones as possible from cell to
    cell."""
    names = tuple(each.name for each in contenders)
    plans: list[CellPlan] = []
    for load, workload, size in product(options.loads, options.workloads, options.at_once):
        fewest = _STEADY_BATCHES * size if load == "steady" else size
        count = max(options.least_prompts(workload), fewest)
        prompts = load_prompts(workload, source, count, size)
        cells = (Cell(workload, size, SAMPLINGS[sampling]) for sampling in options.samplings)
        plans += [_make_plan(options, prompts, names, cell, load) for cell in cells]
    return plans


def _make_plan(
    options: Options, prompts: Sequence[Prompt], names: tuple[str, ...], cell: Cell, load: str
) -> CellPlan:
    steady = load == "steady"
    key = CellKey(
        model=options.model,
        weights=options.weights,
        steady=steady,
        workload=options.called(cell.workload),
        sampling=cell.sampling.name,
        at_once=cell.batch_size,
        num_prompts=len(prompts),
        num_new_tokens=options.num_new_tokens,
        default=default_drafter(),
        contenders=names,
    )
    return CellPlan(key, cell, make_jobs(cell, prompts, options.num_new_tokens, steady=steady))


@dataclass(frozen=True, slots=True)
class Pace:
    """Plain decoding's pace here. ``step_seconds``: of a step, by how many requests run."""

    prompt_token_seconds: float
    step_seconds: Mapping[int, float]

    def round_seconds(self, plan: CellPlan) -> float:
        """One round of a cell as if nobody gained anything, which is about the longest."""
        per_contender = sum(
            (2 if any(job.follow_ups) else 1)
            * (
                self.prompt_token_seconds * sum(map(len, job.prompts))
                + self.step_seconds[plan.key.at_once] * job.num_tokens / plan.key.at_once
            )
            for job in plan.jobs
        )
        return per_contender * len(plan.key.contenders)


def measure_pace(plans: Sequence[CellPlan], plain: Contender) -> Pace:
    """A few short runs for each number of requests at once, on their shortest prompts; of equal ones the
    faster, which was disturbed less."""
    steps: dict[int, float] = {}
    prompt_seconds, num_prompt_tokens = 0.0, 0
    for at_once in {plan.key.at_once for plan in plans}:
        jobs = [plan.jobs[0] for plan in plans if plan.key.at_once == at_once]
        job = _batch(min(jobs, key=lambda each: sum(map(len, each.prompts))), at_once)
        plain.run(replace(job, num_new_tokens=1))
        few, more = (
            min(plain.run(replace(job, num_new_tokens=count)).seconds for _ in range(2))
            for count in (_FEW_TOKENS, _MORE_TOKENS)
        )
        steps[at_once] = max(0.0, more - few) / (_MORE_TOKENS - _FEW_TOKENS)
        prompt_seconds += max(0.0, few - _FEW_TOKENS * steps[at_once])
        num_prompt_tokens += sum(map(len, job.prompts))
    return Pace(prompt_seconds / num_prompt_tokens, steps)


def _batch(job: Job, size: int) -> Job:
    return replace(
        job,
        prompts=job.prompts[:size],
        expected=job.expected[:size],
        laps=job.laps[:size],
        num_running=None,
    )


def missing_rounds(plan: CellPlan, results: Results, num_rounds: int) -> list[int]:
    return [number for number in range(num_rounds) if not results.has(plan.key, number)]
