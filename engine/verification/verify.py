"""Verifies each request's drafts in a step: one strategy per request, by its own wish.

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

from engine.request.outcome import Outcome
from engine.request.params import VerificationName
from engine.sampling.distribution import target_probs
from engine.sampling.noise import ACCEPT_STREAM, RESIDUAL_STREAM, step_key, uniform_scalar
from engine.sampling.sampler import choose_tokens
from engine.sampling.state import SampledRequest, SamplingState, rows_of
from engine.transfer import Readback
from engine.verification.match import trimmed, verify
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
    """A verification that waits for what it reads. ``finish``: one outcome per request, once that was
    fetched. ``tokens``: the target's own token at every row of the logits, where these are what is
    verified with: int64 ``[num_rows]``, where the logits are."""

    finish: Callable[[], list[Outcome]]
    tokens: Tensor | None = None


Verification = Callable[[Tensor, Sequence[SampledRequest], Readback], Pending]
"""From a step's logits ``[num_rows, vocab_size]``, left as they are, to one outcome per request."""


def _match(logits: Tensor, requests: Sequence[SampledRequest], readback: Readback) -> Pending:
    """The target's own token at every row; drafts that equal it are accepted."""
    tokens = choose_tokens(logits, requests)
    chosen = readback.add(tokens)

    def finish() -> list[Outcome]:
        token_ids = chosen.tolist()
        own = [rows_of(each) for each in requests]
        return [
            verify(each, token_ids[rows.start : rows.stop])
            for each, rows in zip(requests, own, strict=True)
        ]

    return Pending(finish, tokens)


def _reject(
    rule: Rule, logits: Tensor, requests: Sequence[SampledRequest], readback: Readback
) -> Pending:
    """Drafts are accepted by the rule, and the last token is sampled from what it leaves."""
    with torch.inference_mode():
        probs = target_probs(logits, requests)
        drafts = [each.draft for each in requests]
        distributions = begin_distributions(probs, drafts, readback)
    return Pending(lambda: _decided(rule, requests, *distributions()))


@torch.inference_mode()
def _decided(
    rule: Rule,
    requests: Sequence[SampledRequest],
    distributions: Sequence[TensorDistributions],
    questions: Questions,
) -> list[Outcome]:
    runs = [
        partial(rule, each.draft, own, _accepts(each.sampling))
        for each, own in zip(requests, distributions, strict=True)
    ]
    decisions = decide(runs, questions)
    last = sample_all(
        [decision.last for decision in decisions],
        [
            _uniform(each.sampling, RESIDUAL_STREAM, decision.path[-1])
            for each, decision in zip(requests, decisions, strict=True)
        ],
    )
    return [_outcome(*each) for each in zip(requests, decisions, last, strict=True)]


def _accepts(state: SamplingState) -> Accepts:
    return lambda row, chance: _uniform(state, ACCEPT_STREAM, row) < chance


def _uniform(state: SamplingState, stream: int, row: int) -> float:
    return uniform_scalar(step_key(state.key, stream, state.num_steps), row)


def _outcome(request: SampledRequest, decision: Decision, last: int) -> Outcome:
    path, draft = decision.path, request.draft
    tokens = [_NO_TOKEN] * (1 + len(draft))
    for row, below in zip(path, path[1:], strict=False):
        tokens[row] = draft.token_ids[below - 1]
    tokens[path[-1]] = last
    return trimmed(request.sampling, tuple(tokens), path)


_VERIFICATIONS: dict[VerificationName, Verification] = {
    "match": _match,
    "rejection": partial(_reject, reject_tokens),
    "block": partial(_reject, reject_chain),
}


def begin_verification(
    logits: Tensor, requests: Sequence[SampledRequest], readback: Readback
) -> Pending:
    """Begins each request's own verification. States are read, not advanced."""
    tokens: Tensor | None = None
    finishing: list[tuple[list[int], Pending]] = []
    for name, verification in _VERIFICATIONS.items():
        index = [i for i, each in enumerate(requests) if each.sampling.verification == name]
        if index:
            pending = verification(logits, [requests[i] for i in index], readback)
            finishing.append((index, pending))
            tokens = pending.tokens if tokens is None else tokens

    def finish() -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for index, pending in finishing:
            outcomes.update(zip(index, pending.finish(), strict=True))
        return [outcomes[i] for i in range(len(requests))]

    return Pending(finish, tokens)
