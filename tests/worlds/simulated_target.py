"""A tiny greedy engine for drafter tests: a target that is a function of the text so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from drafters.base import (
    GREEDY,
    Drafter,
    DraftRequest,
    DraftSampling,
    DraftShape,
    Observation,
    OptionValue,
)
from drafters.tree import EMPTY, ROOT, DraftTree, chain_length

CHAIN = DraftShape()
Target = Callable[[Sequence[int]], int]


@dataclass
class Run:
    """``token_ids``: prompt and output. Per step: the tree proposed and how much was emitted."""

    token_ids: list[int]
    trees: list[DraftTree] = field(default_factory=list)
    num_emitted: list[int] = field(default_factory=list)

    @property
    def num_accepted(self) -> int:
        return sum(self.num_emitted) - len(self.num_emitted)


def random_target(seed: int, vocab_size: int, order: int) -> Target:
    """The next token is a random function of the last ``order`` ones."""

    def target(token_ids: Sequence[int]) -> int:
        tail = tuple(token_ids[len(token_ids) - order :])
        return Random(hash((seed, *tail))).randrange(vocab_size)

    return target


def greedy(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt and what the target writes after it."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(target(token_ids))
    return token_ids


def verify_step(tree: DraftTree, token_ids: Sequence[int], target: Target) -> tuple[list[int], ...]:
    """(path rows, emitted tokens) of a greedy verification."""
    path, emitted, node = [0], [], ROOT
    while True:
        emitted.append(target([*token_ids, *emitted]))
        children = [i for i, parent in enumerate(tree.parents) if parent == node]
        hits = [i for i in children if tree.token_ids[i] == emitted[-1]]
        if not hits:
            return path, emitted
        node = hits[0]
        path.append(node + 1)


def decode(
    drafter: Drafter,
    prompt: Sequence[int],
    target: Target,
    num_tokens: int,
    *,
    options: Mapping[str, OptionValue] | None = None,
    **asked: Any,
) -> Run:
    """Decode at least ``num_tokens`` tokens as ``go_on`` does; the request stays open."""
    token_ids = list(prompt)
    drafter.open("r", token_ids, options or {}, "")
    return go_on(drafter, token_ids, target, num_tokens, **asked)


def go_on(
    drafter: Drafter,
    token_ids: list[int],
    target: Target,
    num_tokens: int,
    *,
    max_nodes: int = 8,
    shape: DraftShape | None = None,
    sampling: DraftSampling = GREEDY,
    request_id: str = "r",
    tops: Callable[[Sequence[int]], dict[int, float]] | None = None,
) -> Run:
    """Extends the text of an open request, checking every proposal. ``tops``: the target's likeliest
    tokens behind a text, and their probabilities."""
    run = Run(token_ids)
    while sum(run.num_emitted) < num_tokens:
        tree = ask(drafter, token_ids, max_nodes, shape or CHAIN, sampling, request_id)
        path, emitted = verify_step(tree, token_ids, target)
        contexts = [[*token_ids, *path] for path in ((), *node_paths(tree))]
        told: list[Any] = [tree, [target(context) for context in contexts], path, emitted]
        if tops is not None:
            rows = [tops(context) for context in contexts]
            told += [[list(row) for row in rows], [list(row.values()) for row in rows]]
        token_ids.extend(emitted)
        drafter.observe([Observation(request_id, token_ids, *told)])
        run.trees.append(tree)
        run.num_emitted.append(len(emitted))
    return run


def ask(
    drafter: Drafter,
    token_ids: Sequence[int],
    max_nodes: int = 8,
    shape: DraftShape = CHAIN,
    sampling: DraftSampling = GREEDY,
    request_id: str = "r",
) -> DraftTree:
    """Returns the draft that an open request is offered."""
    request = DraftRequest(request_id, token_ids, max_nodes, shape, sampling)
    (tree,) = drafter.propose([request])
    check_tree(tree, max_nodes, shape)
    return tree


def tell(
    drafter: Drafter,
    token_ids: Sequence[int],
    num_emitted: int = 1,
    tops: Sequence[Sequence[int]] | None = None,
    probs: Sequence[Sequence[float]] | None = None,
    request_id: str = "r",
) -> None:
    """A step without a draft, or for which the drafter was not asked: ``token_ids`` ends with it."""
    emitted = token_ids[-num_emitted:]
    seen = Observation(request_id, token_ids, EMPTY, emitted[:1], [0], emitted, tops, probs)
    drafter.observe([seen])


def draft_after(
    drafter: Drafter,
    prompt: Sequence[int],
    output: Sequence[int],
    max_nodes: int,
    shape: DraftShape,
) -> DraftTree:
    """Returns the draft once ``output`` has been written after the prompt, a token at a time."""
    drafter.open("r", prompt, {}, "")
    known = list(prompt)
    for token_id in output:
        ask(drafter, known, max_nodes, shape)
        known.append(token_id)
        tell(drafter, known)
    return ask(drafter, known, max_nodes, shape)


def children_of(tree: DraftTree, node: int = ROOT) -> list[int]:
    """The tokens under a node, in the tree's order."""
    pairs = zip(tree.token_ids, tree.parents, strict=True)
    return [token_id for token_id, parent in pairs if parent == node]


def node_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to every node."""
    paths: list[tuple[int, ...]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token_id))
    return paths


def check_tree(tree: DraftTree, max_nodes: int, shape: DraftShape) -> None:
    """The promises every proposal makes."""
    tree.validate()
    assert len(tree) <= max_nodes
    assert max(tree.depths(), default=0) <= shape.depth
    siblings = [list(tree.parents).count(parent) for parent in set(tree.parents)]
    assert max(siblings, default=0) <= shape.width
    assert all(0 <= feature < 64 for feature in tree.features)
    assert_spine_first(tree)


def assert_spine_first(tree: DraftTree) -> None:
    """Nodes 0..d-1 are a chain whose end has no children further on."""
    length = chain_length(tree.parents)
    assert not length or length - 1 not in list(tree.parents)[length:]


def propose_once(
    drafter: Drafter,
    token_ids: Sequence[int],
    max_nodes: int,
    shape: DraftShape | None = None,
    options: Mapping[str, OptionValue] | None = None,
) -> DraftTree:
    """Returns the draft that a fresh request with this prompt is offered."""
    drafter.open("once", token_ids, options or {}, "")
    tree = ask(drafter, token_ids, max_nodes, shape or CHAIN, request_id="once")
    drafter.close("once")
    return tree
