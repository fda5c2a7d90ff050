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
from functools import partial

import torch
from torch import Tensor

from engine.request.outcome import Outcome
from engine.request.params import VerificationName
from engine.sampling.noise import ACCEPT_STREAM, RESIDUAL_STREAM, step_key, uniform_scalar
from engine.sampling.sampler import choose_tokens, target_probs
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
_RULES: dict[VerificationName, Rule] = {"rejection": reject_tokens, "block": reject_chain}


def begin_verification(
    logits: Tensor, requests: Sequence[SampledRequest], readback: Readback
) -> tuple[Callable[[], None], Tensor | None]:
    """Begins each request's own verification of the step's ``logits`` ``[num_rows, vocab_size]``, which
    are left as they are. States are read, not advanced.

    Returns what gives the requests their outcomes once the readback was fetched, and the target's own
    token at every row, where any request is matched: int64 ``[num_rows]``, where the logits are.
    """
    matched = [each for each in requests if each.sampling.verification == "match"]
    tokens = choose_tokens(logits, matched) if matched else None
    finishing = [] if tokens is None else [_begin_matching(tokens, matched, readback)]
    for name, rule in _RULES.items():
        own = [each for each in requests if each.sampling.verification == name]
        if own:
            finishing.append(_begin_rejection(rule, logits, own, readback))

    def finish() -> None:
        for each in finishing:
            each()

    return finish, tokens


def _begin_matching(
    tokens: Tensor, requests: Sequence[SampledRequest], readback: Readback
) -> Callable[[], None]:
    """Drafts that equal the target's own token at their row are accepted."""
    chosen = readback.add(tokens)

    def finish() -> None:
        token_ids = chosen.tolist()
        for each in requests:
            rows = rows_of(each)
            each.outcome = verify(each, token_ids[rows.start : rows.stop])

    return finish


def _begin_rejection(
    rule: Rule, logits: Tensor, requests: Sequence[SampledRequest], readback: Readback
) -> Callable[[], None]:
    """Drafts are accepted by the rule, and the last token is sampled from what it leaves."""
    with torch.inference_mode():
        probs = target_probs(logits, requests)
        distributions = begin_distributions(probs, [each.draft for each in requests], readback)
    return lambda: _reject(rule, requests, *distributions())


@torch.inference_mode()
def _reject(
    rule: Rule,
    requests: Sequence[SampledRequest],
    distributions: Sequence[TensorDistributions],
    questions: Questions,
) -> None:
    runs = [
        partial(rule, each.draft, own, _accepts(each.sampling))
        for each, own in zip(requests, distributions, strict=True)
    ]
    decisions = decide(runs, questions)
    uniforms = [
        _uniform(each.sampling, RESIDUAL_STREAM, decision.path[-1])
        for each, decision in zip(requests, decisions, strict=True)
    ]
    last = sample_all([decision.last for decision in decisions], uniforms)
    for each, decision, token_id in zip(requests, decisions, last, strict=True):
        each.outcome = _outcome(each, decision, token_id)


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
