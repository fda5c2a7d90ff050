"""From runs to figures, tables and a picture: pure functions, no clock.

Whole runs and decoding are summed up as the bench does: medians over rounds, per job. A run's
prompt part ends when every request has its first tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol, TypeVar

from bench.contenders import Job, Run
from bench.peers.place import Arm
from bench.report import decode_rate, equal_prefix, run_seconds, same_text
from bench.runner import Cell, Measured
from slipstream.client.markdown import markdown_table

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm in one cell. Ratios above 1 are faster than the reference, None without one.

    ``round_ratios``: the rounds' lowest and highest ``ratio``. ``prompt_tokens_per_second`` and
    ``first_token_seconds`` (all requests have begun) are of the prompt part. ``joules_per_token``: where
    the machine tells it. ``equal_prefix``: greedy only, mean share of the tokens before the first that
    is not the reference's. ``same_as_plain``: the share of texts that are those of the same arm without
    drafts.
    """

    name: str
    speculates: bool
    over_http: bool
    tokens_per_second: float
    prompt_tokens_per_second: float
    first_token_seconds: float
    decode_tokens_per_second: float
    joules_per_token: float | None
    ratio: float | None
    round_ratios: tuple[float, float] | None
    prompt_ratio: float | None
    decode_ratio: float | None
    equal_prefix: float | None
    same_as_plain: float | None


@dataclass(frozen=True, slots=True)
class CellFigures:
    """``failed``: why arms have no figures here."""

    cell: Cell
    num_prompts: int
    mean_prompt_tokens: float
    num_new_tokens: int
    num_rounds: int
    arms: list[Figures]
    failed: Mapping[str, str]


def cell_figures(measured: Measured, arms: Mapping[str, Arm], reference: str) -> CellFigures:
    """``reference`` is the arm that ratios are against; they are None where it has no runs."""
    runs, jobs = measured.runs, measured.jobs
    asked = {name: _asked(jobs, own[0]) for name, own in runs.items()}
    prompts = asked.get(reference) or next(iter(asked.values()), _asked(jobs, ()))
    greedy = measured.cell.sampling.temperature == 0
    return CellFigures(
        cell=measured.cell,
        num_prompts=sum(map(len, prompts)),
        mean_prompt_tokens=mean(len(prompt) for together in prompts for prompt in together),
        num_new_tokens=jobs[0].num_new_tokens,
        num_rounds=max((len(rounds) for rounds in runs.values()), default=0),
        arms=[
            _figures(
                arms[name],
                own,
                runs.get(reference),
                _plain_runs(arms[name], arms, runs),
                asked[name],
                greedy,
            )
            for name, own in runs.items()
        ],
        failed=measured.failed,
    )


def _asked(jobs: Sequence[Job], runs: Sequence[Run]) -> list[Sequence[tuple[int, ...]]]:
    """Returns the prompts that were sent together, turn after turn: second turns follow an arm's own
    answers."""
    asked = [job.prompts for job in jobs]
    for job, run in zip(jobs, runs, strict=False):
        second = job.second_turn(run.output_token_ids[: len(job.prompts)])
        if second is not None:
            asked.append(second.prompts)
    return asked


def _figures(
    arm: Arm,
    runs: Sequence[Sequence[Run]],
    reference: Sequence[Sequence[Run]] | None,
    plain: Sequence[Sequence[Run]] | None,
    asked: Sequence[Sequence[tuple[int, ...]]],
    greedy: bool,
) -> Figures:
    first = _prompt_seconds(runs)
    rate, decoding = _num_tokens(runs[0]) / run_seconds(runs), decode_rate(runs)
    shared: dict[str, Any] = {
        "name": arm.name,
        "speculates": arm.speculates,
        "over_http": arm.over_http,
        "tokens_per_second": rate,
        "prompt_tokens_per_second": sum(len(each) for prompts in asked for each in prompts) / first,
        "first_token_seconds": first / len(asked),
        "decode_tokens_per_second": decoding,
        "joules_per_token": _joules(runs),
        "same_as_plain": None if plain is None else same_text(runs[:1], plain),
    }
    if reference is None:
        nothing: dict[str, Any] = dict.fromkeys(
            ("ratio", "round_ratios", "prompt_ratio", "decode_ratio", "equal_prefix")
        )
        return Figures(**shared, **nothing)
    their_decoding = decode_rate(reference)
    by_round = [
        sum(run.seconds for run in theirs) / sum(run.seconds for run in own)
        for own, theirs in zip(runs, reference, strict=True)
    ]
    return Figures(
        **shared,
        ratio=run_seconds(reference) / run_seconds(runs),
        round_ratios=(min(by_round), max(by_round)),
        prompt_ratio=_prompt_seconds(reference) / first,
        decode_ratio=decoding / their_decoding if their_decoding else None,
        equal_prefix=_mean_equal_prefix(runs[0], reference[0]) if greedy else None,
    )


