"""Drafts under a grammar: forced tokens are drafted for nothing, and forbidden ones cost no row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafters.tree import EMPTY, FORCED, ROOT, DraftTree, TreeBuilder
from engine.grammar.constraint import GrammarConstraint, Path
from engine.request.params import VerificationName
from engine.schedule.request import ScheduledRequest
from engine.speculation.overlay import Overlay


def constrained(
    tree: DraftTree,
    grammar: GrammarConstraint,
    max_nodes: int,
    depth: int,
    verification: VerificationName,
) -> DraftTree:
    """A drafter's proposal, as the grammar leaves it: first the tokens that are forced after the text,
    then the drafter's nodes that are allowed, then what is forced after its paths.

    Forced nodes have the feature ``FORCED``. At most ``max_nodes`` nodes, none deeper than ``depth``.

    Whether a sampled node is verified must not depend on its token (``DraftTree``). A chain that is cut
    before a forbidden token keeps to that if its distributions become those of the allowed tokens: they
    are what the rest was sampled from, given that it is allowed. In a tree of several branches policies
    grant by its shape, so a sampled one keeps all its nodes, or gives way to what is forced.
    """
    if verification != "match" and not tree.is_chain():
        if not grammar.forced():
            return tree
        tree = EMPTY
    # What the drafter says of its nodes stays; else the engine estimates all of them.
    shaping = _Shaping(grammar, depth, Overlay() if tree.survivals else TreeBuilder())
    shaping.add_forced(ROOT)
    shaping.add_allowed(tree)
    return shaping.builder.best(max_nodes, depth=depth)


class _Shaping:
    """The tree in the making, and the path of each of its nodes."""

    def __init__(self, grammar: GrammarConstraint, depth: int, builder: TreeBuilder) -> None:
        self._grammar = grammar
        self._depth = depth
        self._paths: dict[int, Path] = {ROOT: ()}
        self.builder = builder

    def add_forced(self, node: int) -> None:
        """The run that has to follow a node."""
        if self._grammar.time.is_spent():
            return
        for token_id in self._grammar.forced(self._paths[node]):
            if len(self._paths[node]) >= self._depth:
                return
            survival = 1.0 if node == ROOT else self.builder.weights[node]
            node = self._add(node, token_id, FORCED, survival)

    def add_allowed(self, tree: DraftTree) -> None:
        """The nodes of a drafter's tree that are allowed, and what is forced after its leaves."""
        places = {ROOT: ROOT}
        inner = set()
        for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if self._grammar.time.is_spent():
                break
            above = places.get(parent)
            if above is None or not self._grammar.accepts((*self._paths[above], token_id)):
                continue
            survival = tree.survivals[node] if tree.survivals else 1.0
            places[node] = self._add(above, token_id, tree.features[node], survival)
            inner.add(above)
        for node, place in places.items():
            if place not in inner:
                self.add_forced(place)
            elif node in tree.draft_probs and not self._grammar.forced(self._paths[place]):
                allowed = self._grammar.allowed(self._paths[place])
                assert allowed is not None, "it has a child"
                self.builder.draft_probs[place] = _restricted(tree.draft_probs[node], allowed)

    def _add(self, parent: int, token_id: int, feature: int, survival: float) -> int:
        node = self.builder.add(parent, token_id, feature, survival)
        self._paths[node] = (*self._paths[parent], token_id)
        return node


def _restricted(probs: Any, allowed: NDArray[np.bool_]) -> Any:
    """A distribution (``DraftTree.draft_probs`` has its two forms), given that its token is allowed; one
    that is has been sampled, so there are some."""
    if isinstance(probs, Mapping):
        kept = {token_id: each for token_id, each in probs.items() if allowed[token_id]}
        total = sum(kept.values())
        return {token_id: each / total for token_id, each in kept.items()}
    left = probs * probs.new_tensor(allowed)
    return left / left.sum()


def num_forced(tree: DraftTree, nodes: Sequence[int]) -> int:
    """Returns how many of these nodes the grammar forces."""
    return sum(tree.features[node] == FORCED for node in nodes)


def constrain(drafting: Sequence[ScheduledRequest]) -> None:
    """Make the proposals of requests with a grammar what it leaves of them."""
    for each in drafting:
        sampling = each.request.sampling
        if sampling.grammar is None or each.max_nodes <= 0:
            continue
        try:
            each.proposal = constrained(
                each.proposal,
                sampling.grammar,
                each.max_nodes,
                each.max_depth,
                sampling.verification,
            )
        except Exception:
            # One that gave up does so again where rows are masked: for its request alone.
            each.proposal = EMPTY


def counts(each: ScheduledRequest) -> tuple[int, int]:
    """Returns how many nodes were verified, which a shortage of blocks may have made fewer than were
    granted, and how many of them were accepted; without those that a grammar forced, which say nothing of
    the drafter."""
    assert each.outcome is not None
    num_verified, num_accepted = len(each.draft), each.outcome.num_accepted
    if not num_verified:
        return 0, 0
    forced = num_forced(each.draft, range(num_verified))
    if forced:
        num_verified -= forced
        num_accepted -= num_forced(each.draft, [row - 1 for row in each.outcome.path[1:]])
    return num_verified, num_accepted
