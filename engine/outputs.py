"""What else is read off a step's forward: top tokens for drafters, log-probabilities for clients, hidden
states. Each kind is gathered for all requests at once, so that a step waits for the device once per
kind and not once per request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch

from drafters.base import HiddenRows, Observation
from engine.batch import RequestRows
from engine.sampling.logprobs import Scored, scored_logprobs, top_probs, top_tokens
from engine.schedule.request import Request, ScheduledRequest
from engine.verification.match import Outcome


class Part(NamedTuple):
    """A request's part in a step, and where its rows lie in the batch."""

    scheduled: ScheduledRequest
    rows: RequestRows

    @property
    def anchor_logit(self) -> int:
        """The anchor's row among the logits, if the request samples."""
        return self.rows.first_logit + self.rows.num_logits - 1 - len(self.rows.parents)


class _Top(NamedTuple):
    """Of a request's anchor and nodes, row by row."""

    token_ids: Sequence[Sequence[int]] | None = None
    probs: Sequence[Sequence[float]] | None = None


_NO_TOP = _Top()


def observe_rows(
    parts: Sequence[Part], logits: torch.Tensor
) -> list[tuple[ScheduledRequest, Observation]]:
    """What the drafters are shown of the requests that sampled."""
    tops = _top_rows(parts, logits)
    return [
        (part.scheduled, _observation(part.scheduled, part.scheduled.outcome, top))
        for part, top in zip(parts, tops, strict=True)
        if part.scheduled.outcome is not None
    ]


def _observation(scheduled: ScheduledRequest, outcome: Outcome, top: _Top) -> Observation:
    request = scheduled.request
    return Observation(
        request.request_id,
        request.token_ids,
        scheduled.draft.tree,
        outcome.row_token_ids,
        outcome.path,
        outcome.emitted_token_ids,
        top.token_ids,
        top.probs,
    )


def _top_rows(parts: Sequence[Part], logits: torch.Tensor) -> list[_Top]:
    tops = [_NO_TOP] * len(parts)
    asking = [
        (index, part)
        for index, part in enumerate(parts)
        if part.scheduled.wants.num_top_tokens and part.scheduled.outcome is not None
    ]
    for with_probs in (False, True) if asking else ():
        group = [each for each in asking if each[1].scheduled.wants.top_probs == with_probs]
        if not group:
            continue
        rows = [row for _, part in group for row in _own_logits(part)]
        most = max(part.scheduled.wants.num_top_tokens for _, part in group)
        token_ids, probs = _read_top(logits, rows, most, with_probs)
        first = 0
        for index, part in group:
            end, k = first + len(_own_logits(part)), part.scheduled.wants.num_top_tokens
            tops[index] = _Top(
                [row[:k] for row in token_ids[first:end]],
                [row[:k] for row in probs[first:end]] if with_probs else None,
            )
            first = end
    return tops


def _read_top(
    logits: torch.Tensor, rows: Sequence[int], k: int, with_probs: bool
) -> tuple[list[list[int]], list[list[float]]]:
    return top_probs(logits, rows, k) if with_probs else (top_tokens(logits, rows, k), [])


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
    index = torch.tensor([row for rows in kept for row in rows], device=hidden.device)
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


def read_logprobs(parts: Sequence[Part], logits: torch.Tensor) -> None:
    """Keep with the requests the log-probabilities that they asked for: of tokens emitted in this step,
    and of prompt tokens that follow its known rows, all of which have logits then."""
    asked: list[Scored] = []
    prompt_positions: list[list[int]] = []
    for part in parts:
        positions = _prompt_positions(part)
        prompt_positions.append(positions)
        asked += _scored_prompt(part, positions)
        asked += _scored_emitted(part)
    if not asked:
        return
    found = iter(scored_logprobs(logits, asked))
    for part, positions in zip(parts, prompt_positions, strict=True):
        request = part.scheduled.request
        request.prompt_logprobs.update(
            zip((at + 1 for at in positions), islice(found, len(positions)), strict=True)
        )
        if _wants_logprobs(request) and part.scheduled.outcome is not None:
            num_emitted = len(part.scheduled.outcome.emitted_token_ids)
            part.scheduled.logprobs = tuple(islice(found, num_emitted))


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


def _scored_emitted(part: Part) -> list[Scored]:
    outcome = part.scheduled.outcome
    sampling = part.scheduled.request.params.sampling
    num_top = sampling.logprobs
    if outcome is None or num_top is None:
        return []
    # The path leads from row to row: the token at each of its rows is the next one emitted.
    first, emitted = part.anchor_logit, outcome.emitted_token_ids
    return [
        Scored(first + row, token_id, num_top, sampling.logprob_token_ids)
        for row, token_id in zip(outcome.path, emitted, strict=False)
    ]
