"""Estimates of how likely draft nodes are accepted, counted per request over a prior that all share.

The gamma policies ask; the emitted tokens answer. Unverified drafts are judged, too, by the tokens
emitted later ("shadow" labels): under sample-and-match a node is accepted if and only if the target's
own token is the node's, so equality with the text is an unbiased label. It costs no forward, and a
request that stopped drafting can find out that drafting would pay again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafters.tree import FORCED, ROOT, DraftTree

# Deeper nodes share the counts of this depth, which bounds the tables.
MAX_DEPTH = 32


@dataclass(slots=True)
class DiscountedMean:
    """A mean in which the latest values count most."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, decay: float) -> None:
        self.total = self.total * decay + value
        self.weight = self.weight * decay + 1.0

    def over(self, prior: float, strength: float) -> float:
        """Returns the mean of the values and of a prior that weighs as much as ``strength`` values."""
        return (self.total + strength * prior) / (self.weight + strength)


class AcceptanceEstimator:
    """The shared part: a prior per (drafter, feature), learned from every request's labels.

    ``initial`` is the belief where nothing is known yet: high enough that a fresh request tries. It
    and the shared prior each weigh as much as ``strength`` labels, so that some ten refusals in a
    row end a request's drafting. ``decay`` discounts a request's labels, ``shared_decay`` the
    shared ones, at each further label of the same key. Only counts are shared, never tokens.
    """

    def __init__(
        self,
        initial: float = 0.5,
        strength: float = 4.0,
        decay: float = 0.98,
        shared_decay: float = 0.995,
    ) -> None:
        self.initial = initial
        self.strength = strength
        self.decay = decay
        self.shared_decay = shared_decay
        self._priors: dict[str, dict[int, DiscountedMean]] = {}

    def for_request(self, drafter: str, initial: Sequence[float] = ()) -> RequestAcceptance:
        """A new request's view, of the drafter with this name. ``initial``: the belief by feature, where
        it is another."""
        return RequestAcceptance(self, drafter, initial)

    def priors(self, drafter: str) -> dict[int, DiscountedMean]:
        """Returns the labels of all requests of a drafter by feature, live."""
        return self._priors.setdefault(drafter, {})


class RequestAcceptance:
    """One request's estimates for one drafter: its own discounted labels over the shared prior.

    Keyed by (feature, depth); at most 64 features by ``MAX_DEPTH`` depths where drafters keep to 64
    features. Holds at most one proposal that waits for more text.
    """

    def __init__(
        self, estimator: AcceptanceEstimator, drafter: str, initial: Sequence[float] = ()
    ) -> None:
        self.drafter = drafter
        self._estimator, self._initial = estimator, initial
        self._priors = estimator.priors(drafter)
        self._own: dict[tuple[int, int], DiscountedMean] = {}
        """Labels by feature and depth."""
        self._pending: _Followed | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a proposal waits for more text."""
        return self._pending is not None

    def survivals(self, tree: DraftTree, least: float = 0.0) -> list[float]:
        """Per node, the probability that it and all its ancestors are accepted; never more than the
        parent's. Of a chain only the first, and those before one below ``least``."""
        survivals: list[float] = []
        if tree.is_chain():
            survival = 1.0
            for depth, feature in enumerate(tree.features, start=1):
                survival *= self._acceptance(feature, depth)
                if survival < least and survivals:  # one at least, to be judged
                    break
                survivals.append(survival)
            return survivals
        for parent, feature, depth in zip(tree.parents, tree.features, tree.depths(), strict=True):
            acceptance = self._acceptance(feature, depth)
            survivals.append(acceptance if parent == ROOT else survivals[parent] * acceptance)
        return survivals

    def _acceptance(self, feature: int, depth: int) -> float:
        if feature == FORCED:
            return 1.0
        known = feature < len(self._initial)
        belief = self._initial[feature] if known else self._estimator.initial
        for labels in (self._priors.get(feature), self._own.get(_key(feature, depth))):
            if labels is not None:
                belief = labels.over(belief, self._estimator.strength)
        return belief

    def update(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Label verified nodes by the verifier's accepted path (rows, as in ``Observation``).

        A node is labelled if its parent was reached. For verifiers whose acceptance is not equality
        with the emitted text; do not also pass the same tree to ``label_against``.
        """
        accepted = {row - 1 for row in path}  # row 0 becomes ROOT
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths(), strict=True)):
            if parent in accepted:
                self._label(tree.features[node], depth, node in accepted)

    def label_against(self, tree: DraftTree, emitted_token_ids: Sequence[int]) -> None:
        """Label the whole proposal of a step, granted or not, by the tokens that step emitted.

        Call it once per step, with an empty tree where nothing was proposed. Nodes deeper than the
        emitted run wait: the proposal is kept and labelled on as later calls bring the text, while
        newer proposals are labelled by their own step's tokens only, until it is fully judged. So
        the cost of a step is at most two proposals.
        """
        if self._pending is not None and not self._follow(self._pending, emitted_token_ids):
            self._pending = None
        if tree.token_ids:
            newest = _Followed(tree)
            if self._follow(newest, emitted_token_ids) and self._pending is None:
                self._pending = newest

    def _follow(self, proposal: _Followed, emitted_token_ids: Sequence[int]) -> bool:
        """Labels nodes along the text; returns whether some remain that later text can judge."""
        tree = proposal.tree
        for emitted in emitted_token_ids:
            proposal.depth += 1
            reached = None
            for child in proposal.children.get(proposal.node, ()):
                accepted = tree.token_ids[child] == emitted
                self._label(tree.features[child], proposal.depth, accepted)
                if accepted:
                    reached = child
            if reached is None:
                return False
            proposal.node = reached
        return proposal.node in proposal.children

    def _label(self, feature: int, depth: int, accepted: bool) -> None:
        if feature == FORCED:
            return
        own = self._own.setdefault(_key(feature, depth), DiscountedMean())
        own.add(accepted, self._estimator.decay)
        shared = self._priors.setdefault(feature, DiscountedMean())
        shared.add(accepted, self._estimator.shared_decay)


class _Followed:
    """A proposal that the text has followed up to ``node``, at ``depth``."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            self.children.setdefault(parent, []).append(node)
        self.node, self.depth = ROOT, 0


def _key(feature: int, depth: int) -> tuple[int, int]:
    return feature, min(depth, MAX_DEPTH)
