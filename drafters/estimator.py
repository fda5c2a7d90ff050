"""How likely is a draft node to be accepted? Counted, per request, with a prior all requests share.

The gamma policies ask; what was in fact emitted answers. Drafts that nobody verified are judged
too, by the tokens emitted later ("shadow" labels): under sample-and-match a node is accepted if and
only if the target's own token is the node's, so equality with the text is an unbiased label. It
costs no forward, and a request that stopped drafting can find out that drafting would pay again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafters.tree import ROOT, DraftTree

# Deeper nodes share the counts of this depth, which bounds the tables.
MAX_DEPTH = 32


@dataclass(slots=True)
class _Counts:
    """Discounted labels: accepted ones, and all."""

    num_accepted: float = 0.0
    num_labels: float = 0.0

    def add(self, accepted: bool, decay: float) -> None:
        self.num_accepted = self.num_accepted * decay + accepted
        self.num_labels = self.num_labels * decay + 1.0


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
        self._shared_decay = shared_decay
        self._counts: dict[tuple[str, int], _Counts] = {}

    def for_request(self, drafter: str) -> RequestAcceptance:
        """A new request's view, of the drafter with this name."""
        return RequestAcceptance(self, drafter)

    def prior(self, drafter: str, feature: int) -> float:
        """What a request without labels of its own believes."""
        counts = self._counts.get((drafter, feature))
        if counts is None:
            return self.initial
        pseudo_accepted = self.strength * self.initial
        return (counts.num_accepted + pseudo_accepted) / (counts.num_labels + self.strength)

    def label(self, drafter: str, feature: int, accepted: bool) -> None:
        """Count one label towards the prior."""
        key = drafter, feature
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts()
        counts.add(accepted, self._shared_decay)


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
        self._counts: dict[tuple[int, int], _Counts] = {}
        self._pending: _Pending | None = None

    def acceptance(self, feature: int, depth: int) -> float:
        """Probability that such a node is accepted, given that its parent was. ``depth`` from 1."""
        prior = self._estimator.prior(self.drafter, feature)
        counts = self._counts.get((feature, depth if depth < MAX_DEPTH else MAX_DEPTH))
        if counts is None:
            return prior
        strength = self._estimator.strength
        return (counts.num_accepted + strength * prior) / (counts.num_labels + strength)

    def survivals(self, tree: DraftTree) -> list[float]:
        """Per node, the probability that it and all its ancestors are accepted.

        Never more than the parent's.
        """
        survivals: list[float] = []
        depths: list[int] = []
        for parent, feature in zip(tree.parents, tree.features, strict=True):
            if parent == ROOT:
                depths.append(1)
                survivals.append(self.acceptance(feature, 1))
            else:
                depth = depths[parent] + 1
                depths.append(depth)
                survivals.append(survivals[parent] * self.acceptance(feature, depth))
        return survivals

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
        for emitted in emitted_token_ids:
            pending.depth += 1
            reached = None
            for node in pending.under(pending.node):
                accepted = token_ids[node] == emitted
                self._label(features[node], pending.depth, accepted)
                if accepted:
                    reached = node
            if reached is None:
                return False
            pending.node = reached
        return bool(pending.under(pending.node))

    def _label(self, feature: int, depth: int, accepted: bool) -> None:
        key = feature, depth if depth < MAX_DEPTH else MAX_DEPTH
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts()
        counts.add(accepted, self._estimator.decay)
        self._estimator.label(self.drafter, feature, accepted)


def _children(tree: DraftTree) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    return children
