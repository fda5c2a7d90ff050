"""``slipstream bench``: what drafting gains on a running server, against plain decoding there.

Arms differ in nothing but the ``speculative`` object. They run in turns, so that a machine that slows
down slows all of them, and their texts are compared, so that a gain is one at equal text.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from slipstream.client.bench_report import (
    UNSTEADY,
    Arm,
    check_plot,
    is_unsteady,
    plot,
    summarize,
    table,
    to_json,
)
from slipstream.client.connection import Connection, side_by_side
from slipstream.client.energy import EnergyMeter
from slipstream.client.errors import ClientError, FlagError
from slipstream.client.flags import speculative_object, with_fields
from slipstream.client.session import NOT_SLIPSTREAM, Service, connect, discover, model_card
from slipstream.client.spec_bench import Questions
from slipstream.client.stream import Reply


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """An endpoint's path, and the field that holds the prompt. ``later``: what is asked after the
    answers; ``group``: of Spec-Bench."""

    path: str
    fields: Mapping[str, Any]
    later: tuple[str, ...] = ()
    group: str = ""


_FUNCTION = '''\
def load_table(path, separator=","):
    """Read numbers from a file."""
    rows = []
    with open(path) as stream:
        for line in stream:
            parts = line.strip().split(separator)
            rows.append([float(part) for part in parts])
    return rows
'''
_CLASS = '''\
class Account:
    """A balance that cannot fall below zero."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
