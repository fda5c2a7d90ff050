"""One grant per decoding request and step, whichever policies the requests chose."""

from __future__ import annotations

from collections.abc import Sequence

from engine.params import SpeculativeParams
from engine.speculation.gamma.policy import (
    DraftCandidate,
    GammaPolicy,
    Grant,
    Load,
    StepCost,
    Traffic,
    registered_policies,
)

_UNLIMITED = 1 << 30


class GammaController:
    """Asks each policy in turn; what one grants is base load for the next.

    Those that weigh cost come last: the others grant regardless of it, so their rows are facts to them.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._policies: dict[str, GammaPolicy] = {
            info.name: info.kind(cost) for info in registered_policies()
        }
        self._policy_of: dict[str, GammaPolicy] = {}

    def open(self, request_id: str, params: SpeculativeParams, traffic: Traffic) -> None:
        """A request starts; ``forget`` ends it."""
        policy = self._policy_of[request_id] = self._policies[params.adaptive_depth]
        policy.open(request_id, traffic)

    def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:
        """How many nodes to ask the request's drafter for, before caps of length and KV."""
        policy = self._policy_of[request_id] = self._policies[params.adaptive_depth]
        return policy.num_to_propose(request_id, params)

    def weighs_cost(self, params: SpeculativeParams) -> bool:
        """Whether the request's policy asks what drafting costs; then a drafter should, too."""
        return self._policies[params.adaptive_depth].info.weighs_cost

    def grant(
        self,
        candidates: Sequence[DraftCandidate],
        num_base_rows: int,
        num_sampling_requests: int,
        num_kv_tokens: int,
        num_spare_rows: int = _UNLIMITED,
        num_requests: int | None = None,
    ) -> dict[str, Grant]:
        """A grant for every candidate; give them oldest first: the older wins a tie.

        ``num_base_rows``: anchors and prompt rows. ``num_kv_tokens``: context of all the step's
        ``num_requests`` requests (those that sample, if not told). ``num_spare_rows``: how many
        nodes the step has room for.
        """
        by_policy: dict[str, list[DraftCandidate]] = {}
        draft_seconds = 0.0
        for candidate in candidates:
            by_policy.setdefault(candidate.params.adaptive_depth, []).append(candidate)
            if candidate.is_asked and candidate.max_nodes > 0:
                draft_seconds += self._cost.draft_seconds(candidate.drafter)
        load = Load(
            num_base_rows,
            num_spare_rows,
            num_sampling_requests,
            float(num_sampling_requests),
            num_kv_tokens,
            num_sampling_requests if num_requests is None else num_requests,
            draft_seconds,
        )
        granted: dict[str, Grant] = {}
        for name, policy in self._policies.items():
            asking = by_policy.get(name)
            if asking is None:
                continue
            grants = policy.grant(asking, load)
            if len(granted) + len(grants) < len(candidates):
                load = _add(load, asking, grants)  # for those that come after it
            for grant in grants:
                granted[grant.request_id] = grant
                self._policy_of[grant.request_id] = policy
        return granted

    def observe(self, request_id: str, num_granted: int, num_accepted: int) -> None:
        """How a request's grant fared; once per step in which it sampled. Unknown ids are
        ignored."""
        policy = self._policy_of.get(request_id)
        if policy is not None:
            policy.observe(request_id, num_granted, num_accepted)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        policy = self._policy_of.pop(request_id, None)
        if policy is not None:
            policy.forget(request_id)


def _add(load: Load, candidates: Sequence[DraftCandidate], grants: Sequence[Grant]) -> Load:
    survivals = sum(
        candidate.survivals[node]
        for candidate, grant in zip(candidates, grants, strict=True)
        for node in grant.nodes
    )
    return load.with_nodes(sum(len(grant.nodes) for grant in grants), survivals)
