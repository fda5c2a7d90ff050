"""Drafts laid over each other, and the tree or chain of what is likeliest in all of them.

Owned by ``auto``.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.tree import ROOT, DraftTree, TreeBuilder, chain

_NUM_VALUES = 16
_MOST_AGREEING = 4


def overlay_feature(acceptance: float, num_agreeing: int) -> int:
    """Returns the bucket of (believed chance of the node given its parent, trees that hold it): 0..63."""
    value = min(_NUM_VALUES - 1, int(acceptance * _NUM_VALUES))
    return value * _MOST_AGREEING + min(num_agreeing, _MOST_AGREEING) - 1


def alone(tree: DraftTree, survivals: Sequence[float], depth: int) -> DraftTree:
    """Returns what ``Overlay.chain`` makes of one chain that nothing else is laid over."""
    num_nodes = min(depth, len(tree.token_ids))
    features = []
    above = 1.0
    for worth in survivals[:num_nodes]:
        features.append(overlay_feature(worth / above if above > 0 else 0.0, 1))
        above = worth
    return chain(tree.token_ids[:num_nodes], features)


class Overlay(TreeBuilder):
    """The union of trees. A node is worth the highest survival that one of its trees gives it."""

    __slots__ = ("_num_agreeing",)

    def __init__(self) -> None:
        super().__init__()
        self._num_agreeing: list[int] = []

    def lay(self, tree: DraftTree, survivals: Sequence[float]) -> None:
        """``survivals[i]`` is node i's, never more than its parent's."""
        placed: list[int] = []
        for token_id, parent, survival in zip(tree.token_ids, tree.parents, survivals, strict=True):
            node = self.add(ROOT if parent == ROOT else placed[parent], token_id, 0, survival)
            if node == len(self._num_agreeing):
                self._num_agreeing.append(0)
            self._num_agreeing[node] += 1
            placed.append(node)

    def chain(self, depth: int) -> DraftTree:
        """Returns the path of at most ``depth`` nodes with the most expected tokens."""
        children = self._ranked(range(len(self)), depth)
        path: list[int] = []
        node = ROOT
        while len(path) < depth and node in children:
            node = children[node][-1]
            path.append(node)
        return self._take(path)

    def tree(self, num_nodes: int, width: int, depth: int) -> DraftTree:
        """Returns the likeliest nodes, at most ``width`` under one parent: the best chain comes first,
        and under each node the child that promises most."""
        children = self._ranked(self.chosen(num_nodes, width, depth), depth)
        ordered: list[int] = []
        stack = children.get(ROOT, [])
        while stack:
            ordered.append(stack.pop())
            stack += children.get(ordered[-1], ())
        return self._take(ordered)

    def _ranked(self, nodes: Sequence[int], depth: int) -> dict[int, list[int]]:
        """Returns the children of each node; the last one is that of which most tokens are expected, down
        to ``depth``, the first added among equals."""
        gains = self._gains(depth)
        children: dict[int, list[int]] = {}
        for node in nodes:
            children.setdefault(self.parents[node], []).append(node)
        for siblings in children.values():
            siblings.sort(key=lambda node: (gains[node], -node))
        return children

    def _gains(self, depth: int) -> list[float]:
        """Returns, per node, the expected tokens of the best path through it, down to ``depth``."""
        below = [0.0] * len(self)
        gains = [0.0] * len(self)
        for node in range(len(self) - 1, -1, -1):  # children before their parents
            if self.depths[node] > depth:
                continue
            gains[node] = self.weights[node] + below[node]
            parent = self.parents[node]
            if parent != ROOT and gains[node] > below[parent]:
                below[parent] = gains[node]
        return gains

    def _take(self, nodes: Sequence[int]) -> DraftTree:
        for node in nodes:
            parent = self.parents[node]
            above = 1.0 if parent == ROOT else self.weights[parent]
            acceptance = self.weights[node] / above if above > 0 else 0.0
            self.features[node] = overlay_feature(acceptance, self._num_agreeing[node])
        return self.take(nodes)
