"""The draft tree: guessed tokens and how they hang together.

Node ``i`` holds ``token_ids[i]`` and hangs under node ``parents[i]``, or under the root (the
anchor, the last emitted token) where the parent is ``ROOT``. Parents come before children and
siblings carry distinct tokens; drafters put their likeliest chain first, because accepting it then
costs no KV copy. A chain is a tree of width 1. Plain Python: no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import count
from typing import Any, NamedTuple

ROOT = -1

FORCED = -1
"""The feature of nodes that no drafter put there, and of which it has nothing to learn: a grammar leaves
nothing else, or they were written while it was not asked. They are accepted where their parents are."""


def depths_of(parents: Sequence[int]) -> list[int]:
    """Returns the depth of every node; children of the root have depth 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def chain_length(parents: Sequence[int]) -> int:
    """Returns how many of the first nodes hang one below the other."""
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """``features[i]`` is a small drafter-defined bucket (match length, rank among siblings, ...).

    The acceptance estimators key their counts by (drafter, feature, depth), so nodes that a
    drafter believes in equally should share a feature.

    ``draft_probs[parent]`` is the distribution that the parent's children were sampled from, in their
    order and without replacement; absent where they were not sampled but chosen. Two forms: a tensor
    ``[vocab_size]``, or a mapping of token ids to probabilities that sum to 1. Whether a sampled node
    is offered must not depend on its token, nor on anything sampled after it; how many children a
    node gets, and how far a chain goes on below it, may. In a tree of several branches the shape as a
    whole should not depend on tokens, since policies grant by it.

    ``survivals[i]``, where a drafter gives them, is its own estimate of how likely node i and all its
    ancestors are accepted, from 0 to 1 and never above the parent's; empty: the engine estimates by
    features.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    features: Sequence[int] = ()
    draft_probs: Mapping[int, Any] = field(default_factory=dict)
    survivals: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> list[int]:
        """Returns the depth of every node; children of the root have depth 1."""
        if self.is_chain():
            return list(range(1, len(self.token_ids) + 1))
        return depths_of(self.parents)

    def is_chain(self) -> bool:
        parents = self.parents
        as_chain = range(-1, len(parents) - 1)
        return parents == as_chain if isinstance(parents, range) else list(parents) == [*as_chain]

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the nodes that carry the first of these tokens, one below the other, as far as they
        go."""
        path: list[int] = []
        node = ROOT
        for index, (parent, token_id) in enumerate(zip(self.parents, self.token_ids, strict=True)):
            if len(path) == len(token_ids):
                break
            if parent == node and token_id == token_ids[len(path)]:
                node = index
                path.append(index)
        return path

    def paths(self) -> list[tuple[int, ...]]:
        """Returns the tokens from the root (excluded) to every row (included), the root's row first."""
        found: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(self.token_ids, self.parents, strict=True):
            found.append((*found[parent - ROOT], token_id))
        return found

    def subtree(self, kept: Sequence[int]) -> DraftTree:
        """Returns the tree of the given nodes (ascending, parent-closed), renumbered."""
        num_kept = len(kept)
        if num_kept == len(self.token_ids):
            return self
        if self.is_chain():
            return DraftTree(
                self.token_ids[:num_kept],
                range(-1, num_kept - 1),
                self.features[:num_kept],
                {node: each for node, each in self.draft_probs.items() if node < num_kept},
                self.survivals[:num_kept],
            )
        new_index = {ROOT: ROOT} | {old: new for new, old in enumerate(kept)}
        return DraftTree(
            [self.token_ids[i] for i in kept],
            [new_index[self.parents[i]] for i in kept],
            [self.features[i] for i in kept],
            {
                new_index[parent]: probs
                for parent, probs in self.draft_probs.items()
                if parent in new_index
            },
            [self.survivals[i] for i in kept] if self.survivals else (),
        )

    def validate(self, vocab_size: int = 0) -> None:
        """Raises ValueError if shape or types break the class's contract: lists, tuples or ranges of
        Python's own integers (numpy's would come out as other types elsewhere), and a mapping; and for
        invalid tokens. ``vocab_size`` 0: unknown."""
        sequences = (self.token_ids, self.parents, self.features)
        if not all(isinstance(each, list | tuple | range) for each in sequences):
            raise ValueError("token_ids, parents and features are not lists, tuples or ranges")
        given = joined.from_iterable(each for each in sequences if type(each) is not range)
        if not {int}.issuperset(map(type, given)):
            raise ValueError("the tree holds something else than integers")
        if not isinstance(self.draft_probs, Mapping):
            raise ValueError("draft_probs is no mapping")
        if not len(self.token_ids) == len(self.parents) == len(self.features):
            raise ValueError("token_ids, parents and features differ in length")
        if self.token_ids and (min(self.token_ids) < 0 or 0 < vocab_size <= max(self.token_ids)):
            raise ValueError("a proposed token is not in the vocabulary")
        self._validate_survivals()
        if self.is_chain():
            return
        seen: set[tuple[int, int]] = set()
        for index, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not ROOT <= parent < index:
                raise ValueError(f"node {index}: parent {parent} does not come before it")
            if (parent, token_id) in seen:
                raise ValueError(f"node {index}: token {token_id} repeats among its siblings")
            seen.add((parent, token_id))

    def _validate_survivals(self) -> None:
        if not len(self.survivals):
            return
        if len(self.survivals) != len(self.token_ids):
            raise ValueError("token_ids and survivals differ in length")
        for node, (parent, survival) in enumerate(zip(self.parents, self.survivals, strict=True)):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node}: parent {parent} does not come before it")
            above = 1.0 if parent == ROOT else self.survivals[parent]
            if not (type(survival) is float and 0.0 <= survival <= above):
                raise ValueError(f"node {node}: a survival of {survival} below one of {above}")


