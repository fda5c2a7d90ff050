"""Two real replicas beside their simulation: the same requests at the same times, by the same router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client.bench import BenchPrompt
from client.markdown import markdown_table
from engine.config import EngineConfig
from engine.params import SpeculativeParams
from slipstream.options import SpeculativeOptions
from tools.simulate.fleet import Fleet
from tools.simulate.live.measure import DRAFTER, Text, measure_costs, measure_texts
from tools.simulate.live.servers import served
from tools.simulate.live.streams import Address
from tools.simulate.profile import Costs, Profile
from tools.simulate.results import Latency, figures
from tools.simulate.routing import ROUTERS, Router
from tools.simulate.work import Arrivals, Work, tenant_name

NUM_REPLICAS = 2
_NUM_TENANTS = 8
_SIZES: dict[str, Any] = {"max_num_seqs": 32, "num_blocks": 2048}
_WARM_UP_RATE = 12.0
_WARM_UP_SECONDS = 10.0
_FLOOD_SECONDS = 8.0
_FLOOD = 200.0
"""Requests per second and replica that none of them can serve."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load. ``rate``: requests per second over both replicas; ``pairs``: measured and simulated, by
    what they are figures of."""

    load: float
    rate: float
    pairs: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What real replicas did: seconds to the first token and to the last, and tokens per second."""

    first: Sequence[float]
    whole: Sequence[float]
    tokens_per_second: float


async def calibrate(
    ports: Sequence[int],
    prompts: Mapping[str, Sequence[BenchPrompt]],
    loads: Sequence[float],
    seconds: float,
    routing: str,
    num_tokens: int,
    logs: Path,
) -> tuple[Profile, list[Comparison]]:
    """``loads``: shares of what the simulation says that the replicas can serve. Costs are measured
    before and after the loads, and taken in the middle. Raises ClientError."""
    flags = [f"--{name.replace('_', '-')}={size}" for name, size in _SIZES.items()]
    flags += [f"--drafters={DRAFTER},none", "--log-level=warning"]
    replayed: list[tuple[list[Work], Replayed]] = []
    async with served(ports, flags, logs) as addresses:
        first, *others = addresses
        kinds, texts = await measure_texts(first, prompts, num_tokens)
        await _warm_up(addresses, texts, routing)
        before = await measure_costs(first, others)
        engine = EngineConfig(**_SIZES)
        rough = Profile(before, kinds, engine)
        most = _capacity(rough, texts, routing)
        for index, load in enumerate(loads):
            arrivals = Arrivals(load * most, seconds, _NUM_TENANTS, seed=index)
            works = list(of_texts(texts, arrivals, f"load-{index}"))
            router = ROUTERS[routing](NUM_REPLICAS)
            replayed.append((works, await replay(addresses, works, router)))
        after = await measure_costs(first, others)
    profile = Profile(between(before, after), kinds, engine)
    comparisons = []
    for load, (works, measured) in zip(loads, replayed, strict=True):
        pairs = _pairs(measured, _simulated(profile, works, routing))
        comparisons.append(Comparison(load, load * most, pairs))
    return profile, comparisons


def between(before: Costs, after: Costs) -> Costs:
    """The geometric mean of two measurements of the same steps, where they have the same; of what one
    of them lacks, the other's."""
    steps = {(rows, context): (seconds, n) for rows, context, seconds, n in before.steps}
    for rows, context, seconds, num_requests in after.steps:
        known = steps.get((rows, context))
        both = seconds if known is None else (known[0] * seconds) ** 0.5
        steps[(rows, context)] = (both, num_requests)
    rest = {
        name: (getattr(before, name) * getattr(after, name)) ** 0.5
        for name in (
            "overhead",
            "per_request",
            "per_admission",
            "drafting",
            "with_drafts",
            "with_neighbour",
        )
    }
    ordered = sorted((rows, context, *each) for (rows, context), each in steps.items())
    return Costs(tuple(ordered), **rest)


def of_texts(texts: Sequence[Text], arrivals: Arrivals, salt: str) -> list[Work]:
    """Requests for texts that were written before, by tenants whose names begin with ``salt``."""
    return [
        Work(
            at,
            (text := texts[int(chance * len(texts))]).kind,
            f"{salt}-{tenant_name(tenant)}",
            text.prompt_token_ids,
            text.completion_token_ids,
        )
        for at, tenant, (chance, _) in arrivals
    ]


