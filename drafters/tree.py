"""The draft tree: guessed tokens and how they hang together.

Node ``i`` holds ``token_ids[i]`` and hangs under node ``parents[i]``, or under the root (the
anchor, the last emitted token) where the parent is ``ROOT``. Parents come before children and
siblings carry distinct tokens; drafters put their likeliest chain first, because accepting it then
costs no KV copy. A chain is a tree of width 1. Plain Python: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """``features[i]`` is a small drafter-defined bucket (match length, rank among siblings, ...).

    The acceptance estimators key their counts by (drafter, feature, depth), so nodes that a
    drafter believes in equally should share a feature.

    ``draft_probs[parent]`` is the distribution that the parent's children were drawn from, in their
    order and without replacement; absent where they were not drawn but chosen. Two forms: a tensor
    ``[vocab_size]``, or a mapping of token ids to probabilities that sum to 1. Whether a drawn node
    is offered must not depend on its token, nor on anything drawn after it; how many children a
    node gets, and how far a chain goes on below it, may. In a tree of several branches the shape as a
    whole should not depend on tokens, since policies grant by it.
    """

    token_ids: Sequence[int] = ()
    parents: Sequence[int] = ()
    features: Sequence[int] = ()
    draft_probs: Mapping[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def depths(self) -> list[int]:
        """Depth of every node; children of the root have depth 1."""
        if self.is_chain():
            return list(range(1, len(self.token_ids) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def is_chain(self) -> bool:
        parents = self.parents
        as_chain = range(-1, len(parents) - 1)
        return parents == as_chain if isinstance(parents, range) else list(parents) == [*as_chain]

    def subtree(self, kept: Sequence[int]) -> DraftTree:
        """The tree of the given nodes (ascending, parent-closed), renumbered."""
        if len(kept) == len(self.token_ids):
            return self
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
        )

    def validate(self) -> None:
        """Raises ValueError where the shape breaks the class's contract."""
        if not len(self.token_ids) == len(self.parents) == len(self.features):
            raise ValueError("token_ids, parents and features differ in length")
        if self.is_chain():
            return
        seen: set[tuple[int, int]] = set()
        for index, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if not ROOT <= parent < index:
                raise ValueError(f"node {index}: parent {parent} does not come before it")
            if (parent, token_id) in seen:
                raise ValueError(f"node {index}: token {token_id} repeats among its siblings")
            seen.add((parent, token_id))


def chain(token_ids: Sequence[int], features: Sequence[int] | int = 0) -> DraftTree:
    """The chain of these tokens; one feature for all, or one each."""
    if isinstance(features, int):
        features = [features] * len(token_ids)
    return DraftTree(token_ids, range(-1, len(token_ids) - 1), features)


EMPTY = DraftTree()
