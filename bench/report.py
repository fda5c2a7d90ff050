"""From runs to figures: pure functions, no clock.

Seconds of a contender are the sum over jobs of the median over rounds; a ratio divides two such
sums over the same jobs, whose token counts are equal by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from bench.contenders import GAMMA_0, TRANSFORMERS, Account, Run
from bench.runner import Cell, Measured

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class StepMs:
    """Milliseconds of a mean decode step of the engine, by its own clock."""

    step: float
    draft: float
    forward: float
    verify: float
    other: float

    @property
    def outside_forward(self) -> float:
        return self.step - self.forward

    @property
    def share_outside_forward(self) -> float:
        return self.outside_forward / self.step if self.step else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One contender's row. Ratios above 1 mean faster than the reference.

    ``ratio``, ``decode_ratio``: against gamma 0, over whole runs and over what follows the first
    tokens; ``ratio_range``: the rounds' lowest and highest. ``vs_transformers``: whole runs.
    ``same_text``: share of outputs equal to gamma 0's. Figures that a contender has not are None.
    """

    name: str
    tokens_per_second: float
    decode_tokens_per_second: float
    ratio: float | None
    ratio_range: tuple[float, float] | None
    decode_ratio: float | None
    vs_transformers: float | None
    tokens_per_step: float
    num_draft_tokens: int | None
    acceptance_rate: float | None
    estimated_speedup: float | None
    same_text: float | None
    step_ms: StepMs | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """How much of gamma 0's greedy text transformers' own forward writes too: share of outputs
    that are equal, and mean share of the tokens before the first difference."""

    equal_outputs: float
    equal_prefix: float


@dataclass(frozen=True, slots=True)
class CellReport:
    cell: Cell
    num_prompts: int
    mean_prompt_tokens: float
    num_new_tokens: int
    num_rounds: int
    contenders: list[Summary]
    transformers_agreement: Agreement | None


def report_cell(measured: Measured) -> CellReport:
    jobs, runs = measured.jobs, measured.runs
    prompts = [prompt for job in jobs for prompt in job.prompts]
    gamma_0, theirs = runs.get(GAMMA_0), runs.get(TRANSFORMERS)
    greedy = measured.cell.sampling.temperature == 0
    return CellReport(
        cell=measured.cell,
        num_prompts=len(prompts),
        mean_prompt_tokens=mean(len(prompt) for prompt in prompts),
        num_new_tokens=jobs[0].num_new_tokens,
        num_rounds=max(len(rounds) for rounds in runs.values()),
        contenders=[summarise(name, own, gamma_0, theirs) for name, own in runs.items()],
        transformers_agreement=agreement(theirs, gamma_0)
        if greedy and theirs and gamma_0
        else None,
    )


def summarise(
    name: str,
    runs: Sequence[Sequence[Run]],
    gamma_0: Sequence[Sequence[Run]] | None,
    theirs: Sequence[Sequence[Run]] | None,
) -> Summary:
    """``runs[round][job]``; the references likewise, over the same jobs."""
    flat = [run for round_ in runs for run in round_]
    account = _total(flat)
    num_tokens = sum(_num_tokens(run) for run in runs[0])
    own_decode_rate = decode_rate(runs)
    return Summary(
        name=name,
        tokens_per_second=num_tokens / run_seconds(runs),
        decode_tokens_per_second=own_decode_rate,
        ratio=None if gamma_0 is None else run_seconds(gamma_0) / run_seconds(runs),
        ratio_range=None if gamma_0 is None else _ratio_range(runs, gamma_0),
        decode_ratio=None if gamma_0 is None else own_decode_rate / decode_rate(gamma_0),
        vs_transformers=None if theirs is None else run_seconds(theirs) / run_seconds(runs),
        tokens_per_step=sum(map(_num_tokens, flat)) / sum(run.num_request_steps for run in flat),
        num_draft_tokens=None if account is None else account.num_draft_tokens,
        acceptance_rate=_acceptance(account),
        estimated_speedup=_estimate(account),
        same_text=None if account is None or gamma_0 is None else same_text(runs, gamma_0),
        step_ms=_step_ms(account),
    )


