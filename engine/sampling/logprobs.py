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

from engine.events import TokenLogprobs
from engine.kernels import host_kernel
from engine.transfer import Arrival, Readback, read_now, upload

_KERNEL = "top_tokens"
_CACHED_NUMEL = 1 << 19
"""On a CPU so many logits at a time stay in its cache."""
_PIECE_NUMEL = 1 << 22
"""Elsewhere it bounds the memory that ranking takes, some 30 bytes each."""
_CHOSEN = -1
"""In the place of a token that only the device knows."""


class Scored(NamedTuple):
    """A row of the logits, its token, how many of the likeliest to name beside it, and which others.
    ``token_id`` None: the token that was chosen at that row."""

    row: int
    token_id: int | None
    num_top: int
    named: tuple[int, ...] = ()


def scored_logprobs(logits: Tensor, asked: Sequence[Scored]) -> list[TokenLogprobs]:
    """``begin_scoring``, and wait for it."""
    return read_now(lambda readback: begin_scoring(logits, asked, readback))


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
    if any(each.token_id is None for each in asked):
        assert chosen is not None
        tokens = chosen.index_select(0, upload(rows, logits.device))[:, None]
        own = torch.where(own == _CHOSEN, tokens, own)

    def read(values: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        top, _ = _top(values, num_top)
        ids = torch.cat([own[part], top], dim=1)
        return ids, torch.log_softmax(values, dim=-1).gather(1, ids)

    found = _by_parts(logits, rows, read, readback)

    def finish() -> list[TokenLogprobs]:
        return [
            _told(each, list(zip(ids, values, strict=True)), num_own)
            for each, ids, values in zip(asked, *(each.tolist() for each in found), strict=True)
        ]

    return finish


def _own(scored: Scored, num: int) -> list[int]:
    """The row's token and those named, filled up to ``num``."""
    token_id = _CHOSEN if scored.token_id is None else scored.token_id
    own = [token_id, *scored.named]
    return own + [token_id] * (num - len(own))


def _told(scored: Scored, found: list[tuple[int, float]], num_own: int) -> TokenLogprobs:
    """``found``: as many as ``_own`` gives, then the likeliest."""
    top = found[num_own : num_own + scored.num_top]
    return TokenLogprobs(*found[0], tuple(top), tuple(found[1 : 1 + len(scored.named)]))


def emitted_logprobs(
    logits: Tensor, row_indices: Sequence[int], token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """``scored_logprobs`` with one ``num_top`` for all; ``token_ids`` has one token per row index."""
    return scored_logprobs(
        logits,
        [Scored(*pair, num_top) for pair in zip(row_indices, token_ids, strict=True)],
    )


def top_tokens(logits: Tensor, row_indices: Sequence[int], k: int) -> list[list[int]]:
    """``begin_top_tokens``, and wait for it."""
    return read_now(lambda readback: begin_top_tokens(logits, row_indices, k, readback))


def begin_top_tokens(
    logits: Tensor, row_indices: Sequence[int], k: int, readback: Readback
) -> Callable[[], list[list[int]]]:
    """The ``k`` likeliest tokens of each row, best first, lowest id among equals; those with
    probability 0 are left out. The first ones of them are what a smaller ``k`` gives."""
    if not len(row_indices):
        return list
    token_ids, values = _by_parts(logits, row_indices, lambda rows, _: _top(rows, k), readback)
    return lambda: [
        ids if not best or best[-1] > -math.inf else ids[: best.index(-math.inf)]
        for ids, best in zip(token_ids.tolist(), values.tolist(), strict=True)
    ]


TopProbs = tuple[list[list[int]], list[list[float]]]
"""Per row, token ids and their probabilities."""


def top_probs(logits: Tensor, row_indices: Sequence[int], k: int) -> TopProbs:
    """``begin_top_probs``, and wait for it."""
    return read_now(lambda readback: begin_top_probs(logits, row_indices, k, readback))


def begin_top_probs(
    logits: Tensor, row_indices: Sequence[int], k: int, readback: Readback
) -> Callable[[], TopProbs]:
    """``begin_top_tokens``, and their probabilities under the unprocessed logits."""

    def read(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        token_ids, values = _top(rows, k)
        return token_ids, values - _log_sums(rows)

    def finish() -> TopProbs:
        exp = math.exp
        probs = [[exp(each) for each in row if each > -math.inf] for row in logprobs.tolist()]
        ids = token_ids.tolist()
        return [each[: len(row)] for each, row in zip(ids, probs, strict=True)], probs

    if not len(row_indices):
        return lambda: ([], [])
    token_ids, logprobs = _by_parts(logits, row_indices, read, readback)
    return finish


def _by_parts(
    logits: Tensor,
    row_indices: Sequence[int],
    read: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    readback: Readback,
) -> tuple[Arrival, Arrival]:
    """What ``read`` finds in the rows, as float32, and which of them it is given: token ids and floats,
    some of each per row."""
    numel = _PIECE_NUMEL if host_kernel(_KERNEL, logits.device) is None else _CACHED_NUMEL
    num_rows = max(1, numel // logits.shape[1])
    with torch.inference_mode():
        index = upload(row_indices, logits.device)
        parts = [slice(first, first + num_rows) for first in range(0, len(index), num_rows)]
        found = [read(logits.index_select(0, index[part]).float(), part) for part in parts]
        token_ids, values = (readback.add(torch.cat(each)) for each in zip(*found, strict=True))
    return token_ids, values


def _log_sums(rows: Tensor) -> Tensor:
    """Of the exponentials of each row's logits, ``[num_rows, 1]``."""
    kernel = host_kernel(_KERNEL, rows.device)
    sums: Tensor = (
        torch.logsumexp(rows, -1, keepdim=True) if kernel is None else kernel.log_sums(rows)
    )
    return sums


def _top(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest logits of each row, ``[num_rows, k]``, by (logit descending, id
    ascending). A compiled kernel finds them on a CPU."""
    k = min(k, rows.shape[1])
    if k == 0:
        nothing = rows.new_empty(len(rows), 0)
        return nothing.long(), nothing
    kernel = host_kernel(_KERNEL, rows.device)
    if kernel is not None:
        return kernel.top_rows(rows, k)  # type: ignore[no-any-return]
    token_ids = _ordered(rows).topk(k).indices
    return token_ids, rows.gather(1, token_ids).nan_to_num_(-math.inf, math.inf, -math.inf)


def _ordered(values: Tensor) -> Tensor:
    """Integers that order float32 values, and among equal ones the lowest id as largest: int64. What is
    no number comes last."""
    values = (values + 0.0).nan_to_num_(-math.inf, math.inf, -math.inf)  # two zeros of one value
    bits = values.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) - torch.arange(values.shape[1], device=values.device)
