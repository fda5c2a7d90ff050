"""Grants the nodes that make the whole batch write most tokens per second.

All nodes of all requests are ranked by survival, and the first K* are granted, K* maximising

    (tokens expected so far + w_1 + .. + w_K) / (seconds of drafting + of a step with K more rows)

over every K, 0 included. This is exact for any cost of rows: survivals never grow downward, so the
first K are closed under parents, and no other K nodes have a larger sum (the scheduling objective
of DSpark and of vLLM's adaptive verification). Nodes of equal cost come for free; a node that only
fills padding but has no survival is not granted. Load needs no rule of its own: as rows get dearer,
K* falls to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.params import SpeculativeParams
from engine.speculation.gamma.backoff import AllOrNothing, Backoff, Plain
from engine.speculation.gamma.policy import (
    DraftCandidate,
    GammaPolicy,
    Grant,
    Load,
    StepCost,
    Traffic,
    gamma_policy,
    why_nothing_offered,
)
from engine.stats import Reason

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class _Choice(NamedTuple):
    num_nodes: int
    plain: Plain
    marginal_seconds: float
    """Mean cost of a granted row; of the next one where none was granted."""


@gamma_policy(
    "goodput",
    "fastest for the batch",
    ["num_draft_tokens", "min_draft_tokens", "max_draft_tokens", "target_acceptance_rate"],
    weighs_cost=True,
)
class GoodputPolicy(GammaPolicy):
    """Between ``min_draft_tokens`` (granted whatever it costs) and ``max_draft_tokens`` per request;
    ``num_draft_tokens`` is the most until a draft of the request has been verified. With a
    ``target_acceptance_rate``, the mean survival of what a request is granted never falls below it.
    Drafts that are granted whole or not at all come last, at the price of the rows that are left, by
    what they gain on average (``AllOrNothing``); their drafter has fitted them to ``max_draft_tokens``.

    Hysteresis: the last allocation is remembered as the survival down to which it went. It is kept
    while the best one gains no more than ``hysteresis`` on the tokens of the requests it would
    change, and never where granting nothing is better.
    """

    def __init__(self, cost: StepCost, hysteresis: float = 0.02) -> None:
        super().__init__(cost)
        self._hysteresis = hysteresis
        self._held_survival: float | None = None
        self._backoff = Backoff(cost)
        self._all_or_nothing = AllOrNothing(cost, self._backoff)
        self._verified: set[str] = set()

    def open(self, request_id: str, traffic: Traffic) -> None:
        self._backoff.open(request_id, traffic)

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        return 0 if self._backoff.is_resting(request_id) else params.max_draft_tokens

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        most = [self._most(candidate) for candidate in candidates]
        offers = Offers(candidates, most, load.num_spare_rows)
        load = load._replace(
            num_rows=load.num_rows + offers.num_floor_nodes,
            num_spare_rows=load.num_spare_rows - offers.num_floor_nodes,
            expected_tokens=load.expected_tokens + offers.floor_gain,
        )
        choice = self._choose(offers, load)
        granted = offers.take(choice.num_nodes)
        left = load._replace(
            num_rows=load.num_rows + choice.num_nodes,
            num_spare_rows=load.num_spare_rows - choice.num_nodes,
            expected_tokens=load.expected_tokens
            + float(offers.pool_survivals[: choice.num_nodes].sum()),
        )
        judge = _Judge(self.cost, load, self._hysteresis)
        grants = []
        for rank, (candidate, nodes) in enumerate(zip(candidates, granted, strict=True)):
            if candidate.all_or_nothing and candidate.tree.token_ids:
                grant, left = self._all_or_nothing.grant(candidate, left)
                grants.append(grant)
                continue
            reason = self._why(candidate, offers, rank, len(nodes), most[rank], judge)
            grants.append(Grant(candidate.request_id, nodes, reason))
            if candidate.max_nodes > 0:
                seconds = len(nodes) * choice.marginal_seconds
                self._backoff.charge(candidate, seconds, choice.plain)
        self._backoff.tick()
        return grants

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:
        """Acceptance of nodes reaches this policy through the survivals; only the first draft is
        news, and what drafts granted whole gained."""
        if num_granted:
            self._verified.add(request_id)
            self._backoff.earn(request_id, num_accepted)
            self._all_or_nothing.observe(request_id, num_accepted)

    def forget(self, request_id: str) -> None:
        self._verified.discard(request_id)
        self._backoff.forget(request_id)
        self._all_or_nothing.forget(request_id)

    def _most(self, candidate: DraftCandidate) -> int:
        params = candidate.params
        started = candidate.request_id in self._verified
        wanted = (
            params.max_draft_tokens
            if started
            else max(params.min_draft_tokens, params.num_draft_tokens)
        )
        return min(wanted, params.max_draft_tokens, candidate.max_nodes)

    def _choose(self, offers: Offers, load: Load) -> _Choice:
        survivals = offers.pool_survivals
        limit = min(len(survivals), load.num_spare_rows)
        table = np.asarray(
            self.cost.step_seconds_table(
                load.num_rows, limit, load.num_kv_tokens, load.num_requests
            )
        )
        tokens = np.cumsum(np.concatenate(([load.expected_tokens], survivals[:limit])))
        rates: _Floats = tokens / (load.draft_seconds + table)
        best = int(rates.argmax())  # the fewest nodes among equals
        chosen = self._hold(offers, rates, best, load) if limit > 0 else 0
        rows = max(chosen, 1)
        marginal = float(table[min(rows, limit)] - table[0]) / rows
        return _Choice(chosen, Plain(load.expected_tokens, float(table[0])), marginal)

    def _hold(self, offers: Offers, rates: _Floats, best: int, load: Load) -> int:
        """The allocation of the step before, where the best one does not beat it by enough."""
        survivals = offers.pool_survivals
        if self._held_survival is not None:
            held = int(np.searchsorted(-survivals, -self._held_survival, side="right"))
            held = min(held, len(rates) - 1)
            if held == best:
                return best
            moved = offers.pool_ranks[min(held, best) : max(held, best)]
            num_changed = len(set(moved.tolist()))
            enough = self._hysteresis * min(1.0, num_changed / max(1, load.num_sampling_requests))
            if rates[held] >= rates[0] and rates[best] <= rates[held] * (1.0 + enough):
                return held
        last_in = float(survivals[best - 1]) if best > 0 else 1.0
        first_out = float(survivals[best]) if best < len(survivals) else 0.0
        self._held_survival = (last_in + first_out) / 2
        return best

    def _why(
        self,
        candidate: DraftCandidate,
        offers: Offers,
        rank: int,
        count: int,
        most: int,
        judge: _Judge,
    ) -> Reason:
        num_offered = len(candidate.tree)
        if num_offered == 0:
            resting = self._backoff.is_resting(candidate.request_id)
            return "low_acceptance" if resting else _why_empty(candidate)
        if count == num_offered:
            return ""
        offer = offers.of(rank)
        if count == len(offer):
            if count < min(most, num_offered):
                return "policy"  # its target acceptance rate
            return candidate.cap_reason if most == candidate.max_nodes else "client_cap"
        return judge.why(offer, count)


class Offers:
    """What requests may be granted, as flat arrays over all candidates' nodes in their order of grant:
    likeliest first, then shallow before deep, then the older request, then the earlier node. Any first
    part of it is closed under parents.

    Of each request these are at most ``most[rank]``, fewer where its ``target_acceptance_rate`` says
    so. Its first ``min_draft_tokens``, as long as there are ``num_spare`` rows, are granted for certain;
    the others make the pool.
    """

    def __init__(
        self,
        candidates: Sequence[DraftCandidate],
        most: Sequence[int],
        num_spare: int,
    ) -> None:
        sizes = [
            0 if limit <= 0 or each.all_or_nothing else len(each.tree.token_ids)
            for each, limit in zip(candidates, most, strict=True)
        ]
        self._starts = [0, *accumulate(sizes)]
        survivals, depths = _flat(candidates, sizes, self._starts)
        ranks = np.repeat(np.arange(len(sizes)), sizes)
        order = np.lexsort((depths, -survivals))  # stable: then by rank and node
        # The same order request by request: where each request's nodes begin is known from their number.
        own = order[np.argsort(ranks[order], kind="stable")]
        self._ends, floors = self._bounds(candidates, most, sizes, survivals[own], num_spare)
        places = np.empty_like(order)
        places[own] = np.arange(len(own)) - np.repeat(self._starts[:-1], sizes)
        kept = places < np.repeat(self._ends, sizes)
        certain = places < np.repeat(floors, sizes)
        self._survivals, self._ranks = survivals, ranks
        self._own = own
        self._certain = np.flatnonzero(certain)
        self._pool: _Ints = order[(kept & ~certain)[order]]
        self.pool_survivals: _Floats = survivals[self._pool]
        self.pool_ranks: _Ints = ranks[self._pool]
        self.num_floor_nodes = len(self._certain)
        self.floor_gain = float(survivals[self._certain].sum())

    def _bounds(
        self,
        candidates: Sequence[DraftCandidate],
        most: Sequence[int],
        sizes: Sequence[int],
        survivals: _Floats,
        num_spare: int,
    ) -> tuple[list[int], list[int]]:
        """How many nodes of each request may be granted, and how many are for certain; ``survivals`` are
        falling within each request."""
        ends, floors = [], []
        for candidate, limit, size, start in zip(
            candidates, most, sizes, self._starts[:-1], strict=True
        ):
            end = min(limit, size)
            target_rate = candidate.params.target_acceptance_rate
            if target_rate is not None and end > 0:
                end = _num_at_rate(survivals[start : start + end], target_rate)
            floor = min(candidate.params.min_draft_tokens, end, num_spare)
            num_spare -= floor
            ends.append(max(end, 0))
            floors.append(floor)
        return ends, floors

    def of(self, rank: int) -> list[float]:
        """The survivals of one request's nodes, likeliest first."""
        start = self._starts[rank]
        survivals: list[float] = self._survivals[
            self._own[start : start + self._ends[rank]]
        ].tolist()
        return survivals

    def take(self, num_nodes: int) -> list[list[int]]:
        """By rank, the nodes granted for certain and those among the first ``num_nodes`` of the pool."""
        taken = np.sort(np.concatenate((self._certain, self._pool[:num_nodes])))
        ends = np.searchsorted(taken, self._starts).tolist()
        flat = taken.tolist()
        return [
            [node - start for node in flat[first:last]]
            for start, (first, last) in zip(self._starts, pairwise(ends), strict=False)
        ]


