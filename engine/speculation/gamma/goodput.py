"""Grants the nodes that make the whole batch write most tokens per second.

All nodes of all requests are ranked by survival, and the first K* are granted, K* maximising

    (tokens expected so far + w_1 + .. + w_K) / (seconds of drafting + of a step with K more rows)

over every K, 0 included. This is exact for any cost of rows: survivals never grow downward, so the
first K are closed under parents, and no other K nodes have a larger sum (the scheduling objective
of DSpark and of vLLM's adaptive verification). Nodes of equal cost come for free; a node that only
fills padding but has no survival is not granted. Load needs no rule of its own: as rows get dearer,
K* falls to 0. What a step's prompts take is left out of its seconds: they are read with drafts or
without, and a token that is written beside them saves no more time than another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import neg
from typing import NamedTuple

from drafters.tree import DraftTree
from engine.request.params import SpeculativeParams
from engine.request.stats import Reason
from engine.speculation.gamma.policy import (
    DraftCandidate,
    GammaPolicy,
    Grant,
    Load,
    StepCost,
    gamma_policy,
    why_nothing_offered,
)


class _Offer(NamedTuple):
    """The nodes that one request may be granted, at most ``most`` of them, in its order of grant:
    likeliest first, then shallow before deep, then the earlier node. Any first part of it is closed under
    parents. The first ``num_certain`` are granted whatever they cost. ``best_left``: the survival of the
    best that is left out, since it cannot pay. ``is_at_rate``: a target acceptance rate bounds
    ``most``."""

    most: int
    nodes: Sequence[int] = ()
    survivals: Sequence[float] = ()
    depths: Sequence[int] = ()
    num_certain: int = 0
    best_left: float = 0.0
    is_at_rate: bool = False


_NOTHING = _Offer(0)


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
    Drafts whose rows are there for later steps (the window of Lookahead, the guesses of Jacobi) come
    last, whole or not at all: that their rows pay was weighed before they were asked for (``Ledger``).

    Hysteresis: the last allocation is remembered as the survival down to which it went. It is kept
    while the best one gains no more than ``hysteresis`` on the tokens of the requests it would
    change, and never where granting nothing is better.
    """

    def __init__(self, cost: StepCost, hysteresis: float = 0.02) -> None:
        super().__init__(cost)
        self._hysteresis = hysteresis
        self._held_survival: float | None = None

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:  # noqa: ARG002
        return params.max_speculative_tokens

    def row_prices(
        self, load: Load, num_nodes: int, stride: int = 1, first_only: bool = False
    ) -> Sequence[float]:
        table = self._table(load, min(num_nodes, load.num_spare_rows))
        if first_only:
            return [_least_survival(load, table)]
        rate = load.expected_tokens / (load.other_seconds + table[0])
        return [rate / stride * each for each in _least_steepness(table[::stride])]

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        offers: list[_Offer] = []
        limit = min(sum(len(each.survivals) for each in candidates), load.num_spare_rows)
        table = self._table(load, limit)
        least = 0.0
        # What is granted whatever it costs would change the rate.
        if not any(each.params.min_speculative_tokens for each in candidates):
            least = _least_survival(load, table)
        num_certain, gain = 0, 0.0
        for candidate in candidates:
            offer = self._offered(candidate, load.num_spare_rows - num_certain, least)
            if offer.num_certain:
                num_certain += offer.num_certain
                gain += sum(offer.survivals[: offer.num_certain])
            offers.append(offer)
        if num_certain:
            load = load.with_nodes(num_certain, gain)
            table = self._table(load, max(0, limit - num_certain))
        pool, ranks = _pooled(offers)
        best_left = max((offer.best_left for offer in offers), default=0.0)
        num_nodes = self._choose(pool, ranks, load, table, best_left)
        counts = [offer.num_certain for offer in offers]
        for rank in ranks[:num_nodes]:
            counts[rank] += 1
        left = load.with_nodes(num_nodes, sum(pool[:num_nodes]))
        alone = self._table_alone(candidates, load)
        grants = []
        for candidate, offer, count in zip(candidates, offers, counts, strict=True):
            if candidate.all_or_nothing and candidate.tree.token_ids:
                grant, left = _grant_whole(candidate, left)
            else:
                reason = self._why(candidate, offer, count, alone)
                grant = Grant(sorted(offer.nodes[:count]), reason)
            grants.append(grant)
        return grants

    def _table(self, load: Load, num_nodes: int) -> Sequence[float]:
        """Returns the seconds of the step by the number of nodes that are granted yet."""
        return self.cost.step_seconds_table(
            load.num_rows, num_nodes, load.num_kv_tokens, load.num_requests
        )

    @staticmethod
    def _offered(candidate: DraftCandidate, num_spare: int, least: float) -> _Offer:
        """Returns the nodes that the request may be granted."""
        if not candidate.tree.token_ids:
            return _NOTHING
        params = candidate.params
        wanted = params.max_speculative_tokens
        if candidate.is_first:
            first = max(params.min_speculative_tokens, params.num_speculative_tokens)
            wanted = min(first, wanted)
        return _offer(candidate, min(wanted, candidate.max_nodes), num_spare, least)

    def _choose(
        self,
        pool: Sequence[float],
        ranks: Sequence[int],
        load: Load,
        table: Sequence[float],
        best_left: float,
    ) -> int:
        """Returns how many nodes of the pool to grant."""
        limit = min(len(pool), load.num_spare_rows)
        others = load.other_seconds
        tokens = accumulate(islice(pool, limit), initial=load.expected_tokens)
        rates = [total / (others + seconds) for total, seconds in zip(tokens, table, strict=False)]
        best = rates.index(max(rates))  # the fewest nodes among equals
        if limit <= 0 and not best_left:
            return 0
        return self._hold(pool, ranks, rates, best, load, best_left)

    def _hold(
        self,
        pool: Sequence[float],
        ranks: Sequence[int],
        rates: Sequence[float],
        best: int,
        load: Load,
        best_left: float,
    ) -> int:
        """Returns the allocation of the step before where the best one does not beat it by enough."""
        if self._held_survival is not None and self._held_survival >= best_left:
            held = min(bisect_right(pool, -self._held_survival, key=neg), len(rates) - 1)
            if held == best:
                return best
            num_changed = len(set(ranks[min(held, best) : max(held, best)]))
            enough = self._hysteresis * min(1.0, num_changed / max(1, load.num_sampling_requests))
            if rates[held] >= rates[0] and rates[best] <= rates[held] * (1.0 + enough):
                return held
        last_in = pool[best - 1] if best > 0 else 1.0
        first_out = pool[best] if best < len(pool) else best_left
        self._held_survival = (last_in + first_out) / 2
        return best

    def _table_alone(self, candidates: Sequence[DraftCandidate], load: Load) -> Sequence[float]:
        """Returns the seconds of a request's steps by its drafts, if it had the engine to itself; nothing
        where it has."""
        if load.num_rows <= 1:
            return ()
        most = max(len(each.survivals) for each in candidates)
        context = load.num_kv_tokens // max(1, load.num_requests)
        return self.cost.step_seconds_table(1, most, context, 1)

    def _why(
        self, candidate: DraftCandidate, offer: _Offer, count: int, alone: Sequence[float]
    ) -> Reason:
        num_offered = len(candidate.tree.token_ids)
        if num_offered == 0:
            most = candidate.params.max_speculative_tokens
            return why_nothing_offered(candidate, most, "client_cap")
        if count == num_offered:
            return ""
        if count == offer.most:
            # Fewer than there could be: by its target acceptance rate.
            return "policy" if offer.is_at_rate else "client_cap"
        # The likeliest of the rest tells whether it would have more, if it had the engine to itself.
        is_slowed = len(alone) > count + 1 and self._pays_alone(offer, count, alone)
        return "overload" if is_slowed else "low_acceptance"

    def _pays_alone(self, offer: _Offer, count: int, alone: Sequence[float]) -> bool:
        """Returns whether one node more than ``count`` would be granted to the request alone."""
        gain = sum(offer.survivals[:count])
        more = offer.survivals[count] if count < len(offer.survivals) else offer.best_left
        hesitation = 1.0 if count else 1.0 + self._hysteresis
        without = hesitation * (1.0 + gain) / alone[count]
        return (1.0 + gain + more) / alone[count + 1] > without


