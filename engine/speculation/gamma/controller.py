"""One grant per decoding request and step, whichever policies the requests chose."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request.params import SpeculativeParams
from engine.speculation.gamma.policy import (
    DraftCandidate,
    GammaPolicy,
    Grant,
    Load,
    StepCost,
    Traffic,
    registered_policies,
)


class GammaController:
    """Asks each policy in turn; what one grants is base load for the next.

    Those that weigh cost come last: the others grant regardless of it, so their rows are facts to them.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._policies: dict[str, GammaPolicy] = {
            info.name: info.kind(cost) for info in registered_policies()
        }

    def open(self, request_id: str, params: SpeculativeParams, traffic: Traffic) -> None:
        """A request starts; ``forget`` ends it."""
        self._policies[params.adaptive_depth].open(request_id, traffic)

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        """Returns how many nodes to ask the request's drafter for, before caps of length and KV."""
        return self._policies[params.adaptive_depth].num_to_propose(request_id, params)

    def weighs_cost(self, params: SpeculativeParams) -> bool:
        """Returns whether the request's policy asks what drafting costs; then a drafter should, too."""
        return self._policies[params.adaptive_depth].info.weighs_cost

    def grant(self, candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        """A grant for every candidate, in order; give them oldest first: the older wins a tie. The time
        that their drafters took is added to the load."""
        spent = sum(
            self._cost.draft_seconds(each.drafter)
            for each in candidates
            if each.is_asked and each.max_nodes > 0
        )
        load = load._replace(draft_seconds=load.draft_seconds + spent)
        granted: dict[int, Grant] = {}
        for name, policy in self._policies.items():
            index = [i for i, each in enumerate(candidates) if each.params.adaptive_depth == name]
            if not index:
                continue
            asking = [candidates[i] for i in index]
            grants = policy.grant(asking, load)
            granted.update(zip(index, grants, strict=True))
            if len(granted) < len(candidates):
                load = _add(load, asking, grants)  # for those that come after it
        return [granted[i] for i in range(len(candidates))]

    def observe(
        self, request_id: str, params: SpeculativeParams, num_granted: int, num_accepted: int
    ) -> None:
        """Tells the policy how a request's grant fared; once per step in which it sampled."""
        self._policies[params.adaptive_depth].observe(request_id, num_granted, num_accepted)

    def forget(self, request_id: str, params: SpeculativeParams) -> None:
        """The request is over."""
        self._policies[params.adaptive_depth].forget(request_id)


def _add(load: Load, candidates: Sequence[DraftCandidate], grants: Sequence[Grant]) -> Load:
    survivals = sum(
        candidate.survivals[node]
        for candidate, grant in zip(candidates, grants, strict=True)
        for node in grant.nodes
    )
    return load.with_nodes(sum(grant.gamma for grant in grants), survivals)
