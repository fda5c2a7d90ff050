"""A profile of a running server, by what a client sees of it: steps of several sizes, one after another,
and texts of each kind of traffic. The server should have nothing else to do meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean, median
from typing import Any

from client.bench import BenchPrompt
from client.errors import ClientError
from engine.speculation.cost import CostModel
from tools.simulate.live.streams import Address, Streamed
from tools.simulate.profile import Costs, Kind

_REPEATS = 5
_NUM_TOKENS = 64
_GAMMAS = (1, 2, 4, 8, 16)
_TOGETHER = (2, 4, 8)
_PROMPTS = (32, 64, 128, 256, 512)
_FAR = 1024
_BESIDE = 4
_SHORT = 16
_CYCLE = 8
"""A text that repeats itself after so many tokens is one that ``ngram`` always has a draft for."""
DRAFTER = "ngram"
NO_DRAFTS: Mapping[str, Any] = {"draft_strategy": "none"}
_serial = count(1)


def fixed(gamma: int) -> dict[str, Any]:
    """The ``speculative`` object that verifies so many drafts a step."""
    return {
        "draft_strategy": DRAFTER,
        "adaptive_depth": "fixed",
        "num_speculative_tokens": gamma,
    }


@dataclass(frozen=True, slots=True)
class Text:
    """What was asked and written, in tokens, greedily: the same whenever it is asked again."""

    kind: str
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Period:
    """Steps of requests side by side: seconds and rows of one, and seconds of it spent drafting."""

    seconds: float
    rows: float
    draft_seconds: float


async def measure_costs(address: Address, neighbours: Sequence[Address] = ()) -> Costs:
    """What steps cost at ``address``. ``neighbours``: replicas of the same machine, which are kept busy
    for one of the figures. Raises ClientError."""
    await _side_by_side(address, 2, fixed(4))  # whatever is made at the first use
    plain = await _side_by_side(address, 1, NO_DRAFTS)
    alone = {1: plain.seconds}
    drafting = []
    for gamma in _GAMMAS:
        period = await _side_by_side(address, 1, fixed(gamma))
        alone[round(period.rows)] = period.seconds - period.draft_seconds
        drafting.append(period.draft_seconds)
    first = await _first_token(address, 2)
    for num_tokens in _PROMPTS:
        taken = await _first_token(address, num_tokens)
        alone[num_tokens] = max(taken - first + alone[1], alone[1])
    far = await _side_by_side(address, 1, NO_DRAFTS, _FAR)
    steps = [(rows, 0, seconds, 1) for rows, seconds in sorted(alone.items())]
    steps.append((1, _FAR, far.seconds, 1))
    curve = CostModel(steps)
    per_request = []
    for num_requests in _TOGETHER:
        period = await _side_by_side(address, num_requests, NO_DRAFTS)
        rest = period.seconds - curve.step_seconds(num_requests, 0, num_requests)
        per_request.append(max(0.0, rest) / (num_requests - 1))
    share = median(per_request)
    mixed = await _side_by_side(address, 4, fixed(4))
    believed = curve.step_seconds(round(mixed.rows), 0, 4)
    beside = await _beside(address, neighbours) if neighbours else 1.0
    return Costs(
        # The first request's share is in the curve.
        steps=tuple(steps),
        overhead=0.0,
        per_request=share,
        per_admission=max(0.0, first - alone[1]),
        drafting=median(drafting),
        with_drafts=max(0.5, (mixed.seconds - 4 * median(drafting) - 3 * share) / believed),
        with_neighbour=max(1.0, beside),
    )


async def measure_texts(
    address: Address, prompts: Mapping[str, Sequence[BenchPrompt]], num_tokens: int
) -> tuple[dict[str, Kind], list[Text]]:
    """Each prompt once, with 8 drafts a step: how answers of each kind draft, and the texts. Answers
    without a token are left out. Raises ClientError, also for a kind that has no others."""
    kinds, texts = {}, []
    for kind, some in prompts.items():
        answers = [await _text(address, kind, prompt, num_tokens) for prompt in some]
        found = [each for each in answers if each[0].completion_token_ids]
        if not found:
            raise ClientError(f"prompts of kind {kind!r} have no answers with a token")
        accounts = [account for _, account in found]
        texts += [text for text, _ in found]
        lengths = [
            (len(text.prompt_token_ids), len(text.completion_token_ids)) for text, _ in found
        ]
        kinds[kind] = Kind(tuple(lengths), 1.0, 0, *_acceptance(accounts))
    return kinds, texts


def _acceptance(accounts: Sequence[Mapping[str, Any]]) -> tuple[float, tuple[float, ...]]:
    """How often there was a draft, and how often each depth was right after the one before it."""
    num_steps = sum(each["num_steps"] for each in accounts)
    reached = sum(each["num_drafts"] for each in accounts)
    offered = reached / num_steps if num_steps else 0.0
    depth = max((len(each["accepted_per_position"]) for each in accounts), default=0)
    acceptance = []
    for position in range(depth):
        accepted = sum(
            each["accepted_per_position"][position]
            for each in accounts
            if position < len(each["accepted_per_position"])
        )
        acceptance.append(accepted / reached if reached else 0.0)
        reached = accepted
    return offered, tuple(acceptance)


async def _text(
    address: Address, kind: str, prompt: BenchPrompt, num_tokens: int
) -> tuple[Text, Mapping[str, Any]]:
    body = {
        **prompt.fields,
        "max_tokens": num_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "speculative": fixed(8),
        "cache_salt": f"texts-{next(_serial)}",
    }
    reply = json.loads(await address.post(body, prompt.path))
    (choice,) = reply["choices"]
    text = Text(kind, tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]))
    return text, reply["usage"]["speculative"]


async def _side_by_side(
    address: Address, num_requests: int, speculative: Mapping[str, Any], num_prompt: int = _SHORT
) -> _Period:
    """The median of several rounds of as many requests at once."""
    rounds = []
    for _ in range(_REPEATS):
        bodies = [_body(num_prompt, _NUM_TOKENS, speculative) for _ in range(num_requests)]
        rounds.append(_period(await asyncio.gather(*map(address.stream, bodies))))
    return sorted(rounds, key=lambda each: each.seconds)[len(rounds) // 2]


def _period(streams: Sequence[Streamed]) -> _Period:
    """Of the steps in which all of them were written."""
    start = max(each.times[0] for each in streams)
    end = min(each.times[-1] for each in streams)
    num_steps = fmean(
        sum(
            steps for when, steps in zip(each.times, each.steps, strict=True) if start < when <= end
        )
        for each in streams
    )
    drafts = fmean(each.num_draft_tokens / each.num_steps for each in streams)
    spent = fmean(each.usage["speculative"]["draft_ms"] / 1000 / each.num_steps for each in streams)
    return _Period((end - start) / max(num_steps, 1.0), len(streams) * (1 + drafts), spent)


async def _first_token(address: Address, num_prompt: int) -> float:
    bodies = [_body(num_prompt, 1, NO_DRAFTS) for _ in range(_REPEATS)]
    return median([(await address.stream(body)).first for body in bodies])


async def _beside(address: Address, neighbours: Sequence[Address]) -> float:
    """How much longer a step of some requests takes while the neighbours write as many, and the client
    reads them all."""
    alone = await _side_by_side(address, _BESIDE, NO_DRAFTS)
    bodies = [_body(_SHORT, 16 * _NUM_TOKENS, NO_DRAFTS) for _ in range(_BESIDE)]
    others = [asyncio.ensure_future(each.stream(body)) for each in neighbours for body in bodies]
    together = await _side_by_side(address, _BESIDE, NO_DRAFTS)
    await asyncio.gather(*others)
    return together.seconds / alone.seconds


def _body(num_prompt: int, num_tokens: int, speculative: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt that repeats itself, under a salt of its own."""
    serial = next(_serial)
    return {
        "prompt": [300 + index % _CYCLE for index in range(num_prompt)],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": f"measure-{serial}",
        "speculative": {**speculative, "return_drafted": True},
    }
