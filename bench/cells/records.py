"""Keeps measurements as they come, in a file of JSON lines that a later call goes on with.

A line ``start`` tells of a call: machine, model and settings. Each line ``round`` holds one round of
one cell, with every run of every contender that did it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from bench.contenders import Account, Run

SCHEMA_VERSION = 1
_TEXT_BYTES = 6


@dataclass(frozen=True, slots=True)
class CellKey:
    """The values that all rounds of one cell have in common. ``weights``: as asked for, "own" where
    nothing was; ``steady``: so many requests run all the time, else they begin together; ``default``: the
    drafter of requests that say nothing; ``contenders``: who took turns."""

    model: str
    weights: str
    steady: bool
    workload: str
    sampling: str
    at_once: int
    num_prompts: int
    num_new_tokens: int
    default: str
    contenders: tuple[str, ...]

    def __str__(self) -> str:
        load = "steady" if self.steady else "closed"
        return f"{self.workload}, {self.sampling}, {self.at_once} at once, {load}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One job of one contender. ``tokens`` in ``seconds``: of the whole job, or of a steady job while as
    many run as ever. ``estimate``: the speed-up that the engine itself tells of, as replies do;
    ``step_estimate``: as its metrics of steps do, None over HTTP. ``texts``: a digest of each output."""

    seconds: float
    tokens: int
    steps: int
    written: int
    drafted: int
    accepted: int
    estimate: float | None
    step_estimate: float | None
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """``runs[contender][job]``. ``failed``: why a contender has none."""

    cell: CellKey
    number: int
    mean_prompt_tokens: float
    runs: Mapping[str, tuple[RunRecord, ...]]
    failed: Mapping[str, str] = field(default_factory=dict)


def record_run(run: Run, steady: bool) -> RunRecord:
    """Returns the record of a run. Raises ValueError for one without an account.

    A steady run so short that all of it came in one piece, as on a busy machine over HTTP, has no time
    in which as many run as ever: it counts whole."""
    account = run.account
    if account is None:
        raise ValueError("only runs of this engine have an account")
    steady = steady and run.num_decode_tokens > 0 and run.decode_seconds > 0
    written = sum(map(len, run.output_token_ids))
    return RunRecord(
        seconds=run.decode_seconds if steady else run.seconds,
        tokens=run.num_decode_tokens if steady else written,
        steps=run.num_request_steps,
        written=written,
        drafted=account.num_draft_tokens,
        accepted=account.num_accepted_tokens,
        estimate=_ratio(account.reply_baseline_seconds, account.reply_step_seconds),
        step_estimate=_step_estimate(account, steady),
        texts=tuple(map(_digest, run.output_token_ids)),
    )


def _step_estimate(account: Account, steady: bool) -> float | None:
    if steady:
        return _ratio(account.decode_baseline_seconds, account.decode_step_seconds)
    return _ratio(account.baseline_seconds, account.step_seconds)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _digest(token_ids: tuple[int, ...]) -> str:
    return blake2b(repr(token_ids).encode(), digest_size=_TEXT_BYTES).hexdigest()


class Results:
    """The file. What an interrupted call left of a last line is dropped. Raises ValueError for a file of
    something else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.starts: list[dict[str, Any]] = []
        self.rounds: list[RoundRecord] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self._path.read_text(encoding="utf-8")
        whole, _, rest = text.rpartition("\n")
        if rest:
            self._path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for line in whole.splitlines():
            try:
                self._take(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self._path} holds no results of bench.cells: {error}"
                ) from error

    def _take(self, data: dict[str, Any]) -> None:
        if data["schema"] != SCHEMA_VERSION:
            raise ValueError(f"its schema is {data['schema']}, not {SCHEMA_VERSION}")
        if data["kind"] == "start":
            self.starts.append(data)
        else:
            self.rounds.append(_round_from(data))

    def has(self, cell: CellKey, number: int) -> bool:
        return any(each.cell == cell and each.number == number for each in self.rounds)

    def start(self, facts: Mapping[str, Any]) -> None:
        self.starts.append({"kind": "start", "schema": SCHEMA_VERSION, **facts})
        self._append(self.starts[-1])

    def add(self, record: RoundRecord) -> None:
        self.rounds.append(record)
        self._append({"kind": "round", "schema": SCHEMA_VERSION, **asdict(record)})

    def _append(self, data: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


def _round_from(data: Mapping[str, Any]) -> RoundRecord:
    cell = {**data["cell"], "contenders": tuple(data["cell"]["contenders"])}
    runs = {
        name: tuple(RunRecord(**{**run, "texts": tuple(run["texts"])}) for run in each)
        for name, each in data["runs"].items()
    }
    return RoundRecord(
        CellKey(**cell), data["number"], data["mean_prompt_tokens"], runs, data["failed"]
    )


def rounds_by_cell(rounds: Iterable[RoundRecord]) -> dict[CellKey, list[RoundRecord]]:
    """In the order in which they were begun."""
    found: dict[CellKey, list[RoundRecord]] = {}
    for each in rounds:
        found.setdefault(each.cell, []).append(each)
    return found
