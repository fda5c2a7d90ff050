"""Estimates of how likely draft nodes are accepted, counted per request over a prior that all share.

The gamma policies ask; what was in fact emitted answers. Drafts that nobody verified are judged
too, by the tokens emitted later ("shadow" labels): under sample-and-match a node is accepted if and
only if the target's own token is the node's, so equality with the text is an unbiased label. It
costs no forward, and a request that stopped drafting can find out that drafting would pay again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from drafters.tree import FORCED, ROOT, DraftTree

# Deeper nodes share the counts of this depth, which bounds the tables.
MAX_DEPTH = 32


_DEPTHS = MAX_DEPTH + 1
"""Keys of a feature in a request's table: one per depth."""


@dataclass(slots=True)
class _Prior:
    """Discounted labels of all requests, accepted ones and all, and what they come to."""

    mean: float
    num_accepted: float = 0.0
    num_labels: float = 0.0


@dataclass(slots=True)
class _Counts:
    """Discounted labels of one request, and the prior of their feature."""

    prior: _Prior
    num_accepted: float = 0.0
    num_labels: float = 0.0


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
        self._priors: dict[str, dict[int, _Prior]] = {}

    def for_request(self, drafter: str) -> RequestAcceptance:
        """A new request's view, of the drafter with this name."""
        return RequestAcceptance(self, drafter)

    def priors(self, drafter: str) -> dict[int, _Prior]:
        """Returns a drafter's priors by feature, live."""
        return self._priors.setdefault(drafter, {})


@dataclass(slots=True)
class _Pending:
    """A proposal that the text has followed so far: ``node`` was reached, at ``depth``."""

    tree: DraftTree
    children: Mapping[int, Sequence[int]] | None = None
    """Nodes under each parent; None for a chain, which needs no list of them."""
    node: int = ROOT
    depth: int = 0

    def __post_init__(self) -> None:
        if not self.tree.is_chain():
            self.children = _children(self.tree)

    def under(self, node: int) -> Sequence[int]:
        """The children of a node."""
        if self.children is not None:
            return self.children.get(node, ())
        return (node + 1,) if node + 1 < len(self.tree.token_ids) else ()


class RequestAcceptance:
    """One request's estimates for one drafter: its own discounted labels over the shared prior.

    Keyed by (feature, depth); at most 64 features by ``MAX_DEPTH`` depths where drafters keep to 64
    features. Holds at most one proposal that waits for more text.
    """

    def __init__(self, estimator: AcceptanceEstimator, drafter: str) -> None:
        self.drafter = drafter
        self._estimator = estimator
        self._priors = estimator.priors(drafter)
        self._counts: dict[int, _Counts] = {}
        self._pending: _Pending | None = None

    def survivals(self, tree: DraftTree) -> list[float]:
        """Per node, the probability that it and all its ancestors are accepted.

        Never more than the parent's.
        """
        acceptances = self._acceptances(tree.features, tree.depths())
        if tree.is_chain():
            return list(accumulate(acceptances, mul))
        survivals: list[float] = []
        for parent, acceptance in zip(tree.parents, acceptances, strict=True):
            survivals.append(acceptance if parent == ROOT else survivals[parent] * acceptance)
        return survivals

    def _acceptances(self, features: Sequence[int], depths: Sequence[int]) -> list[float]:
        strength, initial = self._estimator.strength, self._estimator.initial
        own, priors = self._counts, self._priors
        acceptances = []
        for feature, depth in zip(features, depths, strict=True):
            if feature == FORCED:
                acceptances.append(1.0)
                continue
            counts = own.get(feature * _DEPTHS + (depth if depth < MAX_DEPTH else MAX_DEPTH))
            if counts is not None:
                believed = counts.num_accepted + strength * counts.prior.mean
                acceptances.append(believed / (counts.num_labels + strength))
            elif feature in priors:
                acceptances.append(priors[feature].mean)
            else:
                acceptances.append(initial)
        return acceptances

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
            newest = _Pending(tree)
            if self._follow(newest, emitted_token_ids) and self._pending is None:
                self._pending = newest

    def _follow(self, pending: _Pending, emitted_token_ids: Sequence[int]) -> bool:
        """Label along the text; whether nodes remain that later text can judge."""
        token_ids, features = pending.tree.token_ids, pending.tree.features
        under, node, depth = pending.under, pending.node, pending.depth
        for emitted in emitted_token_ids:
            depth += 1
            reached = None
            for child in under(node):
                accepted = token_ids[child] == emitted
                self._label(features[child], depth, accepted)
                if accepted:
                    reached = child
            if reached is None:
                return False
            node = reached
        pending.node, pending.depth = node, depth
        return bool(under(node))

    def _label(self, feature: int, depth: int, accepted: bool) -> None:
        if feature == FORCED:
            return
        key = feature * _DEPTHS + (depth if depth < MAX_DEPTH else MAX_DEPTH)
        counts = self._counts.get(key)
        estimator = self._estimator
        if counts is None:
            prior = self._priors.get(feature)
            if prior is None:
                prior = self._priors[feature] = _Prior(estimator.initial)
            counts = self._counts[key] = _Counts(prior)
        counts.num_accepted = counts.num_accepted * estimator.decay + accepted
        counts.num_labels = counts.num_labels * estimator.decay + 1.0
        prior = counts.prior
        prior.num_accepted = prior.num_accepted * estimator.shared_decay + accepted
        prior.num_labels = prior.num_labels * estimator.shared_decay + 1.0
        strength = estimator.strength
        believed = prior.num_accepted + strength * estimator.initial
        prior.mean = believed / (prior.num_labels + strength)


def _children(tree: DraftTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    return children
