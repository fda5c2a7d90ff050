"""Reads a step's forward: outcomes, top tokens for drafters, log-probabilities for clients;
and hidden states, which stay where they are. Each kind is gathered for all requests at once, and all that
comes to the host comes in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch

from drafters.base import HiddenRows
from engine.request.stats import StepClock
from engine.sampling.logprobs import Scored, begin_scoring, begin_top_tokens
from engine.sampling.state import rows_of
from engine.schedule.request import ScheduledRequest
from engine.transfer import Readback, is_host, read_now, upload
from engine.verification.verify import begin_verification


def read_step(requests: Sequence[ScheduledRequest], logits: torch.Tensor, clock: StepClock) -> None:
    """Keep with the requests what their rows say: outcomes, top tokens for drafters, log-probabilities.

    All of it is begun before anything is read, and read in one go, with one wait for the device; only
    verification by rejection, and what follows from it, waits again.
    """
    readback = Readback()
    sampling = [each for each in requests if each.samples]
    with clock.measure("verify"):
        finish_verification, tokens = begin_verification(logits, sampling, readback)
    with clock.measure("draft"):
        finish_tops = begin_top_rows(sampling, logits, readback)
    finish_logprobs = begin_logprobs(requests, logits, tokens, readback)
    with clock.measure("verify"):
        readback.fetch()
        finish_verification()
    with clock.measure("draft"):
        finish_tops()
    finish_logprobs()


# --- for drafters ---


def begin_top_rows(
    sampling: Sequence[ScheduledRequest], logits: torch.Tensor, readback: Readback
) -> Callable[[], None]:
    """The top tokens that drafters want to see, of all rows of requests that sample: who is accepted is
    not known yet."""
    asking = [each for each in sampling if each.num_top_tokens]
    rows = [row for each in asking for row in rows_of(each)]
    most = max((each.num_top_tokens for each in asking), default=0)
    with_probs = any(each.wants_top_probs for each in asking)
    found = begin_top_tokens(logits, rows, most, readback, with_probs)

    def finish() -> None:
        token_ids, probs = found()
        first = 0
        for each in asking:
            own, k = slice(first, first + 1 + len(each.draft)), each.num_top_tokens
            each.top_token_ids = [row[:k] for row in token_ids[own]]
            if probs is not None and each.wants_top_probs:
                each.top_probs = [row[:k] for row in probs[own]]
            first = own.stop

    return finish


def hidden_rows(
    requests: Sequence[ScheduledRequest], hidden: torch.Tensor | None
) -> list[HiddenRows]:
    """The states of newly committed tokens, ``hidden`` ``[num_rows, hidden_size]``, for the requests
    whose drafters read them. Every request gets memory of its own, which it may keep."""
    wanted = [each for each in requests if each.wants_hidden]
    if hidden is None or not wanted:
        return []
    kept = []
    for each in wanted:
        first, anchor = each.rows.first_row, each.rows.first_row + each.num_known - 1
        kept.append([*range(first, anchor + 1), *(anchor + row for row in each.accepted_rows)])
    index = upload([row for rows in kept for row in rows], hidden.device)
    return [
        HiddenRows(
            each.request.request_id, each.base, each.request.token_ids, hidden.index_select(0, own)
        )
        for each, own in zip(wanted, index.split([len(rows) for rows in kept]), strict=True)
    ]


# --- for clients ---


def begin_logprobs(
    requests: Sequence[ScheduledRequest],
    logits: torch.Tensor,
    tokens: torch.Tensor | None,
    readback: Readback,
) -> Callable[[], None]:
    """The log-probabilities that requests asked for: of tokens emitted in this step, and of prompt tokens
    that follow its known rows, all of which have logits then. ``tokens``: what matching compares drafts
    with, at every row.

    Where reading means to wait, all rows of a draft that is matched are scored, by the tokens chosen
    there. Elsewhere, and for other verifications, emitted tokens are scored once they are known.
    """
    prompts = [(each, at) for each in requests for at in _prompt_positions(each)]
    early: list[ScheduledRequest] = []
    late: list[ScheduledRequest] = []
    for each in requests:
        if each.samples and each.sampling.params.logprobs is not None:
            is_early = not is_host(logits.device) and each.sampling.verification == "match"
            (early if is_early else late).append(each)
    asked = [_scored_prompt(each, at) for each, at in prompts]
    asked += [_scored(each, row, None) for each in early for row in rows_of(each)]
    found = begin_scoring(logits, asked, readback, tokens)

    def finish() -> None:
        read = iter(found())
        for each, at in prompts:
            each.request.prompt_logprobs[at + 1] = next(read)
        for each in early:
            own = list(islice(read, 1 + len(each.draft)))
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


def _score_emitted(requests: Sequence[ScheduledRequest], logits: torch.Tensor) -> None:
    asked = [
        _scored(each, each.anchor_logit + row, token_id)
        for each in requests
        for row, token_id in _emitted_rows(each)
    ]
    found = iter(read_now(lambda readback: begin_scoring(logits, asked, readback)))
    for each in requests:
        each.logprobs = tuple(islice(found, len(_emitted_rows(each))))
