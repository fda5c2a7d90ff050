"""``slipstream prove``: whether a server writes the same texts whatever it drafts and whoever else is
there.

Each case is asked for once without drafts, alone and with an empty cache. Then come the trials: those
that are to be alone one after another, the others side by side. What is drawn by rejection is asked for
in their company and tested by its log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from slipstream.client.bench import check_outputs, progress
from slipstream.client.connection import Connection
from slipstream.client.errors import ClientError, FlagError, RefusedError
from slipstream.client.prove_answers import (
    Answer,
    Difference,
    first_difference,
    judge_draws,
    read_answer,
)
from slipstream.client.prove_plan import (
    CHATS,
    COMPLETIONS,
    PLAIN,
    TOP_LOGPROBS,
    Case,
    Plan,
    Server,
    Trial,
    logprobs_fields,
    make_plan,
    with_drafts,
)
from slipstream.client.prove_report import Compared, Proof, to_json, to_markdown
from slipstream.client.session import Service, discover

_BROKEN, _NO_PROOF = 1, 2
_ATTEMPTS = 6
_SERVER_FAULT = 500
_FEW_LOGPROBS = 5
"""The most that OpenAI's completions tell."""
_NUM_EXPLAINED = 100


def run(arguments: Namespace) -> int:
    """0: every promise was kept; 1: one was not. 2, for whatever keeps it from being a proof: raises
    FlagError, and ClientError becomes one, since 1 has a meaning here."""
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
        return _BROKEN
    if not proof.compared:
        raise FlagError("no request was answered, so that nothing is proven")
    return 0