def _least_survival(load: Load, table: Sequence[float]) -> float:
    """Returns a survival up to which no node pays, whatever else is granted: the batch writes at least as
    fast without drafts as a step gets longer by, where its rows are cheapest."""
    rows = enumerate(islice(table, 1, None), start=1)
    row_seconds = min(((seconds - table[0]) / number for number, seconds in rows), default=0.0)
    return row_seconds * load.expected_tokens / (load.other_seconds + table[0])


def _least_steepness(table: Sequence[float]) -> list[float]:
    """Returns, for all but the last, how much a number rises per further one on average up to any of
    those behind it, where that is least."""
    found: list[float] = []
    ends = [len(table) - 1]  # of the lines below all that is behind, the nearest last
    for start in range(len(table) - 2, -1, -1):
        low = table[start]
        steepness = (table[ends[-1]] - low) / (ends[-1] - start)
        while len(ends) > 1:
            further = (table[ends[-2]] - low) / (ends[-2] - start)
            if further > steepness:
                break
            ends.pop()
            steepness = further
        ends.append(start)
        found.append(steepness)
    return found[::-1]


def _grant_whole(candidate: DraftCandidate, load: Load) -> tuple[Grant, Load]:
    """Returns the grant of a draft that is not empty, all of it or nothing, and the load with it."""
    params, num_nodes = candidate.params, len(candidate.tree)
    gain = max(candidate.gain, sum(candidate.survivals))
    reason: Reason = ""
    if num_nodes > min(candidate.max_nodes, params.max_speculative_tokens):
        reason = "client_cap"
    elif num_nodes > load.num_spare_rows:
        reason = "overload"
    elif gain < (params.target_acceptance_rate or 0.0) * num_nodes:
        reason = "policy"
    if reason:
        return Grant((), reason), load
    return Grant(range(num_nodes), ""), load.with_nodes(num_nodes, gain)