async def replay(addresses: Sequence[Address], works: Sequence[Work], router: Router) -> Replayed:
    """Send each request at its time to where the router says. Raises ClientError."""
    start = time.perf_counter()

    async def one(work: Work) -> tuple[float, float, float]:
        await asyncio.sleep(max(0.0, start + work.at - time.perf_counter()))
        late = time.perf_counter() - start - work.at
        number = router.send(work.tenant)
        try:
            streamed = await addresses[number].stream(_body(work))
        finally:
            router.done(number)
        return streamed.first + late, streamed.whole + late, streamed.times[-1] - start

    found = await asyncio.gather(*map(one, works))
    first, whole, ends = zip(*found, strict=True)
    num_tokens = sum(len(work.completion_token_ids) for work in works)
    return Replayed(first, whole, num_tokens / max(ends))


async def _warm_up(addresses: Sequence[Address], texts: Sequence[Text], routing: str) -> None:
    """Traffic for nobody: engines record forwards of the sizes that come often, and go faster then."""
    arrivals = Arrivals(_WARM_UP_RATE, _WARM_UP_SECONDS, _NUM_TENANTS)
    router = ROUTERS[routing](len(addresses))
    await replay(addresses, list(of_texts(texts, arrivals, "warm-up")), router)


def _body(work: Work) -> dict[str, object]:
    return {
        "prompt": list(work.prompt_token_ids),
        "max_tokens": len(work.completion_token_ids),
        "temperature": 0,
        "cache_salt": work.tenant,
        "speculative": {"draft_strategy": DRAFTER},
    }


def _speculative() -> SpeculativeParams:
    """What the server takes for a request that names but the drafter."""
    return SpeculativeParams.from_options(SpeculativeOptions(draft_strategy=DRAFTER))


def _capacity(profile: Profile, texts: Sequence[Text], routing: str) -> float:
    """Requests per second that both replicas can serve."""
    arrivals = Arrivals(_FLOOD * NUM_REPLICAS, _FLOOD_SECONDS, _NUM_TENANTS)
    works = of_texts(texts, arrivals, "flood")
    fleet = _fleet(profile, routing)
    run = fleet.run(works)
    return figures(run).requests_per_second


def _fleet(profile: Profile, routing: str) -> Fleet:
    router = ROUTERS[routing](NUM_REPLICAS)
    return Fleet(profile, NUM_REPLICAS, _speculative(), router, per_machine=NUM_REPLICAS)


def _simulated(profile: Profile, works: Sequence[Work], routing: str) -> Replayed:
    run = _fleet(profile, routing).run(works)
    ended = [each for each in run.served if each.end is not None and each.first_token is not None]
    first = [each.first_token - each.work.at for each in ended if each.first_token is not None]
    whole = [each.end - each.work.at for each in ended if each.end is not None]
    return Replayed(first, whole, figures(run).tokens_per_second)


def _pairs(measured: Replayed, simulated: Replayed) -> dict[str, tuple[float, float]]:
    pairs = {"tokens per second": (measured.tokens_per_second, simulated.tokens_per_second)}
    for name in ("first", "whole"):
        real, made = (Latency.of(getattr(each, name)) for each in (measured, simulated))
        what = "first token" if name == "first" else "whole answer"
        pairs[f"{what}, mean (ms)"] = (real.mean * 1e3, made.mean * 1e3)
        pairs[f"{what}, p99 (ms)"] = (real.p99 * 1e3, made.p99 * 1e3)
    return pairs


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown."""
    rows = [("load", "figure", "measured", "simulated", "difference")]
    for each in comparisons:
        for name, (measured, simulated) in each.pairs.items():
            difference = simulated / measured - 1.0
            rows.append(
                (
                    f"{each.load:.0%} ({each.rate:.1f}/s)",
                    name,
                    f"{measured:.1f}",
                    f"{simulated:.1f}",
                    f"{difference:+.1%}",
                )
            )
    return markdown_table(rows, 2)


def largest_difference(comparisons: Sequence[Comparison]) -> float:
    """Of all figures, relative."""
    return float(
        np.max(
            [
                abs(simulated / measured - 1.0)
                for each in comparisons
                for measured, simulated in each.pairs.values()
            ]
        )
    )
