"""How each request's drafts are verified in a step: one strategy per request, by its own wish.

``match`` compares with the token that the target chose (``match.py``). ``rejection`` and
``block`` accept drafts with a probability (``rejection.py``): here they get the target's and the
drafter's distributions as tensors and their answers from streams 2 and 3 of the request's noise, whose
keys name the step, so that none is ever used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.params import VerificationName
from engine.sampling.distribution import target_probs
from engine.sampling.noise import ACCEPT_STREAM, RESIDUAL_STREAM, step_key, uniform_scalar
from engine.sampling.sampler import sample_tokens
from engine.sampling.state import RowGroup, SamplingState
from engine.verification.match import Outcome, trimmed, verify
from engine.verification.probs import decide, sample_all, step_distributions
from engine.verification.rejection import Accepts, Decision, Rule, reject_chain, reject_tokens

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
        distributions, questions = step_distributions(probs, [group.tree for group in groups])
        runs = [
            partial(rule, group.tree, own, _accepts(group.state))
            for group, own in zip(groups, distributions, strict=True)
        ]
        decisions = decide(runs, questions)
        last = sample_all(
            [decision.last for decision in decisions],
            [
                _uniform(group.state, RESIDUAL_STREAM, decision.path[-1])
                for group, decision in zip(groups, decisions, strict=True)
            ],
        )
    return [_outcome(*each) for each in zip(groups, decisions, last, strict=True)]


def _accepts(state: SamplingState) -> Accepts:
    return lambda row, chance: _uniform(state, ACCEPT_STREAM, row) < chance


def _uniform(state: SamplingState, stream: int, row: int) -> float:
    return uniform_scalar(step_key(state.key, stream, state.num_steps), row)


def _outcome(group: RowGroup, decision: Decision, last: int) -> Outcome:
    path = decision.path
    tokens = [_NO_TOKEN] * group.num_rows
    for row, below in zip(path, path[1:], strict=False):
        tokens[row] = group.tree.token_ids[below - 1]
    tokens[path[-1]] = last
    return trimmed(group.state, tuple(tokens), path)


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