'''
_EDITS = (
    f"Please rename `load_table` to `load_numbers`.\n\n{_FUNCTION}",
    f"Please rename `rows` to `table`.\n\n{_FUNCTION}",
    f"Please rename `Account` to `Wallet`.\n\n{_CLASS}",
    f"Please add a method `withdraw`.\n\n{_CLASS}",
)
_BEGINNINGS = (
    _FUNCTION + "\n\ndef save_table(path, rows, separator",
    _CLASS + "\n    def withdraw(self, amount):\n",
    "import json\n\n\ndef read_json(path):\n",
    "def quicksort(values):\n",
)


def builtin_prompts() -> list[BenchPrompt]:
    """Code to edit and code to continue, by turns: the first repeats its prompt, the second less."""
    prompts = []
    for edit, beginning in zip(_EDITS, _BEGINNINGS, strict=True):
        prompts.append(_chat([{"role": "user", "content": edit}]))
        prompts.append(_completion(beginning))
    return prompts


def read_prompts(path: Path) -> list[BenchPrompt]:
    """JSON lines with "prompt" or "messages"; the server checks what is in them. Raises FlagError
    naming the line."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise FlagError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise FlagError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
            raise FlagError(
                f'{path}, line {number}: must be an object with either "prompt" or "messages"'
            )
        prompts.append(
            _completion(found["prompt"]) if "prompt" in found else _chat(found["messages"])
        )
    if not prompts:
        raise FlagError(f"{path} has no prompts")
    return prompts


def _asked(questions: Questions) -> list[BenchPrompt]:
    """The questions of all groups, and what is asked after each answer. Raises FlagError."""
    try:
        groups = {name: questions.of(name) for name in questions.groups()}
        found = [
            replace(_chat([_said_by_user(first)]), later=tuple(later), group=name)
            for name, lines in groups.items()
            for first, *later in (line["turns"] for line in lines)
        ]
    except (OSError, ValueError) as error:
        raise FlagError(f"--spec-bench: {error}") from error
    if not found:
        raise FlagError(f"--spec-bench: {questions.file} has no question with such ids")
    return found


def _said_by_user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _chat(messages: Any) -> BenchPrompt:
    return BenchPrompt("/v1/chat/completions", {"messages": messages})


def _completion(prompt: Any) -> BenchPrompt:
    return BenchPrompt("/v1/completions", {"prompt": prompt})


BASELINE = "none"
AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that each arm sends in each round."""

    prompts: Sequence[BenchPrompt]
    concurrency: int
    fields: Mapping[str, Any]
    first_seed: int


def run(arguments: Namespace) -> int:
    """Returns the exit status. Raises ClientError and FlagError."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    check_outputs(arguments.json, arguments.plot)
    card, arms = asyncio.run(_measure(arguments, _load(arguments)))
    _write(arguments, card, arms)
    return 0


def check_outputs(*paths: Path | None) -> None:
    """Before the work, not after. Raises FlagError."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise FlagError(f"cannot write {path}: no such folder, or it is one itself")


def _load(arguments: Namespace) -> Load:
    prompts = _prompts(arguments)
    count = arguments.requests or len(prompts)
    return Load(
        [prompts[index % len(prompts)] for index in range(count)],
        arguments.concurrency,
        with_fields(
            {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")},
            arguments,
        ),
        arguments.seed,
    )


def _prompts(arguments: Namespace) -> list[BenchPrompt]:
    if arguments.spec_bench is not None:
        if arguments.prompts is not None:
            raise FlagError("--prompts and --spec-bench: both say what is asked")
        ids = arguments.ids or "all"
        return _asked(Questions(arguments.spec_bench, ids, arguments.per_category))
    if arguments.ids or arguments.per_category:
        raise FlagError("--ids and --per-category choose among the questions of --spec-bench")
    return builtin_prompts() if arguments.prompts is None else read_prompts(arguments.prompts)


async def _measure(arguments: Namespace, load: Load) -> tuple[Mapping[str, Any] | None, list[Arm]]:
    """The served model's card, and the arms with all their replies, ``none`` first."""
    async with connect(arguments) as connection:
        service = await discover(connection, arguments.model)
        card = await model_card(connection, service.model) if service.tells_drafts else None
        arms = _arms(arguments, service)
        await _run_arms(Sender(connection, service, load), arms, arguments.rounds)
        if card is not None and await model_card(connection, service.model) != card:
            raise ClientError(
                "the server was restarted during the bench: its figures do not compare"
            )
    return card, arms


async def _run_arms(sender: Sender, arms: Sequence[Arm], num_rounds: int) -> None:
    run_id = uuid.uuid4().hex
    with progress(len(arms) * (num_rounds * len(sender.load.prompts) + 1)) as bar:
        for arm in arms:
            # The first request of a kind pays for what is set up once; it counts nowhere.
            bar.set_description(f"warm-up {arm.name}")
            await sender.send(arm, 0, f"{run_id}-{arm.name}-warm-up")
            bar.update()
        for number in range(num_rounds):
            for arm in _rotated(arms, number):
                bar.set_description(f"round {number + 1} {arm.name}")
                await _run_round(sender, arm, f"{run_id}-{arm.name}-{number}", bar.update)


def _rotated(arms: Sequence[Arm], number: int) -> list[Arm]:
    at = number % len(arms)
    return [*arms[at:], *arms[:at]]


def _arms(arguments: Namespace, service: Service) -> list[Arm]:
    """Raises FlagError for a drafter that the server does not offer, and for contradictions."""
    given = speculative_object(arguments)
    if not service.tells_drafts and not given and arguments.drafters is None:
        sys.stderr.write(f"# {NOT_SLIPSTREAM}: measured as it is, without a baseline\n")
        return [Arm(AS_IT_IS, None)]
    if "cache_salt" in dict(arguments.field):
        raise FlagError("--field cache_salt: each arm and round has one of its own")
    offered = service.drafters
    default = given.pop("draft_strategy", service.default_drafter)
    given_names = [default] if arguments.drafters is None else arguments.drafters
    split = [name.strip() for each in given_names for name in each.split(",")]
    names = [name for name in split if name not in (BASELINE, "")]
    for name in names:
        if name not in offered:
            raise FlagError(f"this server has no drafter {name!r}; it has: {', '.join(offered)}")
    if not names:
        raise FlagError("there is nothing to compare with plain decoding: name --drafters")
    if len(set(names)) < len(names):
        raise FlagError("--drafters names a drafter twice")
    return [
        Arm(BASELINE, {"draft_strategy": BASELINE}),
        *(Arm(name, {**given, "draft_strategy": name}) for name in names),
    ]


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends a load's requests to a server."""

    connection: Connection
    service: Service
    load: Load

    async def send(self, arm: Arm, index: int, cache_salt: str) -> list[Reply]:
        """The whole replies to a prompt, and to what is asked after it. Raises ClientError."""
        prompt = self.load.prompts[index]
        fields = {**self.load.fields, **prompt.fields, "seed": self.load.first_seed + index}
        if arm.speculative is not None:
            fields |= {"cache_salt": cache_salt, "speculative": arm.speculative}
        replies = [await self._reply(prompt, fields)]
        for text in prompt.later:
            answer = {"role": "assistant", "content": replies[-1].text}
            fields["messages"] = [*fields["messages"], answer, _said_by_user(text)]
            replies.append(await self._reply(prompt, fields))
        return replies

    async def _reply(self, prompt: BenchPrompt, fields: Mapping[str, Any]) -> Reply:
        reply = Reply(time.perf_counter(), self.service.tells_drafts, prompt.group)
        async with aclosing(self.connection.stream(prompt.path, self.service.body(fields))) as all_:
            async for piece in all_:
                reply.add(piece, time.perf_counter())
        return reply


async def _run_round(sender: Sender, arm: Arm, cache_salt: str, advance: Callable[[], Any]) -> None:
    """All prompts, so many at a time; a failure ends all of them."""
    count, meter = len(sender.load.prompts), EnergyMeter()
    replies: dict[int, list[Reply]] = {}

    async def work(index: int) -> None:
        replies[index] = await sender.send(arm, index, cache_salt)
        meter.read()
        advance()

    start = time.perf_counter()
    try:
        await side_by_side(sender.load.concurrency, (partial(work, each) for each in range(count)))
    except ClientError as error:
        raise ClientError(f"{arm.name}: {error}") from error
    arm.seconds.append(time.perf_counter() - start)
    arm.joules.append(meter.read() if sender.connection.is_local else None)
    arm.rounds.append([each for index in range(count) for each in replies[index]])


def progress(total: int) -> Any:
    """A bar on standard error, where someone watches."""
    tqdm = import_module("tqdm").tqdm
    return tqdm(total=total, unit="request", disable=not sys.stderr.isatty())


def _write(arguments: Namespace, card: Mapping[str, Any] | None, arms: Sequence[Arm]) -> None:
    summaries = summarize(arms)
    sys.stdout.write(table(summaries) + "\n")
    if any(is_unsteady(each) for each in summaries):
        sys.stderr.write(f"# {UNSTEADY}\n")
    try:
        if arguments.json is not None:
            document = to_json(card, arguments, arms, summaries)
            arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if arguments.plot is not None:
            plot(summaries, arms, arguments.plot)
    except OSError as error:
        raise FlagError(f"cannot write: {error}") from error
