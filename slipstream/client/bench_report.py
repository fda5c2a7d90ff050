"""The results of a bench: as a table, as JSON, as a picture."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.client.errors import FlagError
from slipstream.client.markdown import markdown_table
from slipstream.client.stream import Reply

SCHEMA_VERSION = 1
PERCENTILES = (50, 90, 99)
UNSTEADY = (
    "the rounds differ much: something else kept the server's machine busy, or it was still measuring "
    "its steps; repeat it, or raise --rounds"
)
_STEADY_RATIO = 1.5
_HEADER = (
    "drafter",
    "tokens/s",
    "speed-up",
    "by round",
    "tokens/step",
    "gamma",
    "accepted",
    "J/token",
    "equal texts",
)
_LATENCY_HEADER = ("drafter", "latency, ms", *(f"p{percent}" for percent in PERCENTILES))


@dataclass(slots=True)
class Arm:
    """A drafter and what it has done: per round the replies, in the order of the prompts, and the
    seconds from the first request to the last token; ``joules``: what the server's processors used,
    None where they do not tell. ``speculative`` is None where the server is to be left as it is."""

    name: str
    speculative: dict[str, Any] | None
    rounds: list[list[Reply]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    joules: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Over all rounds. Seconds; percentiles by name ("p50"), empty where nothing was measured.

    ``throughput``: tokens per second of all requests together, prompts included. ``speedup``: the
    baseline's seconds over this arm's, per token; also by round. ``num_equal_texts`` counts texts
    that equal the baseline's for the same prompt and seed in the same round. Without a baseline
    these are None and empty. ``by_group``: the same of each group of questions, where there are groups,
    with speeds of single requests: a group does not run alone. ``joules_per_token``: prompts included.
    """

    name: str
    num_requests: int
    num_tokens: int
    seconds: float
    throughput: float
    speedup: float | None
    speedup_by_round: list[float]
    time_to_first_token: dict[str, float]
    time_per_output_token: dict[str, float]
    latency: dict[str, float]
    tokens_per_step: float | None
    acceptance_rate: float | None
    mean_gamma: float | None
    num_equal_texts: int | None
    joules_per_token: float | None
    by_group: dict[str, GroupSummary]


class GroupSummary(NamedTuple):
    """``speedup``: the baseline's seconds per token of its requests over this arm's."""

    num_requests: int
    speedup: float | None
    tokens_per_step: float | None


def summarize(arms: Sequence[Arm]) -> list[ArmSummary]:
    """One summary per arm, in order. The first is the baseline of the others, if there are any."""
    baseline = arms[0] if len(arms) > 1 else None
    return [_summary(arm, baseline) for arm in arms]


def _summary(arm: Arm, baseline: Arm | None) -> ArmSummary:
    replies = [reply for round_ in arm.rounds for reply in round_]
    accounts = [reply.speculative or {} for reply in replies]
    num_steps = sum(account.get("num_steps", 0) for account in accounts)
    num_drafts = sum(account.get("num_draft_tokens", 0) for account in accounts)
    num_accepted = sum(account.get("num_accepted_tokens", 0) for account in accounts)
    num_tokens = _num_tokens(arm.rounds)
    return ArmSummary(
        name=arm.name,
        num_requests=len(replies),
        num_tokens=num_tokens,
        seconds=sum(arm.seconds),
        throughput=_ratio(num_tokens, sum(arm.seconds)) or 0.0,
        speedup=None if baseline is None else _speedup(arm, baseline, slice(None)),
        speedup_by_round=[] if baseline is None else _speedups(arm, baseline),
        time_to_first_token=percentiles(reply.time_to_first_token for reply in replies),
        time_per_output_token=percentiles(reply.time_per_output_token for reply in replies),
        latency=percentiles(reply.latency for reply in replies),
        tokens_per_step=_tokens_per_step(accounts),
        acceptance_rate=_ratio(num_accepted, num_drafts),
        mean_gamma=_ratio(num_drafts, num_steps),
        num_equal_texts=None if baseline is None else _num_equal_texts(arm, baseline),
        joules_per_token=_joules_per_token(arm),
        by_group={
            group: _group_summary(group, replies, baseline)
            for group in dict.fromkeys(reply.group for reply in replies if reply.group)
        },
    )


