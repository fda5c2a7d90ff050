"""What is read off a step's forward: outcomes, top tokens for drafters, log-probabilities for clients;
and hidden states, which stay where they are. Each kind is gathered for all requests at once, and all that
comes to the host comes in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from drafters.base import HiddenRows, Observation
from engine.batch import RequestRows
from engine.events import TokenLogprobs
from engine.sampling.logprobs import (
    Scored,
    begin_scoring,
    begin_top_probs,
    begin_top_tokens,
    scored_logprobs,
)
from engine.sampling.state import RowGroup
from engine.schedule.request import Request, ScheduledRequest, TopRows
from engine.stats import StepClock
from engine.transfer import Readback, is_host, upload
from engine.verification.match import Outcome
from engine.verification.verify import begin_verification


class Part(NamedTuple):
    """A request's part in a step, and where its rows lie in the batch."""

    scheduled: ScheduledRequest
    rows: RequestRows

    @property
    def anchor_logit(self) -> int:
        """The anchor's row among the logits, if the request samples."""
        return self.rows.first_logit + self.rows.num_logits - 1 - len(self.rows.parents)


def read_step(parts: Sequence[Part], logits: torch.Tensor, clock: StepClock) -> None:
    """Keep with the requests what their rows say: outcomes, top tokens for drafters, log-probabilities.

    All of it is begun before anything is read, and read in one go, with one wait for the device; only
    verification by rejection, and what follows from it, waits again.
    """
    readback = Readback()
    sampling = [part for part in parts if part.scheduled.samples]
    with clock.measure("verify"):
        pending = begin_verification(logits, [_group(part) for part in sampling], readback)
    with clock.measure("draft"):
        finish_tops = begin_top_rows(sampling, logits, readback)
    finish_logprobs = begin_logprobs(parts, logits, pending.tokens, readback)
    with clock.measure("verify"):
        readback.fetch()
        for part, outcome in zip(sampling, pending.finish(), strict=True):
            part.scheduled.outcome = outcome
    with clock.measure("draft"):
        finish_tops()
    finish_logprobs()


def _group(part: Part) -> RowGroup:
    return RowGroup(part.scheduled.request.sampling, part.anchor_logit, part.scheduled.draft.tree)


# --- for drafters ---


def observations(parts: Sequence[Part]) -> list[tuple[ScheduledRequest, Observation]]:
    """What the drafters are shown of the requests that sampled."""
    return [
        (part.scheduled, _observation(part.scheduled, part.scheduled.outcome))
        for part in parts
        if part.scheduled.outcome is not None
    ]


def _observation(scheduled: ScheduledRequest, outcome: Outcome) -> Observation:
    request = scheduled.request
    return Observation(
        request.request_id,
        request.token_ids,
        scheduled.draft.tree,
        outcome.row_token_ids,
        outcome.path,
        outcome.emitted_token_ids,
        scheduled.top.token_ids,
        scheduled.top.probs,
    )


def begin_top_rows(
    sampling: Sequence[Part], logits: torch.Tensor, readback: Readback
) -> Callable[[], None]:
    """The top tokens that drafters want to see, of all rows of requests that sample: who is accepted is
    not known yet."""
    asking = [part for part in sampling if part.scheduled.wants.num_top_tokens]
    finishing = [
        _begin_tops(some, logits, with_probs, readback)
        for with_probs in (False, True)
        if (some := [each for each in asking if each.scheduled.wants.top_probs == with_probs])
    ]

    def finish() -> None:
        for each in finishing:
            each()

    return finish


def _begin_tops(
    parts: Sequence[Part], logits: torch.Tensor, with_probs: bool, readback: Readback
) -> Callable[[], None]:
    rows = [row for part in parts for row in _own_logits(part)]
    most = max(part.scheduled.wants.num_top_tokens for part in parts)
    found = (
        begin_top_probs(logits, rows, most, readback)
        if with_probs
        else begin_top_tokens(logits, rows, most, readback)
    )

    def finish() -> None:
        read = found()
        token_ids, probs = read if isinstance(read, tuple) else (read, [])
        first = 0
        for part in parts:
            end, k = first + len(_own_logits(part)), part.scheduled.wants.num_top_tokens
            part.scheduled.top = TopRows(
                [row[:k] for row in token_ids[first:end]],
                [row[:k] for row in probs[first:end]] if with_probs else None,
            )
            first = end

    return finish


def _own_logits(part: Part) -> range:
    """The anchor's and its nodes' rows among the logits."""
    return range(part.anchor_logit, part.rows.first_logit + part.rows.num_logits)


