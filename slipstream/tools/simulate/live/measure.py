"""A profile of a running server, by what a client sees of it: steps of several sizes, one after another,
and texts of each kind of traffic. The server should have nothing else to do meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from statistics import fmean, median
from typing import Any

from engine.speculation.cost import CostModel
from slipstream.client.bench import BenchPrompt
from slipstream.client.errors import ClientError
from slipstream.tools.simulate.live.streams import Address, Streamed
from slipstream.tools.simulate.profile import Costs, Kind

_ROUNDS = 7
_NUM_TOKENS = 64
_GAMMAS = (1, 2, 4, 8, 16)
_TOGETHER = (2, 4, 8, 16)
_MIXED = (4, 8)
_LEAST = 2
_PROMPTS = (_LEAST, 32, 64, 128, 256, 512)
_FAR_TOKENS = 1024
_NUM_BESIDE = 4
_SHORT = 16
_CYCLE = 8
"""A text that repeats itself after so many tokens is one that ``ngram`` always has a draft for."""
DRAFTER = "ngram"
NO_DRAFTS: Mapping[str, Any] = {"draft_strategy": "none"}
_FAR, _BESIDE = "far", "beside"
_plain, _mixed = "plain {}".format, "mixed {}".format
_drafts, _prompt = "drafts {}".format, "prompt {}".format
_serial = count(1)


def fixed(gamma: int) -> dict[str, Any]:
    """The ``speculative`` object that verifies so many drafts a step."""
    return {"draft_strategy": DRAFTER, "adaptive_depth": "fixed", "num_speculative_tokens": gamma}


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its greedy answer, in tokens: the same whenever it is asked again."""

    kind: str
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Period:
    """Steps of requests side by side: seconds and rows of one, and seconds of it spent drafting."""

    seconds: float
    rows: float
    draft_seconds: float


Probe = Callable[[], Awaitable[Period]]


class Probes:
    """Steps to measure at ``address``, by name. ``neighbours``: replicas of the same machine, which are
    kept busy for one of them.

    A round takes each once, so that a machine that is slower for a while is so for all of them alike.
    """

    def __init__(self, address: Address, neighbours: Sequence[Address] = ()) -> None:
        self._address = address
        self._neighbours = neighbours
        self._probes: dict[str, Probe] = {
            _plain(number): self._steps(number, NO_DRAFTS) for number in (1, *_TOGETHER)
        }
        self._probes |= {_drafts(gamma): self._steps(1, fixed(gamma)) for gamma in _GAMMAS}
        self._probes |= {_prompt(tokens): self._first_token(tokens) for tokens in _PROMPTS}
        self._probes[_FAR] = self._steps(1, NO_DRAFTS, _FAR_TOKENS)
        self._probes |= {_mixed(number): self._steps(number, fixed(4)) for number in _MIXED}
        if neighbours:
            self._probes[_BESIDE] = self._beside
        self._rounds: list[dict[str, Period]] = []

    async def measure(self, num_rounds: int) -> None:
        """So many rounds more. Raises ClientError."""
        if not self._rounds:
            # Whatever is made at the first use.
            for probe in self._probes.values():
                await probe()
        for _ in range(num_rounds):
            self._rounds.append({name: await probe() for name, probe in self._probes.items()})

    def costs(self) -> Costs:
        """Costs from the medians of all rounds so far; there must be one."""
        found = {name: self._median(name) for name in self._probes}
        alone = _alone(found)
        steps = [(rows, 0, seconds, 1) for rows, seconds in sorted(alone.items())]
        steps.append((1, _FAR_TOKENS, found[_FAR].seconds, 1))
        curve = CostModel(steps)
        drafting = median(found[_drafts(gamma)].draft_seconds for gamma in _GAMMAS)
        share = median(
            max(0.0, found[_plain(number)].seconds - curve.step_seconds(number, 0, number))
            / (number - 1)
            for number in _TOGETHER
        )

        def dearer(number: int) -> float:
            mixed = found[_mixed(number)]
            rest = mixed.seconds - number * drafting - (number - 1) * share
            return rest / curve.step_seconds(round(mixed.rows), 0, number)

        beside = (
            found[_BESIDE].seconds / found[_plain(_NUM_BESIDE)].seconds if self._neighbours else 1.0
        )
        return Costs(
            # The first request's share is in the curve.
            steps=tuple(steps),
            overhead=0.0,
            per_request=share,
            per_admission=max(0.0, found[_prompt(_LEAST)].seconds - alone[1]),
            drafting=drafting,
            with_drafts=max(0.5, median(map(dearer, _MIXED))),
            with_neighbour=max(1.0, beside),
        )

    def _median(self, name: str) -> Period:
        """Returns the median of each figure by itself."""
        taken = [astuple(each[name]) for each in self._rounds]
        return Period(*map(median, zip(*taken, strict=True)))

    def _steps(
        self, num_requests: int, speculative: Mapping[str, Any], num_prompt: int = _SHORT
    ) -> Probe:
        async def probe() -> Period:
            bodies = [_body(num_prompt, _NUM_TOKENS, speculative) for _ in range(num_requests)]
            return _period(await asyncio.gather(*map(self._address.stream, bodies)))

        return probe

    def _first_token(self, num_prompt: int) -> Probe:
        async def probe() -> Period:
            stream = await self._address.stream(_body(num_prompt, 1, NO_DRAFTS))
            return Period(stream.first, num_prompt, 0.0)

        return probe

    async def _beside(self) -> Period:
        """While the neighbours write as much, and the client reads them all."""
        bodies = [_body(_SHORT, 3 * _NUM_TOKENS, NO_DRAFTS) for _ in range(_NUM_BESIDE)]
        others = [
            asyncio.ensure_future(each.stream(body)) for each in self._neighbours for body in bodies
        ]
        together = await self._steps(_NUM_BESIDE, NO_DRAFTS)()
        await asyncio.gather(*others)
        return together


def _alone(found: Mapping[str, Period]) -> dict[int, float]:
    """Seconds of a step of one request, by its rows."""
    alone = {1: found[_plain(1)].seconds}
    for gamma in _GAMMAS:
        period = found[_drafts(gamma)]
        alone[round(period.rows)] = period.seconds - period.draft_seconds
    first = found[_prompt(_LEAST)].seconds
    for tokens in _PROMPTS[1:]:
        alone[tokens] = max(found[_prompt(tokens)].seconds - first + alone[1], alone[1])
    return alone


async def measure_costs(address: Address) -> Costs:
    """Measures the cost of steps at ``address``. Raises ClientError."""
    probes = Probes(address)
    await probes.measure(_ROUNDS)
    return probes.costs()


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
    # Beside the choices where the prompt is of messages.
    told = choice if "prompt_token_ids" in choice else reply
    text = Text(kind, tuple(told["prompt_token_ids"]), tuple(choice["token_ids"]))
    return text, reply["usage"]["speculative"]


def _period(streams: Sequence[Streamed]) -> Period:
    """Returns the period of the steps in which all streams generated."""
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
    return Period((end - start) / max(num_steps, 1.0), len(streams) * (1 + drafts), spent)


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