def _joules_per_token(arm: Arm) -> float | None:
    told = [joules for joules in arm.joules if joules is not None]
    return _ratio(sum(told), _num_tokens(arm.rounds)) if len(told) == len(arm.rounds) else None


def _group_summary(group: str, replies: Sequence[Reply], baseline: Arm | None) -> GroupSummary:
    mine = [reply for reply in replies if reply.group == group]
    speedup = None
    if baseline is not None:
        others = (reply for round_ in baseline.rounds for reply in round_ if reply.group == group)
        own, base = _seconds_per_token(mine), _seconds_per_token([*others])
        speedup = _ratio(base, own) if own is not None and base is not None else None
    accounts = (reply.speculative or {} for reply in mine)
    return GroupSummary(len(mine), speedup, _tokens_per_step(accounts))


def _seconds_per_token(replies: Sequence[Reply]) -> float | None:
    seconds = sum(reply.latency or 0.0 for reply in replies)
    return _ratio(seconds, sum(reply.num_tokens for reply in replies))


def _speedups(arm: Arm, baseline: Arm) -> list[float]:
    """Returns the speed-ups of those rounds in which both wrote something."""
    found = (_speedup(arm, baseline, slice(at, at + 1)) for at in range(len(arm.rounds)))
    return [value for value in found if value is not None]


def _speedup(arm: Arm, baseline: Arm, which: slice) -> float | None:
    """The baseline's seconds per token over the arm's, in these rounds."""
    own, base = (
        _ratio(sum(each.seconds[which]), _num_tokens(each.rounds[which]))
        for each in (arm, baseline)
    )
    return _ratio(base, own) if own is not None and base is not None else None


def _tokens_per_step(accounts: Iterable[Mapping[str, Any]]) -> float | None:
    """Tokens per step from the server's own statistics, which count end tokens: no reply shows them."""
    told = [
        (each["tokens_per_step"], each["num_steps"]) for each in accounts if each.get("num_steps")
    ]
    return _ratio(sum(rate * steps for rate, steps in told), sum(steps for _, steps in told))


def _num_tokens(rounds: Sequence[Sequence[Reply]]) -> int:
    return sum(reply.num_tokens for round_ in rounds for reply in round_)


