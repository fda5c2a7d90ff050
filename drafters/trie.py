"""Grows a draft tree path by path, so that paths which begin alike share their nodes."""

from __future__ import annotations

from drafters.tree import EMPTY, ROOT, DraftTree


class TrieBuilder:
    """A ``DraftTree`` in the making, of at most ``max_nodes`` nodes."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._features: list[int] = []
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def is_full(self) -> bool:
        return len(self._token_ids) >= self.max_nodes

    def add(self, parent: int, token_id: int, feature: int) -> int:
        """The child of ``parent`` with this token: the one there is, or a new one with this feature.

        ``parent`` is what an earlier call returned, or ROOT. Below a node that found no more room
        there is none either: -2 says so, and may be passed on as a parent.
        """
        if parent < ROOT:
            return parent
        node = self._index.get((parent, token_id))
        if node is not None:
            return node
        if self.is_full:
            return ROOT - 1
        node = self._index[parent, token_id] = len(self._token_ids)
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._features.append(feature)
        return node

    def build(self) -> DraftTree:
        if not self._token_ids:
            return EMPTY
        return DraftTree(self._token_ids, self._parents, self._features)