def _offer(candidate: DraftCandidate, most: int, num_spare: int, least: float) -> _Offer:
    tree, params = candidate.tree, candidate.params
    if candidate.all_or_nothing:
        return _NOTHING
    rate = params.target_acceptance_rate
    nodes, survivals, depths, best_left = _in_order(
        tree, candidate.survivals, 0.0 if rate else least
    )
    end = max(0, min(most, len(nodes)))
    is_at_rate = False
    if rate is not None:
        allowed = _num_at_rate(survivals[:end], rate)
        is_at_rate, end, most = allowed < end, allowed, min(most, allowed)
    num_certain = min(params.min_speculative_tokens, end, num_spare)
    return _Offer(
        most, nodes[:end], survivals[:end], depths[:end], num_certain, best_left, is_at_rate
    )


def _in_order(
    tree: DraftTree, survivals: Sequence[float], least: float
) -> tuple[Sequence[int], list[float], Sequence[int], float]:
    """Returns the nodes above ``least`` in their order of grant, with survivals and depths, and the
    largest survival of the others. Estimates may round upwards: a node counts no more than its parent, or
    it would be granted without it."""
    num_nodes = len(survivals)
    if tree.is_chain():
        falling = list(accumulate(survivals, min))
        end = bisect_left(falling, -least, key=neg) if least else num_nodes
        rest = falling[end] if end < num_nodes else 0.0
        return range(end), falling[:end], range(1, end + 1), rest
    bounded: list[float] = []
    depths: list[int] = []
    kept: list[int] = []
    left = 0.0
    for node, (parent, survival) in enumerate(zip(tree.parents, survivals, strict=True)):
        if parent >= 0:
            survival = min(survival, bounded[parent])
        bounded.append(survival)
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
        if survival > least or not least:
            kept.append(node)
        else:
            left = max(left, survival)
    kept.sort(key=depths.__getitem__)
    kept.sort(key=bounded.__getitem__, reverse=True)
    return kept, [bounded[node] for node in kept], [depths[node] for node in kept], left


def _num_at_rate(survivals: Sequence[float], target_rate: float) -> int:
    """Returns how many of the likeliest nodes are expected to be accepted at ``target_rate`` or
    better."""
    for num_nodes, total in enumerate(accumulate(survivals), start=1):
        if total < target_rate * num_nodes:
            return num_nodes - 1
    return len(survivals)


def _pooled(offers: Sequence[_Offer]) -> tuple[Sequence[float], Sequence[int]]:
    """Returns the survivals of all that is not granted for certain, likeliest first, then shallow before
    deep, then the older request, then the earlier node; and the ranks of their requests."""
    survivals: list[float] = []
    depths: list[int] = []
    ranks: list[int] = []
    for rank, offer in enumerate(offers):
        survivals += offer.survivals[offer.num_certain :]
        depths += offer.depths[offer.num_certain :]
        ranks += [rank] * (len(offer.survivals) - offer.num_certain)
    if not ranks or ranks[0] == ranks[-1]:
        return survivals, ranks  # one request's are in order
    order = sorted(range(len(ranks)), key=depths.__getitem__)
    order.sort(key=survivals.__getitem__, reverse=True)  # stable, as the sort before it
    return [survivals[index] for index in order], [ranks[index] for index in order]
