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

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import neg
from typing import NamedTuple

from drafters.tree import DraftTree
from engine.request.params import SpeculativeParams
from engine.request.stats import Reason
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


class _Choice(NamedTuple):
    num_nodes: int
    plain: Plain
    marginal_seconds: float
    """Mean cost of a granted row; of the next one where none was granted."""


@gamma_policy(
    "goodput",
    "fastest for the batch",
    [
        "num_speculative_tokens",
        "min_speculative_tokens",
        "max_speculative_tokens",
        "target_acceptance_rate",
    ],
    weighs_cost=True,
)
class GoodputPolicy(GammaPolicy):
    """Between ``min_speculative_tokens`` (granted whatever it costs) and ``max_speculative_tokens`` per
    request; ``num_speculative_tokens`` is the most until a draft of the request has been verified. With
    a ``target_acceptance_rate``, the mean survival of what a request is granted never falls below it.
    Drafts that are granted whole or not at all come last, at the price of the rows that are left, by
    what they gain on average (``AllOrNothing``); their drafter has fitted them to
    ``max_speculative_tokens``.

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
        return 0 if self._backoff.is_resting(request_id) else params.max_speculative_tokens

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        most = [self._most(candidate) for candidate in candidates]
        offers = _Offers(candidates, most, load.num_spare_rows)
        load = load.with_nodes(offers.num_floor_nodes, offers.floor_gain)
        choice = self._choose(offers, load)
        granted = offers.take(choice.num_nodes)
        left = load.with_nodes(choice.num_nodes, sum(offers.pool[: choice.num_nodes]))
        judge = _Judge(self.cost, load, self._hysteresis)
        grants = []
        for rank, (candidate, nodes) in enumerate(zip(candidates, granted, strict=True)):
            if candidate.all_or_nothing and candidate.tree.token_ids:
                grant, left = self._all_or_nothing.grant(candidate, left)
                grants.append(grant)
                continue
            reason = self._why(candidate, offers.of[rank], len(nodes), most[rank], judge)
            grants.append(Grant(nodes, reason))
            if candidate.is_asked and candidate.max_nodes > 0:
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
            params.max_speculative_tokens
            if started
            else max(params.min_speculative_tokens, params.num_speculative_tokens)
        )
        return min(wanted, params.max_speculative_tokens, candidate.max_nodes)

    def _choose(self, offers: _Offers, load: Load) -> _Choice:
        limit = min(len(offers.pool), load.num_spare_rows)
        table = self.cost.step_seconds_table(
            load.num_rows, limit, load.num_kv_tokens, load.num_requests
        )
        drafting = load.draft_seconds
        tokens = accumulate(islice(offers.pool, limit), initial=load.expected_tokens)
        rates = [total / (drafting + seconds) for total, seconds in zip(tokens, table, strict=True)]
        best = rates.index(max(rates))  # the fewest nodes among equals
        chosen = self._hold(offers, rates, best, load) if limit > 0 else 0
        rows = max(chosen, 1)
        marginal = (table[min(rows, limit)] - table[0]) / rows
        return _Choice(chosen, Plain(load.expected_tokens, table[0]), marginal)

    def _hold(self, offers: _Offers, rates: Sequence[float], best: int, load: Load) -> int:
        """The allocation of the step before, where the best one does not beat it by enough."""
        pool = offers.pool
        if self._held_survival is not None:
            held = min(bisect_right(pool, -self._held_survival, key=neg), len(rates) - 1)
            if held == best:
                return best
            num_changed = len(set(offers.pool_ranks[min(held, best) : max(held, best)]))
            enough = self._hysteresis * min(1.0, num_changed / max(1, load.num_sampling_requests))
            if rates[held] >= rates[0] and rates[best] <= rates[held] * (1.0 + enough):
                return held
        last_in = pool[best - 1] if best > 0 else 1.0
        first_out = pool[best] if best < len(pool) else 0.0
        self._held_survival = (last_in + first_out) / 2
        return best

    def _why(
        self, candidate: DraftCandidate, offer: _Offer, count: int, most: int, judge: _Judge
    ) -> Reason:
        num_offered = len(candidate.tree.token_ids)
        if num_offered == 0:
            resting = self._backoff.is_resting(candidate.request_id)
            return "low_acceptance" if resting else _why_empty(candidate)
        if count == num_offered:
            return ""
        if count == len(offer.survivals):
            # Fewer than there could be: by its target acceptance rate.
            return "policy" if count < min(most, num_offered) else "client_cap"
        return judge.why(offer.survivals, count)


class _Offer(NamedTuple):
    """The nodes that one request may be granted, in its order of grant: likeliest first, then shallow
    before deep, then the earlier node. Any first part of it is closed under parents."""

    nodes: Sequence[int]
    survivals: Sequence[float]
    depths: Sequence[int]
    num_floor: int = 0
    """So many of these are granted for certain."""


_NO_OFFER = _Offer((), (), ())


class _Offers:
    """The nodes that all requests may be granted: ``of[rank]`` one by one, and together, without what is
    granted for certain, as the ``pool``: the survivals of all nodes, likeliest first, then shallow
    before deep, then the older request, then the earlier node; ``pool_ranks`` says whose they are.

    Of each request these are at most ``most[rank]`` nodes, fewer where its ``target_acceptance_rate``
    says so. Its first ``min_speculative_tokens``, as long as there are ``num_spare`` rows, are granted
    for certain.
    """

    def __init__(
        self, candidates: Sequence[DraftCandidate], most: Sequence[int], num_spare: int
    ) -> None:
        self.of: list[_Offer] = []
        self.num_floor_nodes = 0
        self.floor_gain = 0.0
        for candidate, limit in zip(candidates, most, strict=True):
            offer = _NO_OFFER
            if limit > 0 and candidate.tree.token_ids and not candidate.all_or_nothing:
                offer = _offer(candidate, limit, num_spare - self.num_floor_nodes)
            if offer.num_floor:
                self.num_floor_nodes += offer.num_floor
                self.floor_gain += sum(offer.survivals[: offer.num_floor])
            self.of.append(offer)
        self.pool, self.pool_ranks = self._pooled()

    def _pooled(self) -> tuple[Sequence[float], Sequence[int]]:
        survivals: list[float] = []
        depths: list[int] = []
        ranks: list[int] = []
        for rank, offer in enumerate(self.of):
            if not offer.nodes:
                continue
            floor = offer.num_floor
            survivals += offer.survivals[floor:] if floor else offer.survivals
            depths += offer.depths[floor:] if floor else offer.depths
            ranks += [rank] * (len(offer.survivals) - floor)
        if not ranks or ranks[0] == ranks[-1]:
            return survivals, ranks  # one request's are in order
        order = sorted(range(len(ranks)), key=depths.__getitem__)
        order.sort(key=survivals.__getitem__, reverse=True)  # stable, as the sort before it
        return [survivals[index] for index in order], [ranks[index] for index in order]

    def take(self, num_nodes: int) -> list[list[int]]:
        """Returns, by rank, the nodes granted for certain and those among the first ``num_nodes`` of the
        pool."""
        num_taken = [offer.num_floor for offer in self.of]
        for rank in self.pool_ranks[:num_nodes]:
            num_taken[rank] += 1
        return [
            sorted(offer.nodes[:count]) if count else []
            for offer, count in zip(self.of, num_taken, strict=True)
        ]


def _offer(candidate: DraftCandidate, limit: int, num_spare: int) -> _Offer:
    tree = candidate.tree
    nodes, survivals, depths = _in_order(tree, candidate.survivals)
    params = candidate.params
    end = min(limit, len(nodes))
    if params.target_acceptance_rate is not None:
        end = _num_at_rate(survivals[:end], params.target_acceptance_rate)
    floor = min(params.min_speculative_tokens, end, num_spare)
    return _Offer(nodes[:end], survivals[:end], depths[:end], floor)


def _in_order(
    tree: DraftTree, survivals: Sequence[float]
) -> tuple[Sequence[int], list[float], Sequence[int]]:
    """All nodes in their order of grant, with survivals and depths. Estimates may round upwards: a node
    counts no more than its parent, or it would be granted without it."""
    num_nodes = len(survivals)
    if tree.is_chain():
        return range(num_nodes), list(accumulate(survivals, min)), range(1, num_nodes + 1)
    bounded: list[float] = []
    for parent, survival in zip(tree.parents, survivals, strict=True):
        bounded.append(min(survival, bounded[parent]) if parent >= 0 else survival)
    depths = tree.depths()
    order = sorted(range(num_nodes), key=depths.__getitem__)
    order.sort(key=bounded.__getitem__, reverse=True)
    return order, [bounded[node] for node in order], [depths[node] for node in order]


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
        """Gamma that the same policy would grant if the request had the engine to itself."""
        if len(self._alone) <= len(offer):
            context = self._load.num_kv_tokens // max(1, self._load.num_requests)
            self._alone = self._cost.step_seconds_table(1, len(offer), context, 1)
        totals = accumulate(offer, initial=1.0)
        rates = [total / seconds for total, seconds in zip(totals, self._alone, strict=False)]
        rates[0] *= self._enough
        return rates.index(max(rates))


def _num_at_rate(survivals: Sequence[float], target_rate: float) -> int:
    """Returns how many of the likeliest nodes are expected to be accepted at ``target_rate`` or
    better."""
    for num_nodes, total in enumerate(accumulate(survivals), start=1):
        if total < target_rate * num_nodes:
            return num_nodes - 1
    return len(survivals)


def _why_empty(candidate: DraftCandidate) -> Reason:
    return why_nothing_offered(candidate, candidate.params.max_speculative_tokens, "client_cap")