def same_text(runs: Sequence[Sequence[Run]], reference: Sequence[Sequence[Run]]) -> float:
    """Share of all rounds' outputs that equal the reference's first round: repeats of the reference
    itself are held to it too."""
    expected = [output for run in reference[0] for output in run.output_token_ids]
    equal = [
        output == wanted
        for round_ in runs
        for output, wanted in zip(
            (output for run in round_ for output in run.output_token_ids), expected, strict=True
        )
    ]
    return sum(equal) / len(equal)


def agreement(theirs: Sequence[Sequence[Run]], ours: Sequence[Sequence[Run]]) -> Agreement:
    pairs = [
        pair
        for their_run, our_run in zip(theirs[0], ours[0], strict=True)
        for pair in zip(their_run.output_token_ids, our_run.output_token_ids, strict=True)
    ]
    return Agreement(
        equal_outputs=mean(float(their == our) for their, our in pairs),
        equal_prefix=mean(equal_prefix(their, our) for their, our in pairs),
    )


def to_json(report: CellReport) -> dict[str, Any]:
    data = asdict(report)
    data |= {
        "workload": report.cell.workload,
        "batch_size": report.cell.batch_size,
        "sampling": asdict(report.cell.sampling),
    }
    del data["cell"]
    for summary, row in zip(report.contenders, data["contenders"], strict=True):
        if summary.step_ms is not None:
            row["step_ms"]["outside_forward"] = summary.step_ms.outside_forward
    return data


def _num_tokens(run: Run) -> int:
    return sum(len(output) for output in run.output_token_ids)


def run_seconds(runs: Sequence[Sequence[Run]]) -> float:
    """``runs[round][job]``: the jobs' medians over rounds, added up."""
    return float(sum(median(run.seconds for run in of_job) for of_job in zip(*runs, strict=True)))


def decode_rate(runs: Sequence[Sequence[Run]]) -> float:
    """Tokens per second after the first tokens; 0 where nothing came after them."""
    by_job = list(zip(*runs, strict=True))
    seconds = sum(median(run.decode_seconds for run in of_job) for of_job in by_job)
    tokens = sum(median(run.num_decode_tokens for run in of_job) for of_job in by_job)
    return tokens / seconds if tokens and seconds else 0.0


def _ratio_range(
    runs: Sequence[Sequence[Run]], reference: Sequence[Sequence[Run]]
) -> tuple[float, float]:
    ratios = [
        sum(run.seconds for run in theirs) / sum(run.seconds for run in own)
        for own, theirs in zip(runs, reference, strict=True)
    ]
    return min(ratios), max(ratios)


def _total(runs: Sequence[Run]) -> Account | None:
    accounts = [run.account for run in runs if run.account is not None]
    if len(accounts) < len(runs):
        return None
    rows = [asdict(account) for account in accounts]
    return Account(**{key: sum(row[key] for row in rows) for key in rows[0]})


def _acceptance(account: Account | None) -> float | None:
    if account is None or not account.num_draft_tokens:
        return None
    return account.num_accepted_tokens / account.num_draft_tokens


def _estimate(account: Account | None) -> float | None:
    """Returns the gain that the engine's cost model estimates, to be held against the ratio."""
    if account is None or not account.step_seconds:
        return None
    return account.baseline_seconds / account.step_seconds


def _step_ms(account: Account | None) -> StepMs | None:
    if account is None or not account.num_decode_steps:
        return None
    per_step = 1000.0 / account.num_decode_steps
    return StepMs(
        step=account.decode_step_seconds * per_step,
        draft=account.draft_seconds * per_step,
        forward=account.forward_seconds * per_step,
        verify=account.verify_seconds * per_step,
        other=account.other_seconds * per_step,
    )


def equal_prefix(left: Sequence[int], right: Sequence[int]) -> float:
    """Share of the tokens before the first difference."""
    equal = 0
    for one, other in zip(left, right, strict=True):
        if one != other:
            break
        equal += 1
    return equal / len(left)
