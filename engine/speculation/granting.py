"""Grants parts of proposals, by the requests' gamma policies, as far as there are blocks to lease.

Drafts yield before requests do. A draft that pays makes the queue shorter, and policies that weigh cost
grant no others. Those that do not grant drafts whatever the rows cost, and so does a
``min_speculative_tokens``: these are unpaid, and shed while many requests wait. Blocks need no rule: a
lease takes none but free ones, and gives them back before the next request is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.config import ShedSpeculation
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.cost import CostModel
from engine.speculation.drafting import drafting_of, worth_of
from engine.speculation.gamma.policy import DraftCandidate, GammaPolicy, Grant, Load, grant_all
from engine.speculation.parts import Asked
from kvpool.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Shedding:
    """Which drafts yield from ``queue`` waiting requests on."""

    which: ShedSpeculation = "never"
    queue: int = 1

    def sheds(self, num_waiting: int, weighs_cost: bool) -> bool:
        """Returns whether a request whose policy ``weighs_cost`` or does not goes without a draft."""
        if self.which == "never" or num_waiting < self.queue:
            return False
        return self.which == "all" or not weighs_cost


class Granting:
    """Decides which nodes of a step's proposals are verified."""

    def __init__(
        self,
        policies: Mapping[str, GammaPolicy],
        cost: CostModel,
        pool: BlockPool,
        shedding: Shedding,
    ) -> None:
        self._policies, self._cost, self._pool = policies, cost, pool
        self._shedding = shedding

    def grant(
        self, drafting: Sequence[ScheduledRequest], plan: Plan, prompt_seconds: float
    ) -> None:
        """Sets ``draft`` and ``reason`` of the requests. ``prompt_seconds``: what the step's prompts
        take."""
        asked = Counter(drafting_of(each).name for each in drafting if each.num_asked > 0)
        offered = []
        for each in drafting:
            if each.proposal.token_ids or each.num_asked <= 0:
                offered.append(each)
            else:
                each.reason = "no_match"
        candidates = [self._candidate(each, plan.num_waiting) for each in offered]
        grants = grant_all(self._policies, candidates, self._load(plan, prompt_seconds, asked))
        for each, grant in zip(offered, grants, strict=True):
            self._take(each, grant)

    def say_prices(self, asked: Asked, plan: Plan, prompt_seconds: float) -> None:
        """Says of requests whose drafters are asked how likely a node has to be: where one policy grants
        by nothing but survivals and costs, and survivals are those of the drafters. Of several requests
        all are believed to get as many nodes."""
        requests = [each for group in asked.values() for each, _ in group]
        policies = {drafting_of(each).policy for each in requests}
        floors = any(each.request.params.speculative.min_speculative_tokens for each in requests)
        if len(policies) != 1 or floors:
            return
        load = self._load(plan, prompt_seconds, {name: len(asked[name]) for name in asked})
        num_nodes = sum(each.num_asked for each in requests)
        parts = (part for each in requests for part in drafting_of(each).parts)
        # Only models weigh a round of theirs against rows beside others.
        first_only = not any(part.drafter.info.needs.draft_slots for part in parts)
        prices = policies.pop().row_prices(load, num_nodes, len(requests), first_only)
        for each in requests:
            bound = each.request.params.speculative.target_acceptance_rate
            if bound is None and each.sampling.verification == "match":
                each.row_prices = prices

    def _load(self, plan: Plan, prompt_seconds: float, asked: Mapping[str, int]) -> Load:
        """``asked``: for how many requests each drafter is asked, the time of whose call is spent."""
        seconds = self._cost.draft_seconds
        return Load(
            plan.num_rows,
            plan.spare_rows,
            plan.num_sampling,
            float(plan.num_sampling),
            plan.num_context_tokens,
            len(plan.scheduled),
            draft_seconds=sum(seconds(drafter, number) for drafter, number in asked.items()),
            prompt_seconds=prompt_seconds,
        )

    def _candidate(self, each: ScheduledRequest, num_waiting: int) -> DraftCandidate:
        request, drafting = each.request, drafting_of(each)
        wanted = request.params.speculative
        if wanted.min_speculative_tokens and self._shedding.sheds(num_waiting, weighs_cost=False):
            wanted = replace(wanted, min_speculative_tokens=0)
        num_nodes = max(0, min(each.max_nodes, each.max_depth))
        tree = drafting.acceptance.granted_from(each.proposal, num_nodes)
        return DraftCandidate(
            request.request_id,
            wanted,
            tree,
            worth_of(drafting, tree, wanted) if tree.token_ids else (),
            each.max_nodes,
            all_or_nothing=drafting.is_whole,
            gain=drafting.gain.expect() if drafting.is_whole else 0.0,
            is_first=not drafting.has_verified,
        )

    def _take(self, each: ScheduledRequest, grant: Grant) -> None:
        """Leases blocks for the nodes that are granted; those for which there are some are the draft."""
        nodes, num_offered = grant.nodes, len(each.proposal)
        if nodes and nodes[-1] >= num_offered:  # policies may see more than there is
            nodes = [node for node in nodes if node < num_offered]
        is_late = each.reason == "masks" and len(nodes) >= each.max_nodes
        if each.reason != "shed" and not is_late:
            each.reason = "" if 0 < num_offered == len(nodes) else grant.reason
        room = lease(self._pool, each.request, len(nodes))
        if room < len(nodes):
            nodes, each.reason = nodes[:room], "no_kv"
        each.draft = each.proposal.subtree(nodes)


def lease(pool: BlockPool, request: Request, num_nodes: int) -> int:
    """Leases slots for draft nodes after the request's tokens, and places for their inputs where layers
    keep a state. Returns for how many nodes there is room."""
    if not num_nodes:
        return 0
    num_known = len(request.token_ids) + request.sampling.num_unseen
    covered = pool.allocate_draft(request.request_id, num_known + num_nodes)
    room, states = max(0, min(num_nodes, covered - num_known)), pool.states
    return room if states is None else len(states.lend(request.request_id, room))