def _flat(
    candidates: Sequence[DraftCandidate], sizes: Sequence[int], starts: Sequence[int]
) -> tuple[_Floats, _Ints]:
    """Survivals and depths of all nodes, request by request. Estimates may round upwards: a node counts
    no more than its parent, or it would be granted without it."""
    offering = [each for each, size in zip(candidates, sizes, strict=True) if size]
    num_nodes = starts[-1]
    survivals = np.fromiter(
        chain.from_iterable(each.survivals for each in offering), np.float64, num_nodes
    )
    depths = np.fromiter(
        chain.from_iterable(each.tree.depths() for each in offering), np.int64, num_nodes
    )
    parents = np.fromiter(
        chain.from_iterable(each.tree.parents for each in offering), np.int64, num_nodes
    )
    own = np.flatnonzero(parents >= 0)
    above = (parents + np.repeat(starts[:-1], sizes))[own]
    while (survivals[own] > survivals[above]).any():
        survivals[own] = np.minimum(survivals[own], survivals[above])
    return survivals, depths


class _Judge:
    """Tells a request that is slowed by its neighbours from one that drafts badly."""

    def __init__(self, cost: StepCost, load: Load, hysteresis: float) -> None:
        self._cost = cost
        self._load = load
        self._enough = 1.0 + hysteresis
        self._alone: Sequence[float] = ()

    def why(self, offer: Sequence[float], count: int) -> Reason:
        num_neighbours = self._load.num_rows - 1
        pays_alone = num_neighbours > 0 and self._gamma_alone(offer) > count
        return "overload" if pays_alone else "low_acceptance"

    def _gamma_alone(self, offer: Sequence[float]) -> int:
        """What the same policy would grant if the request had the engine to itself."""
        if len(self._alone) <= len(offer):
            context = self._load.num_kv_tokens // max(1, self._load.num_requests)
            self._alone = self._cost.step_seconds_table(1, len(offer), context, 1)
        tokens = 1.0
        best, best_rate = 0, self._enough / self._alone[0]
        for num_nodes, survival in enumerate(offer, 1):
            tokens += survival
            rate = tokens / self._alone[num_nodes]
            if rate > best_rate:
                best, best_rate = num_nodes, rate
        return best


def _num_at_rate(survivals: _Floats, target_rate: float) -> int:
    """How many of the likeliest nodes are expected to be accepted at ``target_rate`` or better."""
    wanted = target_rate * np.arange(1, len(survivals) + 1)
    short = np.flatnonzero(np.cumsum(survivals) < wanted)
    return int(short[0]) if len(short) else len(survivals)


def _why_empty(candidate: DraftCandidate) -> Reason:
    return why_nothing_offered(candidate, candidate.params.max_draft_tokens, "client_cap")
