"""The likeliest tree where every depth has its own candidates, whatever came before: Medusa's product."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafters.base import DraftShape
from drafters.model.growth import feature_of
from drafters.model.protocol import Candidates
from drafters.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class _Node:
    """``ranks[d]``: which candidate of depth ``d + 1`` the path takes; ``parent`` by order of arrival."""

    ranks: tuple[int, ...]
    parent: int
    above: float
    """The product of the confidences of its ancestors."""


def product_tree(levels: Sequence[Candidates], max_nodes: int, shape: DraftShape) -> DraftTree:
    """The ``max_nodes`` paths with the largest product of confidences, within ``shape``.

    ``levels[d]`` may stand at depth ``d + 1``, best first. A path is never likelier than its
    beginning, so the best ``n`` are a tree for every ``n``: they are found by taking the best open
    node and opening its first child and its next sibling. The likeliest chain comes first.

    Candidates that were drawn keep their distribution. They all carry one confidence per depth, so the
    shape of the tree does not depend on what was drawn, and siblings are kept in the order drawn.
    """
    depth = min(len(levels), shape.depth)
    found: list[_Node] = []
    heap: list[tuple[float, int, _Node]] = []
    num_opened = 0

    def open_node(node: _Node) -> None:
        nonlocal num_opened
        at, rank = len(node.ranks), node.ranks[-1]
        if at <= depth and rank < min(shape.width, len(levels[at - 1].token_ids)):
            weight = node.above * min(levels[at - 1].confidences[rank], 1.0)
            # Among equals what was opened first: parents before children.
            heapq.heappush(heap, (-weight, num_opened, node))
            num_opened += 1

    open_node(_Node((0,), ROOT, 1.0))
    while heap and len(found) < max_nodes:
        negative, _, node = heapq.heappop(heap)
        index = len(found)
        found.append(node)
        open_node(_Node((*node.ranks, 0), index, -negative))
        open_node(_Node((*node.ranks[:-1], node.ranks[-1] + 1), node.parent, node.above))
    return _spine_first(found, levels)


def _spine_first(found: Sequence[_Node], levels: Sequence[Candidates]) -> DraftTree:
    order = sorted(range(len(found)), key=lambda index: any(found[index].ranks))
    place = {ROOT: ROOT} | {old: new for new, old in enumerate(order)}
    token_ids: list[int] = []
    parents: list[int] = []
    features: list[int] = []
    drawn: dict[int, Any] = {}
    for index in order:
        node = found[index]
        level, rank = levels[len(node.ranks) - 1], node.ranks[-1]
        token_ids.append(level.token_ids[rank])
        parents.append(place[node.parent])
        features.append(feature_of(level.confidences[rank], rank))
        if level.distribution is not None:
            drawn[parents[-1]] = level.distribution
    return DraftTree(token_ids, parents, features, drawn)
