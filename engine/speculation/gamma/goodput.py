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
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from engine.params import SpeculativeParams
from engine.speculation.gamma.backoff import AllOrNothing, Backoff
from engine.speculation.gamma.policy import (
    DraftCandidate,
    GammaPolicy,
    Grant,
    Load,
    StepCost,
    gamma_policy,
    why_nothing_offered,
)
from engine.stats import Reason


class _Node(NamedTuple):
    """Sorts as granted: likeliest first, then shallow before deep, then the older request."""

    negative_survival: float
    depth: int
    rank: int
    """Of its request among the candidates."""
    node: int


class _Choice(NamedTuple):
    num_nodes: int
    tokens_per_second: float
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

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        return 0 if self._backoff.is_resting(request_id) else params.max_draft_tokens

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        offers = [
            _likeliest(candidate, rank, self._most(candidate))
            for rank, candidate in enumerate(candidates)
        ]
        floors, pool = _split(candidates, offers, load.num_spare_rows)
        load = _with_floors(load, offers, floors)
        choice = self._choose(pool, load)
        counts = floors
        for node in islice(pool, choice.num_nodes):
            counts[node.rank] += 1
        left = _with_chosen(load, pool, choice.num_nodes)
        judge = _Judge(self.cost, load, self._hysteresis)
        grants = []
        for candidate, offer, count in zip(candidates, offers, counts, strict=True):
            if candidate.all_or_nothing and candidate.tree.token_ids:
                grant, left = self._all_or_nothing.grant(candidate, left)
                grants.append(grant)
                continue
            nodes = sorted(node.node for node in offer[:count])
            reason = self._why(candidate, offer, count, judge)
            grants.append(Grant(candidate.request_id, nodes, reason))
            gain = -sum(node.negative_survival for node in offer[:count])
            cost = count * choice.marginal_seconds
            self._backoff.record(candidate, gain, choice.tokens_per_second, cost)
        return grants

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:
        """Acceptance of nodes reaches this policy through the survivals; only the first draft is
        news, and what drafts granted whole gained."""
        if num_granted:
            self._verified.add(request_id)
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

    def _choose(self, pool: Sequence[_Node], load: Load) -> _Choice:
        limit = min(len(pool), load.num_spare_rows)
        table = self.cost.step_seconds_table(
            load.num_rows, limit, load.num_kv_tokens, load.num_requests
        )
        tokens, spent = load.expected_tokens, load.draft_seconds
        rates = [tokens / (spent + table[0])]
        best, best_rate = 0, rates[0]
        for num_nodes, node in enumerate(islice(pool, limit), 1):
            tokens -= node[0]
            rate = tokens / (spent + table[num_nodes])
            rates.append(rate)
            if rate > best_rate:
                best, best_rate = num_nodes, rate
        chosen = self._hold(pool, rates, best, load) if limit > 0 else 0
        rows = max(chosen, 1)
        marginal = (table[min(rows, limit)] - table[0]) / rows
        return _Choice(chosen, rates[chosen], marginal)

    def _hold(self, pool: Sequence[_Node], rates: Sequence[float], best: int, load: Load) -> int:
        """The allocation of the step before, where the best one does not beat it by enough."""
        if self._held_survival is not None:
            held = bisect_right(pool, -self._held_survival, key=itemgetter(0))
            held = min(held, len(rates) - 1)
            if held == best:
                return best
            moved = islice(pool, min(held, best), max(held, best))
            num_changed = len({node.rank for node in moved})
            enough = self._hysteresis * min(1.0, num_changed / max(1, load.num_sampling_requests))
            if rates[held] >= rates[0] and rates[best] <= rates[held] * (1.0 + enough):
                return held
        last_in = -pool[best - 1].negative_survival if best > 0 else 1.0
        first_out = -pool[best].negative_survival if best < len(pool) else 0.0
        self._held_survival = (last_in + first_out) / 2
        return best

    def _why(
        self, candidate: DraftCandidate, offer: Sequence[_Node], count: int, judge: _Judge
    ) -> Reason:
        num_offered = len(candidate.tree)
        if num_offered == 0:
            resting = self._backoff.is_resting(candidate.request_id)
            return "low_acceptance" if resting else _why_empty(candidate)
        if count == num_offered:
            return ""
        if count == len(offer):
            most = self._most(candidate)
            if count < min(most, num_offered):
                return "policy"  # its target acceptance rate
            return candidate.cap_reason if most == candidate.max_nodes else "client_cap"
        return judge.why(offer, count)


