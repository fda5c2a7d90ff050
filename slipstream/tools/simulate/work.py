"""Requests of a simulation, and traffic that comes at random: kinds, tenants and times."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.tools.simulate.profile import Kind

VOCAB_SIZE = 1 << 24
"""Token ids of simulated texts; the drafters' packed contexts hold no larger ones."""
NEVER_WRITTEN = VOCAB_SIZE - 2
"""A token that is in no text: what a wrong draft holds."""
_SHARED_FROM = 1 << 23
"""Tokens from here on begin the prompts of a tenant; those below are of one request alone."""


@dataclass(slots=True, eq=False)
class Work:
    """A request that comes ``at`` a time, in seconds from the begin, and its text, which is known
    beforehand. ``seed``: of what its drafts hit."""

    at: float
    kind: str
    tenant: str
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    seed: int = 0

    def luck(self) -> list[tuple[float, float]]:
        """Two numbers from 0 to 1 for each token of the answer: whether something is proposed there,
        and whether what is proposed is right. The same for every policy."""
        rng = random.Random(self.seed)
        return [(rng.random(), rng.random()) for _ in self.completion_token_ids]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that come at random, ``rate`` a second for ``seconds``. Of ``num_tenants`` the n-th sends
    in proportion to 1 / n ** ``zipf``."""

    rate: float
    seconds: float
    num_tenants: int = 1
    zipf: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what is no rate, time, number or exponent."""
        if not 0 < self.rate < math.inf or not 0 < self.seconds < math.inf:
            raise ValueError("rate and seconds must be above 0")
        if self.num_tenants < 1 or not 0 <= self.zipf < math.inf:
            raise ValueError("tenants must be at least 1, zipf at least 0")

    def __iter__(self) -> Iterator[tuple[float, int, tuple[float, float]]]:
        """Times, tenants, and two numbers from 0 to 1 with which to choose what is asked."""
        edges = _edges([1.0 / rank**self.zipf for rank in range(1, self.num_tenants + 1)])
        rng = np.random.default_rng(self.seed)
        at = rng.exponential(1.0 / self.rate)
        while at < self.seconds:
            of_tenant, first, second = rng.random(3).tolist()
            yield float(at), _chosen(edges, of_tenant), (first, second)
            at += rng.exponential(1.0 / self.rate)


def poisson(kinds: Mapping[str, Kind], arrivals: Arrivals) -> Iterator[Work]:
    """Requests of kinds by their shares, with synthetic texts."""
    names = list(kinds)
    edges = _edges([kinds[name].share for name in names])
    for serial, (at, tenant, (of_kind, of_length)) in enumerate(arrivals):
        index = _chosen(edges, of_kind)
        kind = kinds[names[index]]
        num_prompt, num_answer = kind.lengths[int(of_length * len(kind.lengths))]
        shared = tenant * len(names) + index
        yield Work(
            at,
            names[index],
            tenant_name(tenant),
            prompt_tokens(num_prompt, kind.prefix, shared, serial),
            own_tokens(serial, num_prompt, num_answer),
            seed=arrivals.seed * 1_000_003 + serial,
        )


def tenant_name(tenant: int) -> str:
    return f"tenant-{tenant}"


def prompt_tokens(num_tokens: int, num_shared: int, shared: int, serial: int) -> list[int]:
    """Returns a prompt whose first ``num_shared`` tokens are shared by all prompts of the same
    ``shared``."""
    first = _SHARED_FROM + shared * 7919 % (1 << 22)
    num_shared = min(num_shared, num_tokens)
    own = own_tokens(serial, 0, num_tokens - num_shared)
    return [*range(first, first + num_shared), *own]


def own_tokens(serial: int, start: int, num_tokens: int) -> range:
    """Returns tokens unique to one request; they do not recur in others for a long time."""
    first = serial * 4099 % (1 << 22) + start
    return range(first, first + num_tokens)


def _edges(weights: Sequence[float]) -> np.ndarray:
    edges: np.ndarray = np.cumsum(weights) / np.sum(weights)
    edges[-1] = 1.0
    return edges


def _chosen(edges: np.ndarray, chance: float) -> int:
    return int(np.searchsorted(edges, chance, side="right"))
