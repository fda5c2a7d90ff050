"""The studies of docs/scale.md: each runs fleets, draws what came of it and gives back the figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from slipstream.tools.simulate.fleet import Fleet
from slipstream.tools.simulate.pictures import Picture
from slipstream.tools.simulate.policies import speculative_of
from slipstream.tools.simulate.profile import Profile
from slipstream.tools.simulate.results import Figures, figures
from slipstream.tools.simulate.routing import ROUTERS
from slipstream.tools.simulate.work import Arrivals, poisson

Rows: TypeAlias = list[tuple[str, Figures]]
_POLICIES = ("none", "fixed:4", "fixed:16", "goodput")
_REPLICAS = 8
_WARM_UP = 10.0
_TENANTS = 8
"""Per replica: its cache holds the prefixes of its own, and not those of a whole fleet."""
_LOADS = (0.3, 0.8, 1.2, 1.6, 2.0, 2.5)
"""Requests per second and replica over what one can serve without drafts."""
_FLEETS = (1, 10, 100, 1000, 10_000)
_FLEET_LOAD = 0.5
_PREFIX = 512
_PREFIX_LOADS = (0.4, 0.8, 1.2)


def load_study(profile: Profile, picture: Path, most_replicas: int, seconds: float) -> Rows:
    """No drafts, fixed gammas and goodput over the load."""
    num_replicas = min(_REPLICAS, most_replicas)
    capacity = plain_capacity(profile)
    rows: Rows = []
    for policy in _POLICIES:
        for load in _LOADS:
            found = simulate(
                profile, num_replicas, load * capacity, policy, "least_loaded", seconds
            )
            rows.append((f"{policy} at {load:g}", found))
    axes = Picture(
        picture,
        ("p50 of whole answers (s)", "p99 of whole answers (s)", "price per million tokens"),
    )
    for index, policy in enumerate(_POLICIES):
        some = [found for _, found in rows[index * len(_LOADS) :][: len(_LOADS)]]
        axes.draw(0, _LOADS, [each.whole.p50 for each in some], policy)
        axes.draw(1, _LOADS, [each.whole.p99 for each in some], policy)
        axes.draw(2, _LOADS, [each.cost_per_million or 0.0 for each in some], policy)
    axes.save("load, of the capacity without drafts")
    return rows


def affinity_study(profile: Profile, picture: Path, most_replicas: int, seconds: float) -> Rows:
    """Routing where a tenant's prompts begin alike."""
    num_replicas = min(_REPLICAS, most_replicas)
    shared = with_prefixes(profile, _PREFIX)
    capacity = plain_capacity(shared)
    rows: Rows = []
    for routing in ROUTERS:
        for load in _PREFIX_LOADS:
            found = simulate(shared, num_replicas, load * capacity, "goodput", routing, seconds)
            rows.append((f"{routing} at {load:g}", found))
    axes = Picture(
        picture, ("prefix hits", "p99 to the first token (s)", "p99 of whole answers (s)")
    )
    for index, routing in enumerate(ROUTERS):
        some = [found for _, found in rows[index * len(_PREFIX_LOADS) :][: len(_PREFIX_LOADS)]]
        axes.draw(0, _PREFIX_LOADS, [each.prefix_hit_rate for each in some], routing)
        axes.draw(1, _PREFIX_LOADS, [each.first_token.p99 for each in some], routing)
        axes.draw(2, _PREFIX_LOADS, [each.whole.p99 for each in some], routing)
    axes.save("load, of the capacity without hits or drafts")
    return rows


def scale_study(profile: Profile, picture: Path, most_replicas: int, seconds: float) -> Rows:
    """Fleets of one replica to ten thousand at the same load per replica; the largest for a shorter
    time, since every step of every replica is an event."""
    capacity = plain_capacity(profile)
    sizes = [size for size in _FLEETS if size <= most_replicas]
    rows: Rows = []
    for routing in ROUTERS:
        for size in sizes:
            shorter = seconds * min(1.0, max(0.1, 100 / size))
            start = time.perf_counter()
            found = simulate(profile, size, _FLEET_LOAD * capacity, "goodput", routing, shorter)
            rows.append((routing, found))
            speed = found.num_steps / (time.perf_counter() - start)
            sys.stderr.write(f"{routing}, {size} replicas: {speed:.0f} steps per second\n")
    axes = Picture(picture, ("p99 to the first token (s)", "p99 of whole answers (s)"))
    for index, routing in enumerate(ROUTERS):
        some = [found for _, found in rows[index * len(sizes) :][: len(sizes)]]
        axes.draw(0, sizes, [each.first_token.p99 for each in some], routing)
        axes.draw(1, sizes, [each.whole.p99 for each in some], routing)
    axes.save("replicas", logarithmic=True)
    return rows


Study: TypeAlias = Callable[[Profile, Path, int, float], Rows]
STUDIES: dict[str, Study] = {"load": load_study, "affinity": affinity_study, "scale": scale_study}


def simulate(
    profile: Profile, num_replicas: int, rate: float, policy: str, routing: str, seconds: float
) -> Figures:
    """``rate``: requests per second and replica; they come for ``seconds``."""
    fleet = Fleet(profile, num_replicas, speculative_of(policy), ROUTERS[routing](num_replicas))
    arrivals = Arrivals(rate * num_replicas, seconds, _TENANTS * num_replicas, seed=1)
    warm_up = min(_WARM_UP, seconds / 4)
    return figures(fleet.run(poisson(profile.kinds, arrivals)), warm_up=warm_up)


def plain_capacity(profile: Profile) -> float:
    """Requests per second that a replica serves without drafts: of as many as its seats and its queue
    take, which all come at once."""
    num_open = profile.engine.max_num_seqs + profile.engine.max_num_waiting
    rate = 1e4
    fleet = Fleet(profile, 1, speculative_of("none"), ROUTERS["round_robin"](1))
    arrivals = Arrivals(rate, num_open / rate, _TENANTS)
    return figures(fleet.run(poisson(profile.kinds, arrivals))).requests_per_second


def with_prefixes(profile: Profile, num_tokens: int) -> Profile:
    """The same traffic behind a system prompt of each tenant and kind."""
    kinds = {
        name: replace(
            kind,
            prefix=num_tokens,
            lengths=tuple((prompt + num_tokens, answer) for prompt, answer in kind.lengths),
        )
        for name, kind in profile.kinds.items()
    }
    return replace(profile, kinds=kinds)
