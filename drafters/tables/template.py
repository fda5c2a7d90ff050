"""Static draft trees: which ranks to draft, decided once; which tokens they are, at every step.

A node is the path of ranks that leads to it: ``(0, 2)`` is the third likeliest child of the
likeliest child of the root. A template lists its nodes likeliest first, so that its first n nodes
are the template for n nodes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from drafters.base import DraftShape
from drafters.tree import ROOT, DraftTree, TreeBuilder

RankPath: TypeAlias = tuple[int, ...]

MAX_TEMPLATE_NODES = 256
MAX_RANK = 15


class TemplateNode(NamedTuple):
    """``parent`` is 0 for the root and ``i + 1`` for node ``i``."""

    parent: int
    rank: int


class DraftTemplate:
    """Rank paths in an order in which a parent and a node's left sibling come before it.

    Raises ValueError for paths that are not such an order.
    """

    def __init__(self, paths: Sequence[RankPath]) -> None:
        if not 1 <= len(paths) <= MAX_TEMPLATE_NODES:
            raise ValueError(f"a template has 1 to {MAX_TEMPLATE_NODES} paths, not {len(paths)}")
        known: set[RankPath] = {()}
        for path in paths:
            if path in known or not all(0 <= rank <= MAX_RANK for rank in path):
                raise ValueError(f"path {list(path)} is repeated or has a rank beyond {MAX_RANK}")
            if path[:-1] not in known:
                raise ValueError(f"path {list(path)} comes before its parent")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(f"path {list(path)} comes before its left sibling")
            known.add(path)
        self.paths = tuple(paths)
        self._within: dict[tuple[int, int], list[TemplateNode]] = {}
        self._width = 1 + max(path[-1] for path in paths)
        self._depth = max(map(len, paths))

    def __len__(self) -> int:
        return len(self.paths)

    def within(self, shape: DraftShape) -> list[TemplateNode]:
        """Returns the nodes that fit into the shape, likeliest first."""
        key = (min(shape.width, self._width), min(shape.depth, self._depth))
        nodes = self._within.get(key)
        if nodes is None:
            nodes = self._within[key] = self._cut(*key)
        return nodes

    def _cut(self, width: int, depth: int) -> list[TemplateNode]:
        index_of: dict[RankPath, int] = {(): 0}
        nodes = []
        for path in self.paths:
            if len(path) <= depth and max(path) < width:
                index_of[path] = len(index_of)
                nodes.append(TemplateNode(index_of[path[:-1]], path[-1]))
        return nodes

    def save(self, path: Path, note: str = "") -> None:
        """Write the file that ``load_template`` reads."""
        lines = ",\n    ".join(json.dumps(list(each)) for each in self.paths)
        note = json.dumps(note)
        path.write_text(f'{{\n  "note": {note},\n  "paths": [\n    {lines}\n  ]\n}}\n', "utf-8")


def load_template(path: Path) -> DraftTemplate:
    """Raises ValueError that names the file, also where there is none."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the template {path}: {error}") from error
    paths = content.get("paths") if isinstance(content, dict) else None
    if not isinstance(paths, list) or not all(
        isinstance(each, list) and each and all(type(rank) is int for rank in each)
        for each in paths
    ):
        raise ValueError(f"the template {path} needs `paths`, a list of lists of ranks")
    try:
        return DraftTemplate([tuple(each) for each in paths])
    except ValueError as error:
        raise ValueError(f"the template {path} does not hold together: {error}") from error


def best_first_paths(max_depth: int, shares: Sequence[float]) -> Iterator[RankPath]:
    """All paths of up to ``max_depth`` ranks, the largest product of ``shares[rank]`` first.

    ``shares`` descend, so parents and left siblings come first.
    """
    waiting: list[tuple[float, RankPath]] = [(-shares[0], (0,))]
    while waiting:
        weight, path = heapq.heappop(waiting)
        yield path
        rank = path[-1]
        if rank + 1 < len(shares):
            sibling = weight / shares[rank] * shares[rank + 1]
            heapq.heappush(waiting, (sibling, (*path[:-1], rank + 1)))
        if len(path) < max_depth:
            heapq.heappush(waiting, (weight * shares[0], (*path, 0)))


class Children(NamedTuple):
    """A node's possible children by rank. ``draft_probs``: what they were sampled from, if so."""

    token_ids: Sequence[int] = ()
    features: Sequence[int] = ()
    draft_probs: Mapping[int, float] | None = None


NO_CHILDREN = Children()
State = TypeVar("State")


def grow_chain(
    num_nodes: int,
    state: State,
    expand: Callable[[State], Children],
    advance: Callable[[State, int], State],
) -> DraftTree:
    """Returns the first child at every depth, in the way of ``grow``."""
    token_ids: list[int] = []
    features: list[int] = []
    draft_probs: dict[int, Mapping[int, float]] = {}
    for node in range(num_nodes):
        children = expand(state)
        if not children.token_ids:
            break
        if children.draft_probs is not None:
            draft_probs[node - 1] = children.draft_probs
        token_ids.append(children.token_ids[0])
        features.append(children.features[0])
        state = advance(state, token_ids[-1])
    return DraftTree(token_ids, range(-1, len(token_ids) - 1), features, draft_probs)


def grow(
    nodes: Sequence[TemplateNode],
    max_nodes: int,
    root: State,
    expand: Callable[[State], Children],
    advance: Callable[[State, int], State],
) -> DraftTree:
    """Fills in a template: ``expand`` gives a state's children, ``advance`` the state one token on.

    Nodes whose rank has no token, and those below them, stay out. Only nodes that some
    chosen node hangs under are expanded. The spine comes first in the tree.
    """
    builder = TreeBuilder()
    # By place in the template, the root at 0: where the tree has the node, and its state.
    placed: dict[int, tuple[int, State]] = {0: (ROOT, root)}
    children: dict[int, Children] = {}
    for place, node in enumerate(nodes, start=1):
        if len(builder) >= max_nodes:
            break
        if node.parent not in placed:
            continue
        parent, state = placed[node.parent]
        options = children.get(parent)
        if options is None:
            options = children[parent] = expand(state)
            if options.draft_probs is not None:
                builder.draft_probs[parent] = options.draft_probs
        if node.rank < len(options.token_ids):
            token_id = options.token_ids[node.rank]
            index = builder.add(parent, token_id, options.features[node.rank])
            placed[place] = (index, advance(state, token_id))
    return builder.best(max_nodes)
