"""Log-probabilities and likeliest tokens of chosen rows, from the model's unprocessed logits.

All rows of a step that want the same kind of figure are asked for at once: one pass over the logits,
read with whatever else the step reads. Everything is computed row by row in float32, so a row's bits do
not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels import host_kernel
from engine.request.events import TokenLogprobs
from engine.transfer import Arrival, Readback, upload

_KERNEL = "top_tokens"
_CACHED_NUMEL = 1 << 19
"""On a CPU so many logits at a time stay in its cache."""
_PIECE_NUMEL = 1 << 22
"""Elsewhere it bounds the memory that ranking takes, some 30 bytes each."""
_CHOSEN = -1
"""Stands for a token that only the device knows."""


class Scored(NamedTuple):
    """A row of the logits, its token, how many of the likeliest to name beside it, and which others.
    ``token_id`` None: the token that was chosen at that row."""

    row: int
    token_id: int | None
    num_top: int
    named: tuple[int, ...] = ()


def begin_scoring(
    logits: Tensor, asked: Sequence[Scored], readback: Readback, chosen: Tensor | None = None
) -> Callable[[], list[TokenLogprobs]]:
    """For each row: the log-probabilities of its token, of those named, and of the ``num_top`` likeliest,
    best first.

    ``logits`` ``[num_rows, vocab_size]``, any float type, as the model gave them. Rows of prompt
    tokens are asked for in the same way, with the token that follows. ``chosen`` ``[num_rows]``: the
    tokens of rows that name none.
    """
    if not asked:
        return list
    num_top = max(each.num_top for each in asked)
    num_own = 1 + max(len(each.named) for each in asked)
    rows = [each.row for each in asked]
    own = upload([_own(each, num_own) for each in asked], logits.device)
    if chosen is not None:
        tokens = chosen.index_select(0, upload(rows, logits.device))[:, None]
        own = torch.where(own == _CHOSEN, tokens, own)

    def read(values: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        top, _ = _top(values, num_top)
        ids = torch.cat([own[part], top], dim=1)
        return ids, torch.log_softmax(values, dim=-1).gather(1, ids)

    found = _by_parts(logits, rows, read, readback)

    def finish() -> list[TokenLogprobs]:
        told = []
        for each, ids, values in zip(asked, *(each.tolist() for each in found), strict=True):
            pairs = list(zip(ids, values, strict=True))
            top, named = pairs[num_own : num_own + each.num_top], pairs[1 : 1 + len(each.named)]
            told.append(TokenLogprobs(*pairs[0], tuple(top), tuple(named)))
        return told

    return finish


def _own(scored: Scored, num: int) -> list[int]:
    """The row's token and those named, filled up to ``num``."""
    token_id = _CHOSEN if scored.token_id is None else scored.token_id
    return [token_id, *scored.named] + [token_id] * (num - 1 - len(scored.named))


TopTokens = tuple[list[list[int]], list[list[float]], list[list[float]] | None]
"""Per row, token ids, their logits, and where they were asked for their probabilities."""


def begin_top_tokens(
    logits: Tensor,
    row_indices: Sequence[int],
    k: int,
    readback: Readback,
    with_probs: bool = False,
) -> tuple[Callable[[], TopTokens], Tensor | None]:
    """The ``k`` likeliest tokens of each row, best first, lowest id among equals; those with
    probability 0 are left out. The first ones of them are what a smaller ``k`` gives. Probabilities are
    those of the unprocessed logits. Also returns the tokens where the logits are, ``[num_asked, k]``,
    int64; None: no row is asked for."""
    if not len(row_indices):
        return lambda: ([], [], [] if with_probs else None), None

    def read(rows: Tensor, part: slice) -> tuple[Tensor, ...]:  # noqa: ARG001
        found = _top(rows, k)
        return (*found, _log_sums(rows)) if with_probs else found

    is_host = host_kernel(_KERNEL, logits.device) is not None
    if not is_host or with_probs:
        found = _by_parts(logits, row_indices, read, readback)
    else:  # which reads rows once, where they are
        found = tuple(map(readback.add, _top(logits.contiguous(), k, row_indices)))

    def finish() -> TopTokens:
        token_ids, values, *sums = (each.tolist() for each in found)
        for ids, row in zip(token_ids, values, strict=True):
            if row[-1:] == [-math.inf]:
                num_none = row.count(-math.inf)
                del ids[-num_none:], row[-num_none:]
        if not with_probs:
            return token_ids, values, None
        rows = zip(values, *sums, strict=True)
        probs = [[math.exp(each - total) for each in row] for row, (total,) in rows]
        return token_ids, values, probs

    return finish, found[0].sent


def _by_parts(
    logits: Tensor,
    row_indices: Sequence[int],
    read: Callable[[Tensor, slice], tuple[Tensor, ...]],
    readback: Readback,
) -> tuple[Arrival, ...]:
    """Numbers of some kinds, so many of each per row, that ``read`` finds in the rows as float32; it is
    also told which of them it is given."""
    numel = _PIECE_NUMEL if host_kernel(_KERNEL, logits.device) is None else _CACHED_NUMEL
    num_rows = max(1, numel // logits.shape[1])
    with torch.inference_mode():
        chosen = _chooser(logits, row_indices)
        parts = [slice(first, first + num_rows) for first in range(0, len(row_indices), num_rows)]
        first, *others = (read(chosen(part).float().contiguous(), part) for part in parts)
        found = [torch.cat(each) for each in zip(first, *others, strict=True)] if others else first
    return tuple(map(readback.add, found))


def _chooser(logits: Tensor, row_indices: Sequence[int]) -> Callable[[slice], Tensor]:
    """Returns what gives a part of these rows. Where they lie together, as all rows of a step mostly do,
    none is copied."""
    first, number = row_indices[0], len(row_indices)
    if list(row_indices) == [*range(first, first + number)]:
        return logits[first : first + number].__getitem__
    index = upload(row_indices, logits.device)
    return lambda part: logits.index_select(0, index[part])


def _log_sums(rows: Tensor) -> Tensor:
    """Logarithms of the sums of each row's exponentials, ``[num_rows, 1]``."""
    kernel = host_kernel(_KERNEL, rows.device)
    sums: Tensor = (
        torch.logsumexp(rows, -1, keepdim=True) if kernel is None else kernel.log_sums(rows)
    )
    return sums


def _top(rows: Tensor, k: int, which: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest logits of each row, ``[num_rows, k]``, by (logit descending, id
    ascending). A compiled kernel finds them on a CPU, of all rows or of ``which``."""
    k = min(k, rows.shape[1])
    if k == 0:
        nothing = rows.new_empty(len(rows if which is None else which), 0)
        return nothing.long(), nothing
    kernel = host_kernel(_KERNEL, rows.device)
    if kernel is not None:
        return kernel.top_rows(rows, k, which)  # type: ignore[no-any-return]
    token_ids = _ordered(rows).topk(k).indices
    return token_ids, rows.gather(1, token_ids).nan_to_num_(-math.inf, math.inf, -math.inf)


def _ordered(values: Tensor) -> Tensor:
    """Integers that order float32 values, and among equal ones the lowest id as largest: int64. What is
    no number comes last."""
    values = (values + 0.0).nan_to_num_(-math.inf, math.inf, -math.inf)  # two zeros of one value
    bits = values.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) - torch.arange(values.shape[1], device=values.device)
