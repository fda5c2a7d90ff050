"""Drafts laid over each other, and the tree or chain of what is likeliest in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drafters.tree import ROOT, DraftTree, TreeBuilder


class Overlay(TreeBuilder):
    """The union of trees. A node is as likely as that of its trees says that believes in it most."""

    __slots__ = ()

    def lay(self, tree: DraftTree, survivals: Sequence[float]) -> None:
        """``survivals[i]`` is node i's, never more than its parent's."""
        placed: list[int] = []
        for token_id, parent, survival in zip(tree.token_ids, tree.parents, survivals, strict=True):
            placed.append(
                self.add(ROOT if parent == ROOT else placed[parent], token_id, 0, survival)
            )

    def draft(self, num_nodes: int, width: int, depth: int) -> DraftTree:
        """Returns the likeliest nodes, at most ``width`` under one parent: the best chain comes first,
        and under each node the child that promises most. A chain is the path of most expected tokens."""
        children = self._ranked(self.chosen(num_nodes, width, depth) if width > 1 else None, depth)
        ordered: list[int] = []
        stack = children.get(ROOT, [])[-width:]
        while stack and len(ordered) < num_nodes:
            ordered.append(stack.pop())
            stack += children.get(ordered[-1], ())[-width:]
        return self.take(ordered)

    def take(self, nodes: Sequence[int]) -> DraftTree:
        tree = super().take(nodes)
        return replace(tree, survivals=[self.weights[node] for node in nodes])

    def _ranked(self, nodes: Sequence[int] | None, depth: int) -> dict[int, list[int]]:
        """Returns the children of each node, the one with the largest expected number of tokens last,
        down to ``depth``, the first added among equals."""
        gains = self._gains(depth)
        children: dict[int, list[int]] = {}
        for node in range(len(self)) if nodes is None else nodes:
            if self.depths[node] <= depth:
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
