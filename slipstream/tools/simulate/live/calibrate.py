"""Two real replicas beside their simulation: the same requests at the same times, by the same router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.request.params import SpeculativeParams
from slipstream.client.bench import BenchPrompt
from slipstream.client.errors import RefusedError
from slipstream.client.markdown import markdown_table
from slipstream.tools.simulate.fleet import Fleet
from slipstream.tools.simulate.live.measure import DRAFTER, Probes, Text, measure_texts
from slipstream.tools.simulate.live.servers import served
from slipstream.tools.simulate.live.streams import Address, Streamed
from slipstream.tools.simulate.profile import Profile
from slipstream.tools.simulate.results import Latency, figures
from slipstream.tools.simulate.routing import ROUTERS, Router
from slipstream.tools.simulate.work import Arrivals, Work, tenant_name

NUM_REPLICAS = 2
_NUM_TENANTS = 8
_SIZES: dict[str, Any] = {"max_num_seqs": 32, "num_blocks": 2048}
_WARM_UP_RATE = 12.0
_WARM_UP_SECONDS = 10.0
_FIRST_ROUNDS, _ROUNDS = 5, 2
_STAT = Path("/proc/stat")
_FLOOD_SECONDS = 8.0
_FLOOD = 200.0
"""Requests per second and replica that none of them can serve."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One of a load: ``measured`` twice, with the same requests, and simulated."""

    name: str
    measured: tuple[float, float]
    simulated: float

    @property
    def difference(self) -> float:
        """The simulated figure's relative difference from the measured mean; 0 if that is 0."""
        mean = sum(self.measured) / 2
        return self.simulated / mean - 1.0 if mean else 0.0

    @property
    def spread(self) -> float:
        """The spread of the measured figures, relative to their mean."""
        low, high = sorted(self.measured)
        return (high - low) * 2 / (low + high) if high else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load. ``rate``: requests per second over both replicas; ``stolen``: the share of the cores'
    time that the machine's host gave to others during the measurement, if known."""

    load: float
    rate: float
    figures: Sequence[Figure]
    stolen: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The replicas' results: seconds to the first and to the last token, tokens per second, and the
    number of refused requests; ``stolen`` as in ``Comparison``."""

    first: Sequence[float]
    whole: Sequence[float]
    tokens_per_second: float
    num_refused: int
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class _Load:
    """``sent``: the requests at the times at which they went out."""

    load: float
    sent: Sequence[Work]
    measured: tuple[Replayed, Replayed]


async def calibrate(
    ports: Sequence[int],
    prompts: Mapping[str, Sequence[BenchPrompt]],
    loads: Sequence[float],
    seconds: float,
    routing: str,
    num_tokens: int,
    logs: Path,
) -> tuple[Profile, list[Comparison]]:
    """``loads``: shares of what the simulation says that the replicas can serve. Each is replayed twice,
    under salts of its own; costs are measured before, between and after. Raises ClientError."""
    flags = [f"--{name.replace('_', '-')}={size}" for name, size in _SIZES.items()]
    flags += [f"--drafters={DRAFTER},none", "--log-level=warning"]
    replayed: list[_Load] = []
    async with served(ports, flags, logs) as addresses:
        first, *others = addresses
        kinds, texts = await measure_texts(first, prompts, num_tokens)
        await _warm_up(addresses, texts, routing)
        probes = Probes(first, others)
        await probes.measure(_FIRST_ROUNDS)
        engine = EngineConfig(**_SIZES)
        most = _capacity(Profile(probes.costs(), kinds, engine), texts, routing)
        for index, load in enumerate(loads):
            arrivals = Arrivals(load * most, seconds, _NUM_TENANTS, seed=index)
            sent, once = await _replay(addresses, texts, arrivals, routing, f"load-{index}")
            await probes.measure(_ROUNDS)
            _, again = await _replay(addresses, texts, arrivals, routing, f"again-{index}")
            await probes.measure(_ROUNDS)
            replayed.append(_Load(load, sent, (once, again)))
    profile = Profile(probes.costs(), kinds, engine)
    comparisons = [
        Comparison(
            each.load,
            each.load * most,
            _figures(profile, each, routing),
            (each.measured[0].stolen, each.measured[1].stolen),
        )
        for each in replayed
    ]
    return profile, comparisons


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


async def _replay(
    addresses: Sequence[Address], texts: Sequence[Text], arrivals: Arrivals, routing: str, salt: str
) -> tuple[list[Work], Replayed]:
    router = ROUTERS[routing](len(addresses))
    return await replay(addresses, list(of_texts(texts, arrivals, salt)), router)


async def replay(
    addresses: Sequence[Address], works: Sequence[Work], router: Router
) -> tuple[list[Work], Replayed]:
    """Send each request at its time to where the router says. Returns them with the times at which they
    went out, which a busy client may miss, in the order of these. Raises ClientError."""
    start = time.perf_counter()

    async def one(work: Work) -> tuple[Work, Streamed | None]:
        await asyncio.sleep(max(0.0, start + work.at - time.perf_counter()))
        sent = replace(work, at=time.perf_counter() - start)
        number = router.send(work.tenant)
        try:
            return sent, await addresses[number].stream(_body(work))
        except RefusedError as error:
            if not error.is_busy:
                raise
            return sent, None
        finally:
            router.done(number)

    before = _core_ticks()
    found = await asyncio.gather(*map(one, works))
    after = _core_ticks()
    answered = [streamed for _, streamed in found if streamed is not None]
    num_tokens = sum(len(work.completion_token_ids) for work, each in found if each is not None)
    seconds = max((each.times[-1] for each in answered), default=start) - start
    return sorted((work for work, _ in found), key=lambda work: work.at), Replayed(
        [each.first for each in answered],
        [each.whole for each in answered],
        num_tokens / seconds if seconds else 0.0,
        len(found) - len(answered),
        (after[1] - before[1]) / max(after[0] - before[0], 1),
    )


def _core_ticks() -> tuple[int, int]:
    """Ticks of all cores since the machine's start, and the part that the host gave to others; 0 if
    unknown."""
    try:
        ticks = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks), ticks[7] if len(ticks) > 7 else 0


async def _warm_up(addresses: Sequence[Address], texts: Sequence[Text], routing: str) -> None:
    """Sends unmeasured traffic: engines record forwards of frequent sizes, and become faster."""
    arrivals = Arrivals(_WARM_UP_RATE, _WARM_UP_SECONDS, _NUM_TENANTS)
    await _replay(addresses, texts, arrivals, routing, "warm-up")


def _body(work: Work) -> dict[str, object]:
    return {
        "prompt": list(work.prompt_token_ids),
        "max_tokens": len(work.completion_token_ids),
        "temperature": 0,
        "cache_salt": work.tenant,
        "speculative": {"draft_strategy": DRAFTER},
    }


def _speculative() -> SpeculativeParams:
    """The server's parameters for a request that names only the drafter."""
    return SpeculativeParams(draft_strategy=DRAFTER)


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
    found = figures(run)
    return Replayed(first, whole, found.tokens_per_second, found.num_refused)


