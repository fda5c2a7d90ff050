"""Reads a step's forward: which drafts stand, and the target's token after them; top tokens for drafters,
log-probabilities for clients; and hidden states, which stay where they are. Each kind is gathered for all
requests at once, and all that comes to the host comes in one copy.

One strategy verifies a request, by its own wish. ``match`` compares with the token that the target chose
(``match.py``). ``rejection`` and ``block`` accept drafts with a probability (``rejection.py``): here they
get the target's and the drafter's distributions as tensors and their answers from streams 2 and 3 of the
request's noise, whose keys name the step, so that none is ever used twice.

A verification begins with work for the device, in shapes that the host knows, and ends when what it reads
has come, with whatever else the step reads. Matching then needs nothing more. The others read again what
a refused draft leaves (once for all requests and, in trees, once for every further refusal at a row), and
then their last tokens: two waits more for chains, at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels import are_read, host_kernel, is_host
from engine.request.outcome import Outcome
from engine.request.params import VerificationName
from engine.request.stats import StepClock
from engine.sampling.logprobs import Scored, begin_scoring, begin_top_tokens
from engine.sampling.noise import ACCEPT_STREAM, RESIDUAL_STREAM, step_key, uniform_scalar
from engine.sampling.sampler import choose_tokens, target_probs
from engine.sampling.state import SampledRequest, SamplingState, rows_of
from engine.schedule.request import ScheduledRequest
from engine.transfer import Readback, read_now
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
_FEW_LOGITS = 1 << 23
"""So many are copied at once where copies are needed; more, which prompts' log-probabilities ask for,
part by part."""
_FEW_GREEDY = 8
"""If one of so many greedy rows is looked at for its top tokens, all are, at once: that takes a fifth
longer than to look for the likeliest alone."""
_RULES: dict[VerificationName, Rule] = {"rejection": reject_tokens, "block": reject_chain}


class Reading(NamedTuple):
    """A step that is being read. ``finish`` waits for the device and keeps with the requests what their
    rows say. ``tokens`` ``[num_rows]``, int64, where the logits are: the target's own at every row with
    logits, where any request is matched."""

    finish: Callable[[], None]
    tokens: Tensor | None


def begin_reading(
    requests: Sequence[ScheduledRequest],
    logits: Tensor,
    clock: StepClock,
    waits: bool = False,
    known: Tensor | None = None,
    copied: Tensor | None = None,
) -> Reading:
    """Begins all that is read of a step before any of it is, to be read in one go, with one wait for the
    device; only verification by rejection, and what follows from it, waits again. Where that is not
    needed and reading ``waits``, as it does for a device, the logits may be written over once this
    returns. ``known`` as ``choose_tokens`` takes it. ``copied`` ``[2, num_rows]``: tokens of drafts that
    the device has made, and how many agree before them.
    """
    readback = Readback()
    if known is None and logits.numel() <= _FEW_LOGITS:
        # All who read them would do so by themselves.
        logits = logits.contiguous() if are_read(logits) else logits.float()
    sampling = [each for each in requests if each.samples]
    with clock.measure("verify"):
        for each in sampling:
            each.leave_out_late_drafts()
    with clock.measure("draft"):
        finish_tops, likeliest = begin_top_rows(sampling, logits, readback)
    with clock.measure("verify"):
        finish_verification, tokens = begin_verification(
            logits, sampling, readback, likeliest, known
        )
    finish_logprobs = begin_logprobs(requests, logits, tokens, readback, waits)
    finish_drafts = _begin_drafts(sampling, copied, readback)
    readback.send()

    def finish() -> None:
        with clock.measure("verify"):
            readback.fetch()
            finish_drafts()
            finish_verification()
        with clock.measure("draft"):
            finish_tops()
        finish_logprobs()

    return Reading(finish, tokens)


# --- which drafts stand ---


def _begin_drafts(
    requests: Sequence[ScheduledRequest], copied: Tensor | None, readback: Readback
) -> Callable[[], None]:
    """The tokens of drafts that the device has made."""
    if copied is None:
        return lambda: None
    arrived = readback.add(copied)

    def finish() -> None:
        token_ids, matched = arrived.tolist()
        for each in requests:
            rows = rows_of(each)
            if each.copies is not None:
                each.read_draft(token_ids[rows.start + 1 : rows.stop], matched[rows.start])

    return finish


def begin_verification(
    logits: Tensor,
    requests: Sequence[SampledRequest],
    readback: Readback,
    likeliest: Tensor | None = None,
    known: Tensor | None = None,
) -> tuple[Callable[[], None], Tensor | None]:
    """Begins each request's own verification of the step's ``logits`` ``[num_rows, vocab_size]``, which
    are left as they are. States are read, not advanced. ``likeliest`` and ``known`` as ``choose_tokens``
    takes them.

    Returns what gives the requests their outcomes once the readback was fetched, and the target's own
    token at every row, where any request is matched: int64 ``[num_rows]``, where the logits are.
    """
    matched = [each for each in requests if each.sampling.verification == "match"]
    tokens = choose_tokens(logits, matched, likeliest, known) if matched else None
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


# --- for drafters ---


def begin_top_rows(
    sampling: Sequence[ScheduledRequest], logits: Tensor, readback: Readback
) -> tuple[Callable[[], None], Tensor | None]:
    """The top tokens that drafters want to see, of all rows of requests that sample: who is accepted is
    not known yet. Also returns the likeliest of every row of the step, ``[num_rows]``, where a CPU has
    looked at all of them: to look for these again would take it nearly as long."""
    asking = [each for each in sampling if each.num_top_tokens]
    if not asking:
        return lambda: None, None
    rows = [row for each in asking for row in rows_of(each)]
    most = max(each.num_top_tokens for each in asking)
    with_probs = any(each.wants_top_probs for each in asking)
    is_host = host_kernel("top_tokens", logits.device) is not None
    # Greedy rows are looked at in any case.
    if (
        is_host
        and not with_probs
        and _FEW_GREEDY * len(rows) > len(logits)
        and all(each.sampling.is_greedy for each in sampling)
    ):
        rows = [*range(len(logits))]
    found, tokens = begin_top_tokens(logits, rows, most, readback, with_probs)

    def finish() -> None:
        token_ids, values, probs = found()
        first = 0
        for each in asking:
            if len(rows) == len(logits):
                first = each.anchor_logit
            own, k = slice(first, first + 1 + len(each.draft)), each.num_top_tokens
            each.top_token_ids, each.top_logits = token_ids[own], values[own]
            if probs is not None and each.wants_top_probs:
                each.top_probs = probs[own]
            if k < most:
                each.leave_top_tokens(k)
            first = own.stop

    if tokens is None or not is_host:
        return finish, None
    return finish, tokens[:, 0] if len(rows) == len(logits) else None


# --- for clients ---


def begin_logprobs(
    requests: Sequence[ScheduledRequest],
    logits: Tensor,
    tokens: Tensor | None,
    readback: Readback,
    waits: bool = False,
) -> Callable[[], None]:
    """The log-probabilities that requests asked for: of tokens emitted in this step, and of prompt
    tokens that follow its known rows, which all have logits then. ``tokens``: the target's tokens at
    every row, with which matching compares drafts.

    If reading ``waits``, all rows of a matched draft are scored, by the tokens chosen there. Elsewhere,
    and for other verifications, emitted tokens are scored once they are known.
    """
    prompts = [(each, at) for each in requests for at in _prompt_positions(each)]
    scored = [
        each for each in requests if each.samples and each.sampling.params.logprobs is not None
    ]
    if not (prompts or scored):
        return lambda: None
    early: list[tuple[ScheduledRequest, range]] = []
    late: list[ScheduledRequest] = []
    for each in scored:
        is_early = waits or not is_host(logits.device)
        is_matched = each.sampling.verification == "match"
        if is_early and is_matched:
            early.append((each, rows_of(each)))
        else:
            late.append(each)
    asked = [_scored_prompt(each, at) for each, at in prompts]
    asked += [_scored(each, row, None) for each, rows in early for row in rows]
    found = begin_scoring(logits, asked, readback, tokens)

    def finish() -> None:
        read = iter(found())
        for each, at in prompts:
            each.request.prompt_logprobs[at + 1] = next(read)
        for each, rows in early:
            own = list(islice(read, len(rows)))
            each.logprobs = tuple(own[row] for row, _ in _emitted_rows(each))
        _score_emitted(late, logits)

    return finish


def _prompt_positions(each: ScheduledRequest) -> list[int]:
    """Positions of known rows whose next token is the prompt's and was not scored yet."""
    request = each.request
    if not request.wants_prompt_logprobs:
        return []
    last = min(each.base + each.num_known, request.num_prompt_tokens - 1)
    return [at for at in range(each.base, last) if at + 1 not in request.prompt_logprobs]


