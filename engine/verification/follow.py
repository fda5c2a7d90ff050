"""The rows of a step that is launched before the drafts of the one before are read: where they lie, and
what they draft, is worked out where the target's tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from engine.batch import InputBatch, slots_of
from engine.kernels.copying import MOST_TOKENS, NUM_COLUMNS, Record, copy_rows
from engine.sampling.state import rows_of
from engine.schedule.request import Request, ScheduledRequest
from engine.transfer import upload


class Follower:
    """Keeps the texts of requests whose drafts are copied there, as far as the host has told them; each
    step it tells what it has read since."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._texts = torch.empty(0, MOST_TOKENS, dtype=torch.int32)
        self._places: dict[Request, int] = {}
        self._num_told: dict[int, int] = {}
        """Tokens reported so far, by place."""

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._num_told.pop(self._places.pop(request, -1), None)

    def follow(
        self,
        parts: Sequence[ScheduledRequest],
        next_parts: Sequence[ScheduledRequest],
        batch: InputBatch,
        tokens: torch.Tensor,
        copied: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Says which tokens the rows of ``batch``, that of ``next_parts``, have, and where they lie.
        ``parts``: their requests' in the step before; ``tokens``: what the target chose at its rows with
        logits; ``copied``: what this has returned for it, if it was launched ahead too. Returns the
        drafts that are made for ``batch``, if any are, or may have been refused, as ``begin_reading``
        takes them."""
        if not any(each.draft for each in (*parts, *next_parts)):
            anchors = [each.anchor_logit for each in parts]
            is_all = anchors == list(range(len(tokens)))
            batch.chosen = tokens if is_all else tokens[upload(anchors, tokens.device)]
            return None
        drafted = _drafted_rows(parts, tokens) if copied is None else copied[0]
        records, rest = list[int](), list[int]()
        rest_at = len(next_parts) * len(Record._fields)
        for part, each in zip(parts, next_parts, strict=True):
            text, rows = each.request.token_ids, each.rows
            first, slots_at = rows.base - rows.num_unsure, rest_at + len(rest)
            rest += slots_of(rows.block_table, first, rows.end, self._block_size)
            new_at, place, first_new = rest_at + len(rest), -1, 0
            if each.draft:
                place = self._place(each.request, tokens.device)
                first_new, self._num_told[place] = self._num_told[place], len(text)
                rest += text[first_new:]
            before, after = (part.anchor_logit, len(part.draft)), (rows.first_row, len(each.draft))
            known = place, len(text), first_new, new_at
            records += Record(*known, *before, *after, *(each.copies or (0, 0)), slots_at)
        told = upload(records + rest, tokens.device, torch.int32)
        most_nodes = max(len(each.draft) for each in (*parts, *next_parts))
        sizes = len(next_parts), batch.num_rows, most_nodes
        found = copy_rows(told, self._texts, tokens, drafted, *sizes)
        batch.chosen, batch.moved = found[0], found[1:4]
        return found[4:NUM_COLUMNS]

    def _place(self, request: Request, device: torch.device) -> int:
        place = self._places.get(request)
        if place is None:
            place = next(at for at in count() if at not in self._num_told)
            self._places[request], self._num_told[place] = place, 0
        if place >= len(self._texts):
            texts = torch.zeros(2 * place + 1, MOST_TOKENS, dtype=torch.int32, device=device)
            texts[: len(self._texts)] = self._texts
            self._texts = texts
        return place


def _drafted_rows(parts: Sequence[ScheduledRequest], tokens: torch.Tensor) -> torch.Tensor:
    """Returns the tokens of a step's rows with logits, whose drafts the host has made, beside what was
    chosen there, ``tokens``; -1 for rows that are in no draft."""
    listed = [-1] * len(tokens)
    for each in parts:
        rows = rows_of(each)
        listed[rows.start + 1 : rows.stop] = each.draft.token_ids
    return upload(listed, tokens.device, torch.int64)


def warm_up(device: torch.device) -> None:
    """Compiles what copies drafts before there are requests to wait for it."""
    told = torch.zeros(len(Record._fields), dtype=torch.int32, device=device)
    texts = torch.zeros(1, MOST_TOKENS, dtype=torch.int32, device=device)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    copy_rows(told, texts, rows, rows, 1, 1, 0)