def chain(token_ids: Sequence[int], features: Sequence[int] | int = 0) -> DraftTree:
    """Returns the chain of these tokens; one feature for all, or one each."""
    if isinstance(features, int):
        features = [features] * len(token_ids)
    return DraftTree(token_ids, range(-1, len(token_ids) - 1), features)


EMPTY = DraftTree()


class TreeBuilder:
    """A tree in the making: paths that begin alike share their nodes, the best are kept.

    A node's weight is how much it is believed in, never more than its parent's; a node that is added
    again keeps its first feature and the larger weight. The lists hold all nodes that were added;
    ``draft_probs`` is for drafters that sample to fill in, by node (see ``DraftTree``).
    """

    __slots__ = ("_index", "depths", "draft_probs", "features", "parents", "token_ids", "weights")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.features: list[int] = []
        self.weights: list[float] = []
        self.depths: list[int] = []
        self.draft_probs: dict[int, Any] = {}
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, feature: int = 0, weight: float = 1.0) -> int:
        """Returns the node of ``token_id`` under ``parent``, a new one if there is none."""
        key = (parent, token_id)
        node = self._index.get(key)
        if node is not None:
            if weight > self.weights[node]:
                self.weights[node] = weight
            return node
        node = self._index[key] = len(self.token_ids)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.features.append(feature)
        self.weights.append(weight)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        return node

    def best(self, nodes: int, width: int | None = None, depth: int | None = None) -> DraftTree:
        """Returns the ``nodes`` of most weight, the first added among equals, that have at most ``width``
        siblings, themselves included, and lie at most ``depth`` deep. The chain of first children
        comes first."""
        return self.take(self._chain_first(self.chosen(nodes, width, depth)))

    def chosen(self, nodes: int, width: int | None = None, depth: int | None = None) -> list[int]:
        """Returns the nodes that ``best`` takes, ascending."""
        num_added = len(self.token_ids)
        fits = depth is None or max(self.depths, default=0) <= depth
        if num_added <= nodes and width is None and fits:
            return list(range(num_added))
        weights, parents, depths = self.weights, self.parents, self.depths
        kept = {ROOT}
        num_children: dict[int, int] = {}
        for node in sorted(range(num_added), key=weights.__getitem__, reverse=True):  # stable
            if len(kept) > nodes:
                break
            parent = parents[node]
            if parent not in kept or (depth is not None and depths[node] > depth):
                continue
            if width is not None:
                taken = num_children.get(parent, 0)
                if taken == width:
                    continue
                num_children[parent] = taken + 1
            kept.add(node)
        kept.remove(ROOT)
        return sorted(kept)

    def take(self, nodes: Sequence[int]) -> DraftTree:
        """Returns the tree of these nodes in this order, parents before their children."""
        if not nodes:
            return EMPTY
        new_index = {ROOT: ROOT}
        for index, node in enumerate(nodes):
            new_index[node] = index
        return DraftTree(
            [self.token_ids[node] for node in nodes],
            [new_index[self.parents[node]] for node in nodes],
            [self.features[node] for node in nodes],
            {new_index[node]: each for node, each in self.draft_probs.items() if node in new_index},
        )

    def _chain_first(self, nodes: Sequence[int]) -> list[int]:
        chain: list[int] = []
        others: list[int] = []
        end = ROOT
        for node in nodes:
            if self.parents[node] == end:
                chain.append(node)
                end = node
            else:
                others.append(node)
        return chain + others


class Branch(NamedTuple):
    """A node that may come into a tree. ``state``: what tells its drafter what may come after it."""

    weight: float
    parent: int
    token_id: int
    feature: int
    state: Any = None


def best_first(
    start: Iterable[Branch], expand: Callable[[int, Branch], Iterable[Branch]], max_nodes: int
) -> DraftTree:
    """Returns the ``max_nodes`` of most weight, the first found among equals, where ``expand`` finds
    more.

    It is called with each node that is taken and what it was taken from, and gives nodes of no more
    weight, below it or anywhere else in the tree. Parents come before children, the chain of first
    children comes first.
    """
    builder = TreeBuilder()
    serials = count()
    waiting = [(-each.weight, next(serials), each) for each in start]
    heapq.heapify(waiting)
    while waiting and len(builder) < max_nodes:
        _, _, branch = heapq.heappop(waiting)
        node = builder.add(branch.parent, branch.token_id, branch.feature, branch.weight)
        if len(builder) < max_nodes:
            for each in expand(node, branch):
                heapq.heappush(waiting, (-each.weight, next(serials), each))
    return builder.best(max_nodes)