def hidden_rows(parts: Sequence[Part], hidden: torch.Tensor | None) -> list[HiddenRows]:
    """The states of newly committed tokens, ``hidden`` ``[num_rows, hidden_size]``, for the requests
    whose drafters read them. Every request gets memory of its own, which it may keep."""
    wanted = [part for part in parts if part.scheduled.wants.hidden]
    if hidden is None or not wanted:
        return []
    kept = [_kept_rows(part) for part in wanted]
    index = upload([row for rows in kept for row in rows], hidden.device)
    return [
        HiddenRows(
            part.scheduled.request.request_id,
            part.scheduled.base,
            part.scheduled.request.token_ids,
            hidden.index_select(0, own),
        )
        for part, own in zip(wanted, index.split([len(rows) for rows in kept]), strict=True)
    ]


def _kept_rows(part: Part) -> list[int]:
    anchor = part.rows.first_row + part.scheduled.num_known - 1
    accepted = (anchor + row for row in part.scheduled.accepted_rows)
    return [*range(part.rows.first_row, anchor + 1), *accepted]


# --- for clients ---


def begin_logprobs(
    parts: Sequence[Part],
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
    is_waiting = not is_host(logits.device)
    asked: list[Scored] = []
    slices: list[slice] = []
    finishing: list[Callable[[Sequence[TokenLogprobs]], None]] = []
    late: list[Part] = []

    def ask(rows: list[Scored], keep: Callable[[Sequence[TokenLogprobs]], None]) -> None:
        slices.append(slice(len(asked), len(asked) + len(rows)))
        asked.extend(rows)
        finishing.append(keep)

    for part in parts:
        positions = _prompt_positions(part)
        if positions:
            ask(_scored_prompt(part, positions), partial(_keep_prompt, part, positions))
        if not _wants_logprobs(part.scheduled.request) or not part.scheduled.samples:
            continue
        if is_waiting and part.scheduled.request.sampling.verification == "match":
            ask(_scored_rows(part), partial(_keep_path, part))
        else:
            late.append(part)
    found = begin_scoring(logits, asked, readback, tokens)

    def finish() -> None:
        read = found()
        for rows, keep in zip(slices, finishing, strict=True):
            keep(read[rows])
        _score_emitted(late, logits)

    return finish


def _keep_prompt(part: Part, positions: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
    kept = part.scheduled.request.prompt_logprobs
    kept.update(zip((at + 1 for at in positions), found, strict=True))


def _keep_path(part: Part, found: Sequence[TokenLogprobs]) -> None:
    """``found``: of all rows. The path leads from row to row: the token at each of its rows is the next
    one emitted."""
    outcome = part.scheduled.outcome
    assert outcome is not None
    rows = zip(outcome.path, outcome.emitted_token_ids, strict=False)
    part.scheduled.logprobs = tuple(found[row] for row, _ in rows)


def _score_emitted(parts: Sequence[Part], logits: torch.Tensor) -> None:
    asked = [_scored_emitted(part) for part in parts]
    found = iter(scored_logprobs(logits, [each for rows in asked for each in rows]))
    for part, rows in zip(parts, asked, strict=True):
        part.scheduled.logprobs = tuple(islice(found, len(rows)))


def _wants_logprobs(request: Request) -> bool:
    return request.params.sampling.logprobs is not None


def _prompt_positions(part: Part) -> list[int]:
    """Of known rows whose next token is the prompt's and was not scored yet."""
    request, base = part.scheduled.request, part.scheduled.base
    if not request.wants_prompt_logprobs:
        return []
    last = min(base + part.scheduled.num_known, request.num_prompt_tokens - 1)
    return [at for at in range(base, last) if at + 1 not in request.prompt_logprobs]


def _scored_prompt(part: Part, positions: Sequence[int]) -> list[Scored]:
    request = part.scheduled.request
    first, num_top = part.rows.first_logit - part.scheduled.base, _prompt_top(request)
    named = request.params.sampling.logprob_token_ids
    return [Scored(first + at, request.token_ids[at + 1], num_top, named) for at in positions]


def _prompt_top(request: Request) -> int:
    return request.params.sampling.prompt_logprobs or 0


def _scored_rows(part: Part) -> list[Scored]:
    sampling = part.scheduled.request.params.sampling
    return [
        Scored(row, None, sampling.logprobs or 0, sampling.logprob_token_ids)
        for row in _own_logits(part)
    ]


def _scored_emitted(part: Part) -> list[Scored]:
    outcome, sampling = part.scheduled.outcome, part.scheduled.request.params.sampling
    assert outcome is not None
    first = part.anchor_logit
    return [
        Scored(first + row, token_id, sampling.logprobs or 0, sampling.logprob_token_ids)
        for row, token_id in zip(outcome.path, outcome.emitted_token_ids, strict=False)
    ]
