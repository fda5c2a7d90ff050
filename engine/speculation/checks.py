"""Checks proposals before they may reach the model: drafters may come from outside."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import DraftRequest
from drafters.tree import DraftTree


def check_trees(
    trees: Sequence[DraftTree], asks: Sequence[DraftRequest], vocab_size: int
) -> Sequence[DraftTree]:
    """The trees, one for each request. Raises TypeError or ValueError for anything else."""
    if not isinstance(trees, list | tuple):  # a generator would be used up here
        raise TypeError(f"propose returned a {type(trees).__name__}, not a list of trees")
    for tree, ask in zip(trees, asks, strict=True):
        if not isinstance(tree, DraftTree):
            raise TypeError(f"a {type(tree).__name__} was proposed, not a DraftTree")
        tree.validate(vocab_size)
        if tree.token_ids:
            _check_tree(tree, ask, vocab_size)
    return trees


def _check_tree(tree: DraftTree, ask: DraftRequest, vocab_size: int) -> None:
    if len(tree) > ask.max_nodes:
        raise ValueError(f"{len(tree)} nodes proposed where {ask.max_nodes} were allowed")
    if max(tree.depths(), default=0) > ask.shape.depth:
        raise ValueError(f"a proposed path is deeper than {ask.shape.depth}")
    check_sampled(tree, ask.sampling.verification, vocab_size)


def check_sampled(tree: DraftTree, verification: str, vocab_size: int) -> None:
    """Raises ValueError where the verification could not use the tree, or its ``draft_probs``."""
    if verification == "match":
        return
    if verification == "block" and not tree.is_chain():
        raise ValueError("block verification is for chains, and a tree was proposed")
    for parent, probs in tree.draft_probs.items():
        if not -1 <= parent < len(tree):
            raise ValueError(f"draft_probs of node {parent}, which does not exist")
        shape: Sequence[int] | None = getattr(probs, "shape", None)
        if shape is not None:
            if tuple(shape) != (vocab_size,):
                raise ValueError(f"draft_probs of node {parent} have shape {tuple(shape)}")
        elif min(probs.values(), default=-1) < 0 or abs(sum(probs.values()) - 1) > 1e-3:
            raise ValueError(f"draft_probs of node {parent} are no distribution")
        elif not 0 <= min(probs) <= max(probs) < vocab_size:
            raise ValueError(f"draft_probs of node {parent} name a token out of the vocabulary")
