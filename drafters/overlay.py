"""Several draft trees laid over each other, and the best chain or tree of what came together."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.tree import EMPTY, ROOT, DraftTree

_NUM_VALUES = 16
_MOST_AGREEING = 4


def overlay_feature(acceptance: float, num_agreeing: int) -> int:
    """Bucket of (believed chance of the node given its parent, trees that hold it): 0..63."""
    value = min(_NUM_VALUES - 1, int(acceptance * _NUM_VALUES))
    return value * _MOST_AGREEING + min(num_agreeing, _MOST_AGREEING) - 1


def alone(tree: DraftTree, survivals: Sequence[float], depth: int) -> DraftTree:
    """What ``Overlay.chain`` makes of one chain that nothing else is laid over."""
    num_nodes = min(depth, len(tree.token_ids))
    features = []
    above = 1.0
    for worth in survivals[:num_nodes]:
        features.append(overlay_feature(worth / above if above > 0 else 0.0, 1))
        above = worth
    return DraftTree(tree.token_ids[:num_nodes], range(-1, num_nodes - 1), features)


class Overlay:
    """The union of trees. A node is worth the highest survival that one of its trees gives it.

    So worth never grows downward, and the likeliest nodes are closed under parents.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._worth: list[float] = []
        self._num_agreeing: list[int] = []
        self._children: dict[int, dict[int, int]] = {ROOT: {}}

    def add(self, tree: DraftTree, survivals: Sequence[float]) -> None:
        """``survivals[i]`` is node i's, never more than its parent's."""
        placed: list[int] = []
        for token_id, parent, survival in zip(tree.token_ids, tree.parents, survivals, strict=True):
            above = ROOT if parent == ROOT else placed[parent]
            node = self._children[above].get(token_id)
            if node is None:
                node = self._children[above][token_id] = len(self._token_ids)
                self._children[node] = {}
                self._token_ids.append(token_id)
                self._parents.append(above)
                self._depths.append(1 if above == ROOT else self._depths[above] + 1)
                self._worth.append(survival)
                self._num_agreeing.append(1)
            else:
                self._num_agreeing[node] += 1
                if survival > self._worth[node]:
                    self._worth[node] = survival
            placed.append(node)

    def chain(self, depth: int) -> DraftTree:
        """The path of at most ``depth`` nodes with the most expected tokens."""
        gains = self._gains(depth)
        path: list[int] = []
        node = ROOT
        while self._children[node] and len(path) < depth:
            node = max(self._children[node].values(), key=gains.__getitem__)
            path.append(node)
        return self._take(path)

    def tree(self, num_nodes: int, width: int, depth: int) -> DraftTree:
        """The likeliest nodes, at most ``width`` under one parent; the best chain comes first."""
        if num_nodes < 1 or depth < 1:
            return EMPTY
        order = sorted(
            range(len(self._token_ids)), key=lambda node: (-self._worth[node], self._depths[node])
        )
        kept = {ROOT}
        num_children: dict[int, int] = {}
        for node in order:
            parent = self._parents[node]
            taken = num_children.get(parent, 0)
            if parent in kept and taken < width and self._depths[node] <= depth:
                kept.add(node)
                num_children[parent] = taken + 1
                if len(kept) > num_nodes:
                    break
        return self._take(self._preorder(kept, self._gains(depth)))

    def _preorder(self, kept: set[int], gains: Sequence[float]) -> list[int]:
        """Parents before children, and under each node the child that promises most first."""
        ordered: list[int] = []
        stack = [ROOT]
        while stack:
            node = stack.pop()
            if node != ROOT:
                ordered.append(node)
            children = [child for child in self._children[node].values() if child in kept]
            stack += sorted(children, key=gains.__getitem__)
        return ordered

    def _gains(self, depth: int) -> list[float]:
        """Per node, the expected tokens of the best path that goes through it, down to ``depth``."""
        below = [0.0] * len(self._token_ids)
        gains = [0.0] * len(self._token_ids)
        # Children have larger numbers than their parents, across trees too.
        for node in range(len(self._token_ids) - 1, -1, -1):
            if self._depths[node] > depth:
                continue
            gains[node] = self._worth[node] + below[node]
            parent = self._parents[node]
            if parent != ROOT and gains[node] > below[parent]:
                below[parent] = gains[node]
        return gains

    def _take(self, nodes: Sequence[int]) -> DraftTree:
        if not nodes:
            return EMPTY
        new_index = {ROOT: ROOT}
        features: list[int] = []
        for index, node in enumerate(nodes):
            new_index[node] = index
            parent = self._parents[node]
            above = 1.0 if parent == ROOT else self._worth[parent]
            acceptance = self._worth[node] / above if above > 0 else 0.0
            features.append(overlay_feature(acceptance, self._num_agreeing[node]))
        return DraftTree(
            [self._token_ids[node] for node in nodes],
            [new_index[self._parents[node]] for node in nodes],
            features,
        )
