"""Estimates of how likely drafts are to be accepted, for the gamma policies: plain Python.

Under "match" a draft is accepted if it equals the text, so any proposal can be judged, and survivals
may use whatever the drafter says of its tokens. Drafts that were sampled and are accepted with a
probability differ in both: equality with the text is not acceptance; and whether a
token is verified may depend on everything but itself, or its distribution is biased.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import Observation
from drafters.estimator import AcceptanceEstimator
from drafters.tree import FORCED, DraftTree, chain
from engine.request.params import VerificationName

_MAX_RANK = 15
_PATIENCE = 8
"""Proposals in a row of which nothing was verified, before one is believed in as at the start."""


class Acceptance:
    """One request's estimates and their labels: whole proposals are judged by the text."""

    def __init__(
        self, estimator: AcceptanceEstimator, drafter: str, initial: Sequence[float] = ()
    ) -> None:
        self._estimator = estimator
        self._estimates = estimator.for_request(drafter, initial)

    @property
    def is_waiting(self) -> bool:
        """Whether steps without a proposal teach anything: a former one waits for more of the text."""
        return self._estimates.is_waiting

    def granted_from(self, proposal: DraftTree, num_nodes: int) -> DraftTree:  # noqa: ARG002
        """The tree that a policy is shown for a proposal of which ``num_nodes`` were asked."""
        return proposal

    def survivals(self, tree: DraftTree) -> list[float]:
        """Per node, the probability that it and its ancestors are accepted; never above the parent's. A
        drafter that says it of its own tree is believed."""
        return list(tree.survivals) or self._estimates.survivals(tree)

    def observe(self, proposal: DraftTree, seen: Observation) -> None:
        """Learn from a step: all that was proposed, and what came of the verified part."""
        if proposal.survivals and not self.is_waiting:
            return
        self._estimates.label_against(proposal, seen.emitted_token_ids)


class SampledAcceptance(Acceptance):
    """Judges verified nodes by the accepted path, and knows nodes by depth and rank among their
    siblings only.

    Siblings never rise in survival, so that what a policy grants is, under each parent, the first
    of those that were sampled. A chain may have ended early for what its last token is, so policies
    see it as long as was asked for, after the tokens that a grammar forces at its begin. Trees they see
    as they are: there the drafter has to sample a shape that does not depend on its tokens
    (``DraftTree``).
    """

    def __init__(self, estimator: AcceptanceEstimator, drafter: str) -> None:
        super().__init__(estimator, drafter)
        self._num_unverified = 0

    def granted_from(self, proposal: DraftTree, num_nodes: int) -> DraftTree:
        if not proposal.token_ids or not proposal.is_chain():
            return proposal
        features = [0] * num_nodes
        for node, feature in enumerate(proposal.features[:num_nodes]):
            if feature != FORCED:
                break
            features[node] = FORCED
        return chain(features, features)

    def survivals(self, tree: DraftTree) -> list[float]:
        ranked = _ranked(tree)
        if self._num_unverified >= _PATIENCE:
            return [self._estimator.initial**depth for depth in ranked.depths()]
        survivals = self._estimates.survivals(ranked)
        least: dict[int, float] = {}
        for node, parent in enumerate(tree.parents):
            bound = min(least.get(parent, 1.0), survivals[parent] if parent >= 0 else 1.0)
            least[parent] = survivals[node] = min(survivals[node], bound)
        return survivals

    def observe(self, proposal: DraftTree, seen: Observation) -> None:
        if seen.tree.token_ids:
            self._num_unverified = 0
        elif proposal.token_ids:
            self._num_unverified = self._num_unverified % _PATIENCE + 1
        # Of a run that was trimmed it is not known what would have been accepted after it.
        if len(seen.emitted_token_ids) == len(seen.path):
            self._estimates.update(_ranked(seen.tree), seen.path)


def new_acceptance(
    estimator: AcceptanceEstimator,
    drafter: str,
    verification: VerificationName,
    initial: Sequence[float] = (),
) -> Acceptance:
    """Estimates of one request. Different verifications share no counts. ``initial``: the belief by
    feature before any node was judged."""
    if verification == "match":
        return Acceptance(estimator, drafter, initial)
    return SampledAcceptance(estimator, f"{drafter} {verification}")


def _ranked(tree: DraftTree) -> DraftTree:
    """The same nodes, each with its rank among its siblings for a feature."""
    num_siblings: dict[int, int] = {}
    ranks = []
    for parent, feature in zip(tree.parents, tree.features, strict=True):
        rank = num_siblings.get(parent, 0)
        num_siblings[parent] = rank + 1
        ranks.append(FORCED if feature == FORCED else min(rank, _MAX_RANK))
    return DraftTree(tree.token_ids, tree.parents, ranks)
