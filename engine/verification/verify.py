"""How each request's drafts are verified in a step: one strategy per request, by its own wish.

``match`` compares with the token that the target chose (``match.py``). ``rejection`` and
``block`` accept drafts with a probability (``rejection.py``): here they get the target's and the
drafter's distributions as tensors and their answers from streams 2 and 3 of the request's noise, whose
keys name the step, so that none is ever used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drafters.tree import DraftTree
from engine.params import VerificationName
from engine.sampling.distribution import target_probs
from engine.sampling.noise import ACCEPT_STREAM, RESIDUAL_STREAM, step_key, uniform_scalar
from engine.sampling.sampler import sample_tokens
from engine.sampling.state import RowGroup
from engine.verification.match import Outcome, trimmed, verify
from engine.verification.rejection import Probs, Rule, reject_chain, reject_tokens

_NO_TOKEN = -1


Verification = Callable[[Tensor, Sequence[RowGroup]], list[Outcome]]
"""From a step's logits ``[num_rows, vocab_size]``, left as they are, to one outcome per group."""


def _match(logits: Tensor, groups: Sequence[RowGroup]) -> list[Outcome]:
    """The target's own token at every row; drafts that equal it are accepted."""
    return verify(groups, sample_tokens(logits, groups))


def _reject(rule: Rule, logits: Tensor, groups: Sequence[RowGroup]) -> list[Outcome]:
    """Drafts are accepted by the rule, and the last token is sampled from what it leaves."""
    with torch.inference_mode():
        probs = target_probs(logits, groups)
        distributions = _distributions(probs, [group.tree for group in groups])
        return [_outcome(rule, *pair) for pair in zip(groups, distributions, strict=True)]


def _outcome(rule: Rule, group: RowGroup, distributions: TensorDistributions) -> Outcome:
    state = group.state
    accept_key = step_key(state.key, ACCEPT_STREAM, state.num_steps)
    residual_key = step_key(state.key, RESIDUAL_STREAM, state.num_steps)
    path, last = rule(
        group.tree, distributions, lambda row, chance: uniform_scalar(accept_key, row) < chance
    )
    assert isinstance(last, TensorProbs)
    tokens = [_NO_TOKEN] * group.num_rows
    for row, below in zip(path, path[1:], strict=False):
        tokens[row] = group.tree.token_ids[below - 1]
    tokens[path[-1]] = last.sample(uniform_scalar(residual_key, path[-1]))
    return trimmed(state, tuple(tokens), path)


_VERIFICATIONS: dict[VerificationName, Verification] = {
    "match": _match,
    "rejection": partial(_reject, reject_tokens),
    "block": partial(_reject, reject_chain),
}


def verify_step(logits: Tensor, groups: Sequence[RowGroup]) -> list[Outcome]:
    """One outcome per group, each by its request's verification. States are read, not advanced."""
    outcomes: dict[int, Outcome] = {}
    for name, verification in _VERIFICATIONS.items():
        index = [i for i, group in enumerate(groups) if group.state.verification == name]
        if index:
            found = verification(logits, [groups[i] for i in index])
            outcomes.update(zip(index, found, strict=True))
    return [outcomes[i] for i in range(len(groups))]


@dataclass(frozen=True, slots=True)
class TensorProbs:
    """A distribution as a tensor ``[vocab_size]`` of any float type, with some of its entries at hand
    on the CPU. Whatever is derived is float64."""

    values: Tensor
    at_hand: Mapping[int, float] = field(default_factory=dict)

    def of(self, token_id: int) -> float:
        known = self.at_hand.get(token_id)
        return self.values[token_id].item() if known is None else known

    def residual(self, draft: Probs, weight: float = 1.0) -> tuple[float, TensorProbs | None]:
        assert isinstance(draft, TensorProbs)
        above = (self.values.double() * weight).sub_(draft.values).clamp_(min=0)
        return _normalised(above)

    def without(self, token_id: int) -> TensorProbs | None:
        others = self.values.double().clone()
        others[token_id] = 0.0
        return _normalised(others)[1]

    def sample(self, uniform: float) -> int:
        """The token at this quantile; never one of probability 0."""
        sums = self.values.double().cumsum(0)
        # The product may round up to the whole, which no sum exceeds.
        at = torch.minimum(sums[-1] * uniform, sums[-1].nextafter(torch.zeros_like(sums[-1])))
        return int(torch.searchsorted(sums, at, right=True))


def _normalised(masses: Tensor) -> tuple[float, TensorProbs | None]:
    mass = float(masses.sum())
    return (mass, TensorProbs(masses.div_(mass))) if mass > 0 else (0.0, None)


@dataclass(frozen=True, slots=True)
class TensorDistributions:
    """One request's rows: ``engine.verification.rejection.Distributions``."""

    targets: list[TensorProbs]
    drafts: Mapping[int, TensorProbs]

    def target(self, row: int) -> TensorProbs:
        return self.targets[row]

    def draft(self, row: int) -> TensorProbs | None:
        return self.drafts.get(row)


def _distributions(probs: Tensor, trees: Sequence[DraftTree]) -> list[TensorDistributions]:
    """Each tree's rows out of ``probs`` ``[num_rows, vocab_size]``, where they follow each other.

    The probabilities of drafted tokens reach the CPU in one copy each for target and drafters.
    """
    firsts: list[int] = [0]
    rows: list[int] = []
    tokens: list[int] = []
    for tree in trees:
        rows += [firsts[-1] + parent + 1 for parent in tree.parents]
        tokens += tree.token_ids
        firsts.append(firsts[-1] + 1 + len(tree))
    at_hand: list[dict[int, float]] = [{} for _ in range(len(probs))]
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=probs.device)
    for row, token_id, prob in zip(rows, tokens, probs[index[0], index[1]].tolist(), strict=True):
        at_hand[row][token_id] = prob
    return [
        TensorDistributions(
            [TensorProbs(probs[row], at_hand[row]) for row in range(first, end)],
            _drafts(tree, probs),
        )
        for tree, first, end in zip(trees, firsts[:-1], firsts[1:], strict=True)
    ]


def _drafts(tree: DraftTree, like: Tensor) -> dict[int, TensorProbs]:
    """By row, what its children were sampled from."""
    children: dict[int, list[int]] = {}
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        children.setdefault(parent, []).append(token_id)
    dense = {
        parent: _dense(tree.draft_probs[parent], like)
        for parent in children
        if parent in tree.draft_probs
    }
    if not dense:
        return {}
    sampled = [dense[parent][children[parent]].double() for parent in dense]
    known = iter(torch.cat(sampled).tolist())
    return {
        parent + 1: TensorProbs(values, {token_id: next(known) for token_id in children[parent]})
        for parent, values in dense.items()
    }


def _dense(probs: Any, like: Tensor) -> Tensor:
    """A drafter's distribution as a tensor ``[vocab_size]`` on the target's device."""
    if isinstance(probs, Tensor):
        return probs.to(like.device)
    values = torch.zeros(like.shape[1], dtype=torch.float64)
    values[list(probs)] = torch.tensor(list(probs.values()), dtype=torch.float64)
    return values.to(like.device)
