"""Builds a draft tree from token paths: equal beginnings share their nodes."""

from __future__ import annotations

from drafters.tree import ROOT, DraftTree


class Trie:
    """Paths merged into at most ``max_nodes`` nodes, at most ``max_depth`` deep.

    A node keeps the feature of the path that brought it. ``None`` stands for a node that there was
    no room for; nothing can hang under it.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self._max_nodes = max_nodes
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._features: list[int] = []
        self._room_below: list[int] = []
        self._max_depth = max_depth
        self._index: dict[tuple[int, int], int] = {}
        self._children: list[list[int]] = []
        self._top: list[int] = []

    def add(self, parent: int | None, token_id: int, feature: int) -> int | None:
        """The node of ``token_id`` under ``parent``, a new one if there is none."""
        if parent is None:
            return None
        node = self._index.get((parent, token_id))
        if node is not None:
            return node
        room = (self._max_depth if parent == ROOT else self._room_below[parent]) - 1
        node = len(self._token_ids)
        if room < 0 or node >= self._max_nodes:
            return None
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._features.append(feature)
        self._room_below.append(room)
        self._children.append([])
        (self._top if parent == ROOT else self._children[parent]).append(node)
        self._index[parent, token_id] = node
        return node

    def build(self) -> DraftTree:
        """Depth first, in the order of arrival: what was added first is the leading chain."""
        order: list[int] = []
        stack = self._top[::-1]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += self._children[node][::-1]
        new_index = {old: new for new, old in enumerate(order)}
        new_index[ROOT] = ROOT
        return DraftTree(
            [self._token_ids[node] for node in order],
            [new_index[self._parents[node]] for node in order],
            [self._features[node] for node in order],
        )
