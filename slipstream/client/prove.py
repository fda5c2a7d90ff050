"""``slipstream prove``: whether a server generates the same texts for any drafts and any concurrent
requests.

Each case is asked for once without drafts, alone and with an empty cache. Then come the trials: the
solitary ones one after another, the others side by side. Rejection-sampled requests run among these and
are tested by their log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from slipstream.client.bench import check_outputs, progress
from slipstream.client.connection import Connection, patiently, side_by_side
from slipstream.client.errors import ClientError, FlagError, RefusedError
from slipstream.client.prove_answers import Answer, first_difference, judge_draws, read_answer
from slipstream.client.prove_plan import (
    PLAIN,
    Case,
    Offer,
    Plan,
    Trial,
    make_plan,
    with_drafts,
)
from slipstream.client.prove_report import Compared, Proof, to_json, to_markdown
from slipstream.client.session import Service, discover, model_card

_SERVER_FAULT = 500


def run(arguments: Namespace) -> int:
    """0, or 1 where a promise was not kept. Raises FlagError for whatever keeps it from being a proof, an
    error of the client's, too: its status is not to be taken for a broken promise."""
    check_outputs(arguments.json, arguments.markdown)
    arguments.url = arguments.address or arguments.url
    try:
        proof = asyncio.run(_prove(arguments))
    except ClientError as error:
        raise FlagError(str(error)) from error
    report = to_markdown(proof)
    sys.stdout.write(report + "\n")
    try:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(to_json(proof), indent=1) + "\n", "utf-8")
        if arguments.markdown is not None:
            arguments.markdown.write_text(report + "\n", "utf-8")
    except OSError as error:
        raise FlagError(f"cannot write: {error}") from error
    if proof.broken:
        return 1
    if proof.ended or not proof.compared:
        raise FlagError(proof.ended or "no request was answered, so that nothing is proven")
    return 0


@dataclass(slots=True)
class _Peer:
    """A server that is asked, and what it does not take, by reason."""

    connection: Connection
    service: Service
    card: Mapping[str, Any]
    refused: Counter[str] = field(default_factory=Counter)

    async def ask(self, path: str, fields: Mapping[str, Any]) -> Answer | None:
        """None where the server does not take the request. Raises ClientError."""
        body = self.service.body(fields)
        try:
            return read_answer(await patiently(partial(self.connection.post, path, body)))
        except RefusedError as error:
            if error.status >= _SERVER_FAULT:
                raise
            self.refused[str(error)] += 1
        return None


async def _meet(arguments: Namespace, url: str, stack: AsyncExitStack) -> _Peer:
    connection = Connection(url, arguments.api_key, arguments.timeout)
    await stack.enter_async_context(connection)
    service = await discover(connection, arguments.model)
    return _Peer(connection, service, await model_card(connection, service.model))


async def _prove(arguments: Namespace) -> Proof:
    async with AsyncExitStack() as stack:
        peer = against = await _meet(arguments, arguments.url, stack)
        if arguments.against is not None:
            against = await _meet(arguments, arguments.against, stack)
        run_id = uuid.uuid4().hex
        catalogue = peer.service.catalogue if against.service.tells_drafts else None
        offer = Offer(catalogue, peer.card.get("has_chat_template", True))
        plan = make_plan(offer, arguments.requests, arguments.seed, run_id)
        compared, drawn, ended = await _run(plan, peer, against, arguments.concurrency, run_id)
    about = {
        "url": peer.connection.url,
        "reference": "itself, alone" if against is peer else against.connection.url,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": arguments.seed,
        "concurrency": arguments.concurrency,
    }
    # A server promises nothing about another, and nothing that it found itself unable to keep.
    is_exact = against is peer and peer.card.get("determinism") == "exact"
    is_exact = is_exact and peer.card.get("exact_verified") is not False
    refused = peer.refused if against is peer else peer.refused + against.refused
    return Proof(about, peer.card, is_exact, compared, judge_draws(drawn), refused, ended)


async def _run(
    plan: Plan, peer: _Peer, against: _Peer, concurrency: int, run_id: str
) -> tuple[list[Compared], list[tuple[str, int, Answer]], str]:
    """In the order of the plan, and what ended it early: what had come by then is not lost."""
    plain: dict[int, Answer] = {}
    compared: list[Compared] = []
    drawn: list[tuple[str, int, Answer]] = []
    drafts = PLAIN if against.service.tells_drafts else None

    async def write(case: Case) -> None:
        fields = with_drafts(case.fields, drafts, f"{run_id}-plain-{case.number}")
        if (answer := await against.ask(case.path, fields)) is not None:
            plain[case.number] = answer

    async def compare(trial: Trial) -> None:
        known = plain.get(trial.case.number)
        answer = known and await peer.ask(trial.case.path, trial.fields(known.text))
        if known is not None and answer is not None:
            found = first_difference(known, answer)
            compared.append(Compared(trial, answer, found, known.text))

    async def draw(trial: Trial) -> None:
        if (answer := await peer.ask(trial.case.path, trial.fields())) is not None:
            drawn.append((", ".join(trial.arm.labels.values()), trial.number, answer))

    async def counted(work: Callable[[], Awaitable[None]]) -> None:
        await work()
        bar.update()

    alone = [partial(compare, each) for each in plan.trials if each.is_alone]
    others = [partial(compare, each) for each in plan.trials if not each.is_alone]
    others += [partial(draw, each) for each in plan.drawn]
    random.Random(len(others)).shuffle(others)
    ended = ""
    try:
        with progress(len(plan.cases) + len(alone) + len(others)) as bar:
            for name, count, work in (
                ("without drafts", 1, [partial(write, each) for each in plan.cases]),
                ("alone", 1, alone),
                ("in company", concurrency, others),
            ):
                bar.set_description(name)
                await side_by_side(count, [partial(counted, each) for each in work])
    except (ClientError, asyncio.CancelledError) as error:  # the latter by Ctrl-C
        ended = str(error) or "interrupted"
    compared.sort(key=lambda each: each.trial.number)
    drawn.sort(key=lambda each: each[1])
    return compared, drawn, ended