def _plain_runs(
    arm: Arm, arms: Mapping[str, Arm], runs: Mapping[str, Sequence[Sequence[Run]]]
) -> Sequence[Sequence[Run]] | None:
    plain = plain_of(arm, [arms[name] for name in runs])
    return None if plain is None else runs[plain.name]


def _joules(runs: Sequence[Sequence[Run]]) -> float | None:
    """Per token, of all processors, idle or not."""
    told = [(run.joules, _num_tokens([run])) for each in runs for run in each if run.joules]
    return sum(joules for joules, _ in told) / sum(count for _, count in told) if told else None


def _num_tokens(runs: Sequence[Run]) -> int:
    return sum(len(output) for run in runs for output in run.output_token_ids)


def _prompt_seconds(runs: Sequence[Sequence[Run]]) -> float:
    by_job = zip(*runs, strict=True)
    return float(sum(median(run.seconds - run.decode_seconds for run in job) for job in by_job))


def _mean_equal_prefix(runs: Sequence[Run], reference: Sequence[Run]) -> float:
    return mean(
        equal_prefix(own, theirs)
        for run, their_run in zip(runs, reference, strict=True)
        for own, theirs in zip(run.output_token_ids, their_run.output_token_ids, strict=True)
    )


_HEADER = (
    "arm",
    "tok/s",
    "ratio",
    "(rounds)",
    "prompt tok/s",
    "ratio",
    "first token s",
    "decode tok/s",
    "ratio",
    "J/token",
    "same as reference",
)


def cell_markdown(figures: CellFigures, reference: str) -> str:
    cell = figures.cell
    ranked = sorted(figures.arms, key=lambda arm: -arm.tokens_per_second)
    lines = [
        f"### {cell.workload}, {cell.batch_size} at once, {cell.sampling.name}",
        "",
        f"{figures.num_prompts} prompts of {figures.mean_prompt_tokens:.0f} tokens on average, "
        f"{figures.num_new_tokens} new tokens each, medians of {figures.num_rounds} rounds; ratios are "
        f"against {reference}.",
        "",
        markdown_table([_HEADER, *map(_row, ranked)], 1),
    ]
    if figures.failed:
        lines += ["", *(f"- {name}: {reason}" for name, reason in figures.failed.items())]
    return "\n".join(lines) + "\n"