class _Judge:
    """Tells a request that is slowed by its neighbours from one that drafts badly."""

    def __init__(self, cost: StepCost, load: Load, hysteresis: float) -> None:
        self._cost = cost
        self._load = load
        self._enough = 1.0 + hysteresis
        self._alone: Sequence[float] = ()

    def why(self, offer: Sequence[_Node], count: int) -> Reason:
        num_neighbours = self._load.num_rows - 1
        pays_alone = num_neighbours > 0 and self._gamma_alone(offer) > count
        return "overload" if pays_alone else "low_acceptance"

    def _gamma_alone(self, offer: Sequence[_Node]) -> int:
        """What the same policy would grant if the request had the engine to itself."""
        if len(self._alone) <= len(offer):
            context = self._load.num_kv_tokens // max(1, self._load.num_requests)
            self._alone = self._cost.step_seconds_table(1, len(offer), context, 1)
        tokens = 1.0
        best, best_rate = 0, self._enough / self._alone[0]
        for num_nodes, node in enumerate(offer, 1):
            tokens -= node[0]
            rate = tokens / self._alone[num_nodes]
            if rate > best_rate:
                best, best_rate = num_nodes, rate
        return best


def _likeliest(candidate: DraftCandidate, rank: int, most: int) -> list[_Node]:
    """The nodes that the request's own bounds allow, as granted: each prefix is closed under
    parents."""
    if most <= 0 or candidate.all_or_nothing or not candidate.tree.token_ids:
        return []
    survivals: list[float] = []
    depths: list[int] = []
    nodes: list[_Node] = []
    make = tuple.__new__
    for index, (parent, survival) in enumerate(
        zip(candidate.tree.parents, candidate.survivals, strict=True)
    ):
        depth = 1
        if parent >= 0:
            depth += depths[parent]
            # Estimates may round upwards; a child above its parent would be granted without it.
            above = survivals[parent]
            survival = above if survival > above else survival
        survivals.append(survival)
        depths.append(depth)
        nodes.append(make(_Node, (-survival, depth, rank, index)))
    nodes.sort()
    del nodes[most:]
    target_rate = candidate.params.target_acceptance_rate
    if target_rate is not None:
        del nodes[_num_at_rate(nodes, target_rate) :]
    return nodes


def _num_at_rate(nodes: Sequence[_Node], target_rate: float) -> int:
    """How many of the likeliest nodes are expected to be accepted at ``target_rate`` or better."""
    expected = 0.0
    for num_nodes, node in enumerate(nodes):
        expected -= node.negative_survival
        if expected < target_rate * (num_nodes + 1):
            return num_nodes
    return len(nodes)


def _split(
    candidates: Sequence[DraftCandidate], offers: Sequence[Sequence[_Node]], num_spare: int
) -> tuple[list[int], list[_Node]]:
    """How many nodes each request gets for certain, and the rest of all offers in order of
    grant."""
    floors: list[int] = []
    pool: list[_Node] = []
    for candidate, offer in zip(candidates, offers, strict=True):
        floor = min(candidate.params.min_draft_tokens, len(offer), num_spare)
        num_spare -= floor
        floors.append(floor)
        pool += offer[floor:] if floor else offer
    pool.sort()
    return floors, pool


def _with_floors(load: Load, offers: Sequence[Sequence[_Node]], floors: Sequence[int]) -> Load:
    num_nodes = sum(floors)
    if num_nodes == 0:
        return load
    gain = -sum(
        node.negative_survival
        for offer, floor in zip(offers, floors, strict=True)
        for node in offer[:floor]
    )
    return load._replace(
        num_rows=load.num_rows + num_nodes,
        num_spare_rows=load.num_spare_rows - num_nodes,
        expected_tokens=load.expected_tokens + gain,
    )


def _with_chosen(load: Load, pool: Sequence[_Node], num_nodes: int) -> Load:
    return load._replace(
        num_rows=load.num_rows + num_nodes,
        num_spare_rows=load.num_spare_rows - num_nodes,
        expected_tokens=load.expected_tokens
        - sum(node.negative_survival for node in islice(pool, num_nodes)),
    )


def _why_empty(candidate: DraftCandidate) -> Reason:
    return why_nothing_offered(candidate, candidate.params.max_draft_tokens, "client_cap")