def _scored_prompt(each: ScheduledRequest, at: int) -> Scored:
    params, token_id = each.sampling.params, each.request.token_ids[at + 1]
    row = each.rows.first_logit + at - each.base
    return Scored(row, token_id, params.prompt_logprobs or 0, params.logprob_token_ids)


def _scored(each: ScheduledRequest, row: int, token_id: int | None) -> Scored:
    params = each.sampling.params
    return Scored(row, token_id, params.logprobs or 0, params.logprob_token_ids)


def _emitted_rows(each: ScheduledRequest) -> list[tuple[int, int]]:
    """The rows that emitted tokens came from, counted from the anchor's, and these tokens: the path leads
    from row to row, and the token at each is the next one emitted, unless the run was trimmed."""
    outcome = each.outcome
    assert outcome is not None
    return list(zip(outcome.path, outcome.emitted_token_ids, strict=False))


def _score_emitted(requests: Sequence[ScheduledRequest], logits: Tensor) -> None:
    asked = [
        _scored(each, each.anchor_logit + row, token_id)
        for each in requests
        for row, token_id in _emitted_rows(each)
    ]
    found = iter(read_now(lambda readback: begin_scoring(logits, asked, readback)))
    for each in requests:
        each.logprobs = tuple(islice(found, len(_emitted_rows(each))))