def _figures(profile: Profile, load: _Load, routing: str) -> list[Figure]:
    once, again = map(_named, load.measured)
    simulated = _named(_simulated(profile, load.sent, routing))
    return [Figure(name, (once[name], again[name]), made) for name, made in simulated.items()]


def _named(replayed: Replayed) -> dict[str, float]:
    found = {"tokens per second": replayed.tokens_per_second}
    for name, seconds in (("first token", replayed.first), ("whole answer", replayed.whole)):
        latency = Latency.of(seconds)
        found[f"{name}, mean (ms)"] = latency.mean * 1e3
        found[f"{name}, p99 (ms)"] = latency.p99 * 1e3
    return {**found, "refused": float(replayed.num_refused)}


def table(comparisons: Sequence[Comparison]) -> str:
    """Markdown."""
    rows = [("load", "figure", "measured", "again", "simulated", "difference")]
    for each in comparisons:
        # Beside other machines on one host no measurement is worth much.
        stolen = "".join(f", {share:.0%} stolen" for share in each.stolen if share >= 0.01)
        for figure in each.figures:
            once, again = figure.measured
            rows.append(
                (
                    f"{each.load:.0%} ({each.rate:.1f}/s){stolen}",
                    figure.name,
                    f"{once:.1f}",
                    f"{again:.1f}",
                    f"{figure.simulated:.1f}",
                    f"{figure.difference:+.1%}",
                )
            )
    return markdown_table(rows, 2)


def largest(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Returns the largest difference of simulated from measured figures, and the largest spread of
    measured ones."""
    found = [figure for each in comparisons for figure in each.figures]
    return max(abs(each.difference) for each in found), max(each.spread for each in found)