@dataclass(slots=True)
class _Peer:
    """A server that is asked, and what it does not take, by reason."""

    connection: Connection
    service: Service
    card: Mapping[str, Any]
    offer: Server
    refused: Counter[str] = field(default_factory=Counter)

    async def ask(self, path: str, fields: Mapping[str, Any]) -> Answer | None:
        """None where the server does not take the request. Waits where it is busy. Raises ClientError."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return read_answer(await self.connection.post(path, self.service.body(fields)))
            except RefusedError as error:
                if error.status >= _SERVER_FAULT:
                    raise
                if not error.is_busy or attempt == _ATTEMPTS:
                    self.refused[str(error)] += 1
                    return None
            await asyncio.sleep(attempt)
        return None

    async def ask_plain(self, case: Case, fields: Mapping[str, Any], salt: str) -> Answer | None:
        """Without drafts and with a cache of its own, where the server can be told so."""
        is_told = self.service.tells_drafts
        drafts = {"draft_strategy": PLAIN} if is_told else None
        return await self.ask(
            case.path, {**with_drafts(case, drafts, salt if is_told else None), **fields}
        )


async def _meet(arguments: Namespace, url: str, stack: AsyncExitStack) -> _Peer:
    connection = await stack.enter_async_context(
        Connection(url, arguments.api_key, arguments.timeout)
    )
    service = await discover(connection, arguments.model)
    cards = (await connection.get("/v1/models")).get("data") or [{}]
    named = [each for each in cards if each.get("id") == service.model]
    card = (named or cards)[0]
    found = _Peer(connection, service, card, Server(service.catalogue))
    if service.tells_drafts:
        found.offer = replace(found.offer, has_chats=card.get("has_chat_template", True))
    else:
        found.offer = await _probed(found)
    found.refused.clear()
    return found


async def _probed(peer: _Peer) -> Server:
    """Of a server that does not say what it takes: one token is asked of it in each way."""
    probe = {"max_tokens": 1, "temperature": 0}
    chat = {**probe, "messages": [{"role": "user", "content": "Hello"}]}
    told = await peer.ask(COMPLETIONS, {**probe, "prompt": "Hello", "logprobs": _FEW_LOGPROBS})
    return Server(
        None,
        await peer.ask(CHATS, chat) is not None,
        _FEW_LOGPROBS if told is not None and told.logprobs else 0,
    )


async def _prove(arguments: Namespace) -> Proof:
    async with AsyncExitStack() as stack:
        peer = await _meet(arguments, arguments.url, stack)
        against = peer
        if arguments.against is not None:
            against = await _meet(arguments, arguments.against, stack)
        run_id = uuid.uuid4().hex
        offer = peer.offer if against is peer else _common(peer.offer, against.offer)
        plan = make_plan(offer, arguments.requests, arguments.seed, run_id)
        compared, drawn = await _run_plan(plan, peer, against, arguments.concurrency, run_id)
        about = {
            "url": peer.connection.url,
            "reference": against.connection.url if against is not peer else "itself, alone",
            "date": datetime.now(UTC).date().isoformat(),
            "seed": arguments.seed,
            "concurrency": arguments.concurrency,
        }
        # A server promises nothing about another.
        is_exact = peer.card.get("determinism") == "exact" and against is peer
        return Proof(
            about,
            peer.card,
            is_exact and peer.card.get("exact_verified") is not False,
            compared,
            judge_draws(drawn),
            peer.refused if against is peer else peer.refused + against.refused,
        )


async def _run_plan(
    plan: Plan, peer: _Peer, against: _Peer, concurrency: int, run_id: str
) -> tuple[list[Compared], list[tuple[str, int, Answer]]]:
    plain: dict[int, Answer] = {}
    compared: list[Compared] = []
    drawn: list[tuple[str, int, Answer]] = []
    total = len(plan.cases) + len(plan.trials) + len(plan.drawn)
    with progress(total) as bar:

        async def ask_plain(case: Case) -> None:
            answer = await against.ask_plain(case, {}, f"{run_id}-plain-{case.number}")
            if answer is not None:
                plain[case.number] = answer
            bar.update()

        async def compare(trial: Trial) -> None:
            known = plain.get(trial.case.number)
            if known is not None:
                answer = await peer.ask(trial.case.path, trial.fields(known.text))
                if answer is not None:
                    compared.append(Compared(trial, answer, first_difference(known, answer)))
            bar.update()

        async def draw(trial: Trial) -> None:
            answer = await peer.ask(trial.case.path, trial.fields())
            if answer is not None:
                name = ", ".join(trial.arm.labels.values())
                drawn.append((name, trial.number, answer))
            bar.update()

        bar.set_description("without drafts")
        await _side_by_side(1, [partial(ask_plain, each) for each in plan.cases])
        bar.set_description("alone")
        alone = [each for each in plan.trials if each.is_alone]
        await _side_by_side(1, [partial(compare, each) for each in alone])
        bar.set_description("in company")
        others = [each for each in plan.trials if not each.is_alone]
        work = [partial(compare, each) for each in others] + [
            partial(draw, each) for each in plan.drawn
        ]
        random.Random(len(work)).shuffle(work)
        await _side_by_side(concurrency, work)
    compared.sort(key=lambda each: each.trial.number)
    drawn.sort(key=lambda each: each[1])
    return await _explained(compared, plain, against, run_id), drawn


def _common(one: Server, other: Server) -> Server:
    """What both offer."""
    return Server(
        one.catalogue if other.catalogue is not None else None,
        one.has_chats and other.has_chats,
        min(one.num_logprobs, other.num_logprobs),
    )


async def _side_by_side(count: int, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """So many at a time; a failure ends all of them. Raises ClientError."""
    waiting = iter(work)

    async def go_on() -> None:
        for each in waiting:
            await each()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(go_on())
    except* ClientError as errors:
        raise errors.exceptions[0] from errors


async def _explained(
    compared: Sequence[Compared], plain: Mapping[int, Answer], against: _Peer, run_id: str
) -> list[Compared]:
    """The same with the log-probabilities of both tokens where texts part, as the text without drafts has
    them there, for the first of those that are told by token."""
    found = list(compared)
    parting = [
        at
        for at, each in enumerate(found)
        if each.difference is not None and each.difference.what == "text"
    ]
    for at in parting[:_NUM_EXPLAINED]:
        each = found[at]
        if each.difference is not None and each.difference.token is not None:
            told = await _explain(each, each.difference, plain, against, f"{run_id}-again-{at}")
            found[at] = replace(each, difference=told)
    return found


async def _explain(
    each: Compared, difference: Difference, plain: Mapping[int, Answer], against: _Peer, salt: str
) -> Difference:
    case, at = each.trial.case, difference.token or 0
    count = min(TOP_LOGPROBS, against.offer.num_logprobs)
    if not count:
        return difference
    fields = {**logprobs_fields(case.path == CHATS, count), "max_tokens": at + 1}
    if against.service.tells_drafts:
        fields["return_tokens_as_token_ids"] = True
    again = await against.ask_plain(case, fields, salt)
    if again is None or again.logprobs is None or len(again.logprobs) <= at:
        return difference
    _, top = again.logprobs[at]
    names = (_name(answer, at) for answer in (plain[case.number], each.answer))
    one, other = (top.get(name) for name in names)
    return replace(difference, plain_logprob=one, written_logprob=other)


def _name(answer: Answer, at: int) -> str:
    """A token as log-probabilities name it."""
    tokens = answer.tokens or ()
    token = tokens[at] if at < len(tokens) else ""
    return f"token_id:{token}" if isinstance(token, int) else token
