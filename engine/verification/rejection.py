"""Decides which drafts survive when they were sampled from a distribution: plain Python, no randomness.

Two lossless rules, both in distribution: the emitted tokens follow the target's distribution,
averaged over the sampling of drafts and this module's decisions.

``reject_tokens``: Leviathan et al. (arXiv 2211.17192) and Chen et al. (2302.01318) for chains, with
its recursive form for trees sampled without replacement (Jeon et al. 2402.14160, Sequoia 2402.12374).
``reject_chain``: block verification of chains (Sun et al., arXiv 2403.10444), which decides on
prefixes as a whole and accepts at least as many tokens as any rule for a single chain.

Both only ask for probabilities and for yes or no at a given probability, so that a test can go
through every answer with exact fractions; ``verify.py`` answers from tensors and noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from drafters.tree import DraftTree


class Probs(Protocol):
    """A probability distribution over the vocabulary."""

    def of(self, token_id: int) -> float:
        """The token's probability."""

    def residual(self, draft: Probs, weight: float = 1.0) -> tuple[float, Probs | None]:
        """Mass of ``max(0, weight * self - draft)``, and that normalised; None where it is 0."""

    def without(self, token_id: int) -> Probs | None:
        """This distribution given that it is not this token; None where nothing else is left."""


class Distributions(Protocol):
    """The distributions of one request's rows: row 0 is the anchor, ``i + 1`` is node i."""

    def target(self, row: int) -> Probs:
        """The distribution of the token after the row, fully processed."""

    def draft(self, row: int) -> Probs | None:
        """The distribution that the row's children were sampled from, in order and without replacement;
        None where they were chosen otherwise. A child that it gives nothing was chosen, too."""


class Decision(NamedTuple):
    """``path``: the accepted rows, from row 0 down. ``last``: what the token after them is
    sampled from."""

    path: list[int]
    last: Probs


Accepts = Callable[[int, float], bool]
"""``accepts(row, probability)``: yes with this probability, independently of all other answers. Asked
at most once per row."""

Rule = Callable[[DraftTree, Distributions, Accepts], Decision]


def reject_tokens(tree: DraftTree, distributions: Distributions, accepts: Accepts) -> Decision:
    """Go down from the anchor; at each row try the children in their order.

    A refused child leaves ``norm(max(0, target - draft))`` to the next one and in the end to the
    token that the target itself gives.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent + 1, []).append(node)
    path = [0]
    while True:
        target, draft = distributions.target(path[-1]), distributions.draft(path[-1])
        for node in children.get(path[-1], ()):
            token_id = tree.token_ids[node]
            if accepts(node + 1, _acceptance(target, draft, token_id)):
                path.append(node + 1)
                break
            target, draft = _after_refusal(target, draft, token_id)
        else:
            return Decision(path, target)


def reject_chain(tree: DraftTree, distributions: Distributions, accepts: Accepts) -> Decision:
    """Decide on every prefix of a chain; the longest accepted one stands, whatever was said of
    shorter ones.

    ``reach`` is the probability with which the chain up to a row may be kept if the rest is
    sampled anew. Raises ValueError for trees.
    """
    if not tree.is_chain():
        raise ValueError("block verification is for chains")
    reach: float = 1  # whole numbers keep fractions exact
    last, (_, rest) = 0, _residual(distributions, tree, 0, reach)
    for row in range(1, len(tree) + 1):
        reach = min(1, reach * _ratio(distributions, tree, row - 1))
        chance, residual = reach, None
        if row < len(tree):
            mass, residual = _residual(distributions, tree, row, reach)
            chance = mass / (mass + 1 - reach) if mass + 1 - reach > 0 else 1
        if accepts(row, chance):
            last, rest = row, residual
    return Decision(list(range(last + 1)), rest or distributions.target(last))


def _acceptance(target: Probs, draft: Probs | None, token_id: int) -> float:
    wanted = target.of(token_id)
    offered = 0.0 if draft is None else draft.of(token_id)
    if offered <= 0 or wanted <= 0:
        return wanted
    return 1 if wanted >= offered else wanted / offered


def _after_refusal(target: Probs, draft: Probs | None, token_id: int) -> tuple[Probs, Probs | None]:
    """The distributions of the next token and of the next sibling.

    Nothing is left where target and draft are equal up to rounding: then the target stands.
    """
    if draft is None or draft.of(token_id) <= 0:
        return target.without(token_id) or target, draft
    _, rest = target.residual(draft)
    return rest or target, draft.without(token_id)


def _ratio(distributions: Distributions, tree: DraftTree, row: int) -> float:
    """Target's over draft's probability of the chain's token after ``row``."""
    token_id, draft = tree.token_ids[row], _drawn_from(distributions, tree, row)
    wanted = distributions.target(row).of(token_id)
    return wanted if draft is None or wanted <= 0 else wanted / draft.of(token_id)


def _drawn_from(distributions: Distributions, tree: DraftTree, row: int) -> Probs | None:
    """The distribution that the chain's token after ``row`` was drawn from; None where it was chosen."""
    draft = distributions.draft(row)
    return None if draft is None or draft.of(tree.token_ids[row]) <= 0 else draft


def _residual(
    distributions: Distributions, tree: DraftTree, row: int, weight: float
) -> tuple[float, Probs | None]:
    """Mass and distribution of ``max(0, weight * target - draft)`` after ``row``."""
    if row == len(tree):
        return weight, None
    target, draft = distributions.target(row), _drawn_from(distributions, tree, row)
    if draft is None:
        token_id = tree.token_ids[row]
        return weight * (1 - target.of(token_id)), target.without(token_id)
    return target.residual(draft, weight)