def _row(arm: Figures) -> list[str]:
    rounds, equal = arm.round_ratios, arm.equal_prefix
    return [
        arm.name,
        f"{arm.tokens_per_second:.1f}",
        _ratio(arm.ratio),
        "-" if rounds is None else f"{rounds[0]:.2f}-{rounds[1]:.2f}",
        f"{arm.prompt_tokens_per_second:.0f}",
        _ratio(arm.prompt_ratio),
        f"{arm.first_token_seconds:.2f}",
        f"{arm.decode_tokens_per_second:.1f}",
        _ratio(arm.decode_ratio),
        "-" if arm.joules_per_token is None else f"{arm.joules_per_token:.2f}",
        "-" if equal is None else f"{equal:.0%}",
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _columns(cells: Sequence[CellFigures]) -> list[str]:
    return [
        f"{each.cell.workload} {each.cell.batch_size} {each.cell.sampling.name}" for each in cells
    ]


def gains_markdown(cells: Sequence[CellFigures]) -> str:
    """Tabulates each arm's gain over its own plain one: whole runs, and decoding in brackets."""
    names = dict.fromkeys(arm.name for each in cells for arm in each.arms if arm.speculates)
    rows = [[name, *(_gain(name, figures.arms) for figures in cells)] for name in names]
    header = ["times the arm's own plain (decoding)", *_columns(cells)]
    return markdown_table([header, *rows], 1) + "\n" if rows else ""


def _gain(name: str, arms: Sequence[Figures]) -> str:
    own = next((arm for arm in arms if arm.name == name), None)
    plain = None if own is None else plain_of(own, arms)
    if own is None or plain is None or not plain.decode_tokens_per_second:
        return "-"
    whole = own.tokens_per_second / plain.tokens_per_second
    decoding = own.decode_tokens_per_second / plain.decode_tokens_per_second
    return f"{whole:.2f}x ({decoding:.2f}x)"


class Named(Protocol):
    """Whatever stands for an arm."""

    @property
    def name(self) -> str: ...
    @property
    def speculates(self) -> bool: ...
    @property
    def over_http(self) -> bool: ...


_Named = TypeVar("_Named", bound=Named)


def plain_of(own: _Named, arms: Sequence[_Named]) -> _Named | None:
    """The arm that is called alike but for how it drafts."""
    for arm in arms:
        before, _, after = arm.name.partition(" plain")
        is_alike = own.name.startswith(f"{before} ") and own.name.endswith(after)
        if not arm.speculates and arm.over_http == own.over_http and is_alike:
            return arm
    return None


def best_markdown(cells: Sequence[CellFigures], groups: Mapping[str, str]) -> str:
    """Tabulates every peer's best plain and best speculating arm, in-process and over HTTP.
    ``groups``: the peer of every arm."""
    columns = _columns(cells)
    kinds = sorted(
        {
            (groups[arm.name], arm.speculates, arm.over_http)
            for figures in cells
            for arm in figures.arms
        }
    )
    rows = []
    for peer, speculates, over_http in kinds:
        row = [f"{peer}, {'drafting' if speculates else 'plain'}{', HTTP' if over_http else ''}"]
        for figures in cells:
            found = [
                arm.tokens_per_second
                for arm in figures.arms
                if (groups[arm.name], arm.speculates, arm.over_http)
                == (peer, speculates, over_http)
            ]
            row.append(f"{max(found):.1f}" if found else "-")
        rows.append(row)
    return markdown_table([["tokens per second, the best arm", *columns], *rows], 1) + "\n"


def to_json(figures: CellFigures) -> dict[str, Any]:
    data = asdict(figures)
    cell = data.pop("cell")
    return {**cell, **data}


def check_picture() -> None:
    """Raises ImportError where nothing can be drawn: before an hour of runs, not after."""
    import_module("matplotlib.figure")


def draw(cells: Sequence[CellFigures], path: Path) -> None:
    """Tokens per second of whole runs over how many run at once; a panel per workload and sampling."""
    panels: dict[tuple[str, str], list[CellFigures]] = {}
    for figures in sorted(cells, key=lambda each: each.cell.batch_size):
        key = (figures.cell.workload, figures.cell.sampling.name)
        panels.setdefault(key, []).append(figures)
    figure = import_module("matplotlib.figure").Figure(
        figsize=(8 * len(panels), 7), layout="constrained"
    )
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    names = dict.fromkeys(arm.name for each in cells for arm in each.arms)
    colours = {name: f"C{at % 10}" for at, name in enumerate(names)}
    for axes, ((workload, sampling), group) in zip(all_axes, panels.items(), strict=True):
        for name in names:
            points = [
                (each.cell.batch_size, arm.tokens_per_second, arm.speculates)
                for each in group
                for arm in each.arms
                if arm.name == name
            ]
            if points:
                at_once, speeds, speculates = zip(*points, strict=True)
                style = "--" if speculates[0] else "-"
                axes.plot(at_once, speeds, style, marker="o", color=colours[name], label=name)
        axes.set_title(f"{workload}, {sampling}")
        axes.set_xlabel("requests at once")
        axes.set_ylabel("tokens per second, prompts included")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
    all_axes[-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)