def _num_equal_texts(arm: Arm, baseline: Arm) -> int:
    return sum(
        mine.text == theirs.text
        for own, others in zip(arm.rounds, baseline.rounds, strict=True)
        for mine, theirs in zip(own, others, strict=True)
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def is_unsteady(summary: ArmSummary) -> bool:
    """Whether its rounds disagree about the speed-up by more than drafting explains."""
    by_round = summary.speedup_by_round
    return bool(by_round) and max(by_round) > _STEADY_RATIO * min(by_round)


def percentiles(values: Iterable[float | None]) -> dict[str, float]:
    """p50, p90 and p99 of what was measured, interpolated linearly."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {}
    found = {}
    for percent in PERCENTILES:
        place = (len(known) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(known) - 1)
        found[f"p{percent}"] = known[low] + (known[high] - known[low]) * (place - low)
    return found


def table(summaries: Sequence[ArmSummary]) -> str:
    """In Markdown, readable as it is on a terminal: what was gained, how long requests waited and, where
    there are groups of questions, what was gained in each."""
    gains = markdown_table([_HEADER, *map(_row, summaries)], num_text_columns=1)
    rows = [row for summary in summaries for row in _latency_rows(summary)]
    tables = [gains, markdown_table([_LATENCY_HEADER, *rows], num_text_columns=2)]
    groups = list(summaries[0].by_group)
    if groups:
        by_group = [[each.name, *map(_in_group, each.by_group.values())] for each in summaries]
        tables.append(markdown_table([["speed-up (tokens/step)", *groups], *by_group], 1))
    return "\n\n".join(tables)


def _in_group(summary: GroupSummary) -> str:
    return f"{_figure(summary.speedup, '.2f', 'x')} ({_figure(summary.tokens_per_step, '.2f')})"


def _row(summary: ArmSummary) -> tuple[str, ...]:
    by_round = sorted(summary.speedup_by_round)
    equal = summary.num_equal_texts
    return (
        summary.name,
        f"{summary.throughput:.1f}",
        _figure(summary.speedup, ".2f", "x"),
        f"{by_round[0]:.2f}-{by_round[-1]:.2f}" if by_round else "-",
        _figure(summary.tokens_per_step, ".2f"),
        _figure(summary.mean_gamma, ".1f"),
        _figure(summary.acceptance_rate, ".1%"),
        _figure(summary.joules_per_token, ".2f"),
        "-" if equal is None else f"{equal} of {summary.num_requests}",
    )


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _latency_rows(summary: ArmSummary) -> list[tuple[str, ...]]:
    measured = (
        ("to the first token", summary.time_to_first_token, ".0f"),
        ("per output token", summary.time_per_output_token, ".1f"),
        ("to the last token", summary.latency, ".0f"),
    )
    return [
        (summary.name, name, *(f"{value * 1000:{form}}" for value in found.values()))
        for name, found, form in measured
        if found
    ]


def to_json(
    card: Mapping[str, Any] | None,
    arguments: Namespace,
    arms: Sequence[Arm],
    summaries: Sequence[ArmSummary],
) -> dict[str, Any]:
    """Settings, the served model, each arm's summary, and each request's own figures. ``card``: what
    the server says of the model; None for servers other than Slipstream."""
    prompts = arguments.prompts or arguments.spec_bench
    settings = ("concurrency", "rounds", "max_tokens", "temperature", "seed")
    return {
        "schema": SCHEMA_VERSION,
        "url": arguments.url,
        "model": None if card is None else dict(card),
        "prompts": None if prompts is None else str(prompts),
        "settings": {name: getattr(arguments, name) for name in settings},
        "arms": [
            {
                **asdict(summary),
                "by_group": {group: each._asdict() for group, each in summary.by_group.items()},
                "speculative": arm.speculative,
                "seconds_per_round": arm.seconds,
                "requests": [_request(reply) for round_ in arm.rounds for reply in round_],
            }
            for arm, summary in zip(arms, summaries, strict=True)
        ],
    }


def _request(reply: Reply) -> dict[str, Any]:
    return {
        "group": reply.group or None,
        "num_tokens": reply.num_tokens,
        "time_to_first_token": reply.time_to_first_token,
        "time_per_output_token": reply.time_per_output_token,
        "latency": reply.latency,
        "finish_reason": reply.finish_reason,
        "usage": reply.usage,
    }


_SIZE = (13.0, 4.2)


def check_plot(path: Path) -> None:
    """Before the bench, not after: raises ModuleNotFoundError where nothing can be plotted, FlagError
    where ``path`` has a suffix that is no picture's."""
    figure = import_module("matplotlib.figure").Figure()
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise FlagError(f"--plot {path}: must end with one of: .{', .'.join(sorted(known))}")


def plot(summaries: Sequence[ArmSummary], arms: Sequence[Arm], path: Path) -> None:
    """Tokens per second and speed-up of each arm, and over its requests how long the first token,
    and each later one, took.

    Raises OSError where ``path`` cannot be written.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=_SIZE, layout="constrained")
    speed, first, later = figure.subplots(1, 3)
    _draw_speed(speed, summaries)
    for arm in arms:
        replies = [reply for round_ in arm.rounds for reply in round_]
        _draw_shares(first, arm.name, [reply.time_to_first_token for reply in replies])
        _draw_shares(later, arm.name, [reply.time_per_output_token for reply in replies])
    first.set_xlabel("milliseconds to the first token")
    later.set_xlabel("milliseconds per output token")
    for axes in (first, later):
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=0)
        axes.legend()
    figure.savefig(path)


def _draw_speed(axes: Any, summaries: Sequence[ArmSummary]) -> None:
    names = [summary.name for summary in summaries]
    # The colours of the curves beside them.
    colors = [f"C{number}" for number in range(len(names))]
    bars = axes.bar(names, [summary.throughput for summary in summaries], color=colors)
    labels = [
        f"{summary.throughput:.0f}"
        + ("" if summary.speedup is None else f"\n{summary.speedup:.2f}x")
        for summary in summaries
    ]
    axes.bar_label(bars, labels)
    axes.margins(y=0.15)
    axes.set_ylabel("tokens per second, all requests together")


def _draw_shares(axes: Any, name: str, seconds: Sequence[float | None]) -> None:
    """The share of requests that took no longer, over milliseconds."""
    known = sorted(value * 1000 for value in seconds if value is not None)
    shares = [(rank + 1) / len(known) for rank in range(len(known))]
    axes.step(known, shares, where="post", marker=".", label=name)
