"""How each request's drafts are verified in a step: one strategy per request, by its own wish.

``match`` compares with the token that the target chose (``match.py``). ``rejection`` and
``block`` accept drafts with a probability (``rejection.py``): here they get the target's and the
drafter's distributions as tensors and their answers from streams 2 and 3 of the request's noise, whose
keys name the step, so that none is ever used twice.

A verification begins with work for the device, in shapes that the host knows, and ends when what it reads
has come, with whatever else the step reads. Matching then needs nothing more. The others read again what
a refused draft leaves (once for all requests and, in trees, once for every further refusal at a row), and
then their last tokens: two waits more for chains, at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.params import VerificationName
from engine.sampling.distribution import target_probs
from engine.sampling.noise import ACCEPT_STREAM, RESIDUAL_STREAM, step_key, uniform_scalar
from engine.sampling.sampler import choose_tokens
from engine.sampling.state import RowGroup, SamplingState
from engine.transfer import Readback, read_now
from engine.verification.match import Outcome, trimmed, verify
from engine.verification.probs import (
    Questions,
    TensorDistributions,
    begin_distributions,
    decide,
    sample_all,
)
from engine.verification.rejection import Accepts, Decision, Rule, reject_chain, reject_tokens

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Pending:
    """A verification that waits for what it reads. ``finish``: one outcome per group, once that was
    fetched. ``tokens``: the target's own token at every row of the logits, where these are what is
    verified with: int64 ``[num_rows]``, where the logits are."""

    finish: Callable[[], list[Outcome]]
    tokens: Tensor | None = None


Verification = Callable[[Tensor, Sequence[RowGroup], Readback], Pending]
"""From a step's logits ``[num_rows, vocab_size]``, left as they are, to one outcome per group."""


def _match(logits: Tensor, groups: Sequence[RowGroup], readback: Readback) -> Pending:
    """The target's own token at every row; drafts that equal it are accepted."""
    tokens = choose_tokens(logits, groups)
    chosen = readback.add(tokens)
    return Pending(lambda: verify(groups, chosen.tolist()), tokens)


def _reject(rule: Rule, logits: Tensor, groups: Sequence[RowGroup], readback: Readback) -> Pending:
    """Drafts are accepted by the rule, and the last token is sampled from what it leaves."""
    with torch.inference_mode():
        probs = target_probs(logits, groups)
        trees = [group.tree for group in groups]
        distributions = begin_distributions(probs, trees, readback)
    return Pending(lambda: _decided(rule, groups, *distributions()))


@torch.inference_mode()
def _decided(
    rule: Rule,
    groups: Sequence[RowGroup],
    distributions: Sequence[TensorDistributions],
    questions: Questions,
) -> list[Outcome]:
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


def begin_verification(logits: Tensor, groups: Sequence[RowGroup], readback: Readback) -> Pending:
    """Each group by its request's verification. States are read, not advanced."""
    tokens: Tensor | None = None
    finishing: list[tuple[list[int], Pending]] = []
    for name, verification in _VERIFICATIONS.items():
        index = [i for i, group in enumerate(groups) if group.state.verification == name]
        if index:
            pending = verification(logits, [groups[i] for i in index], readback)
            finishing.append((index, pending))
            tokens = pending.tokens if tokens is None else tokens

    def finish() -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for index, pending in finishing:
            outcomes.update(zip(index, pending.finish(), strict=True))
        return [outcomes[i] for i in range(len(groups))]

    return Pending(finish, tokens)


def verify_step(logits: Tensor, groups: Sequence[RowGroup]) -> list[Outcome]:
    """``begin_verification``, and wait for it."""
    return read_now(lambda readback: begin_verification(logits, groups, readback).finish)
