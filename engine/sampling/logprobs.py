"""Log-probabilities and likeliest tokens of chosen rows, from the model's unprocessed logits.

All rows of a step that want the same kind of figure are asked for at once: one pass over the logits
and one transfer. Everything is computed row by row in float32, so a row's bits do not depend on its
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.events import TokenLogprobs
from engine.kernels import find_kernel
from engine.sampling.gumbel_argmax import gather_logits, group_maxima
from engine.sampling.noise_torch import group_table

_KERNEL = "top_tokens"
_CACHED_NUMEL = 1 << 19
_FURTHER_GROUPS = 4


class Scored(NamedTuple):
    """A row of the logits, its token, how many of the likeliest to name beside it, and which others."""

    row: int
    token_id: int
    num_top: int
    named: tuple[int, ...] = ()


def scored_logprobs(logits: Tensor, asked: Sequence[Scored]) -> list[TokenLogprobs]:
    """For each row: the log-probabilities of its token, of those named, and of the ``num_top`` likeliest,
    best first.

    ``logits`` ``[num_rows, vocab_size]``, any float type, as the model gave them. Rows of prompt
    tokens are asked for in the same way, with the token that follows.
    """
    if not asked:
        return []
    num_top = max(each.num_top for each in asked)
    num_own = 1 + max(len(each.named) for each in asked)
    own = torch.tensor([_own(each, num_own) for each in asked], device=logits.device)

    def read(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        token_ids, _ = _top(rows, num_top)
        token_ids = torch.cat([own[part], token_ids], dim=1)
        return token_ids, torch.log_softmax(rows, dim=-1).gather(1, token_ids)

    found = _by_parts(logits, [each.row for each in asked], read)
    return [
        _told(each, list(zip(ids, values, strict=True)), num_own)
        for each, ids, values in zip(asked, *found, strict=True)
    ]


def _own(scored: Scored, num: int) -> list[int]:
    """The row's token and those named, filled up to ``num``."""
    own = [scored.token_id, *scored.named]
    return own + [scored.token_id] * (num - len(own))


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
    """The ``k`` likeliest tokens of each row, best first, lowest id among equals; those with
    probability 0 are left out. The first ones of them are what a smaller ``k`` gives."""
    token_ids, values = _by_parts(logits, row_indices, lambda rows, _: _top(rows, k))
    return [
        ids if not best or best[-1] > -math.inf else ids[: best.index(-math.inf)]
        for ids, best in zip(token_ids, values, strict=True)
    ]


def top_probs(
    logits: Tensor, row_indices: Sequence[int], k: int
) -> tuple[list[list[int]], list[list[float]]]:
    """``top_tokens``, and their probabilities under the unprocessed logits."""

    def read(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        token_ids, values = _top(rows, k)
        return token_ids, values - _log_sums(rows)

    token_ids, logprobs = _by_parts(logits, row_indices, read)
    exp = math.exp
    probs = [[exp(each) for each in row if each > -math.inf] for row in logprobs]
    return [ids[: len(row)] for ids, row in zip(token_ids, probs, strict=True)], probs


def _by_parts(
    logits: Tensor,
    row_indices: Sequence[int],
    read: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
) -> tuple[list[list[int]], list[list[float]]]:
    """What ``read`` finds in the rows, as float32, and which of them it is given: token ids and floats,
    some of each per row. On a CPU so many rows at a time as stay in its cache."""
    if not len(row_indices):
        return [], []
    num_rows = len(row_indices)
    if logits.device.type == "cpu":
        num_rows = max(1, _CACHED_NUMEL // logits.shape[1])
    with torch.inference_mode():
        index = torch.tensor(row_indices, device=logits.device)
        parts = [slice(first, first + num_rows) for first in range(0, len(index), num_rows)]
        found = [read(logits.index_select(0, index[part]).float(), part) for part in parts]
        token_ids, values = (torch.cat(each).tolist() for each in zip(*found, strict=True))
    return token_ids, values


def _kernel_for(rows: Tensor) -> Any:
    """None where there is none."""
    return find_kernel(_KERNEL) if rows.device.type == "cpu" else None


def _log_sums(rows: Tensor) -> Tensor:
    """Of the exponentials of each row's logits, ``[num_rows, 1]``."""
    kernel = _kernel_for(rows)
    sums: Tensor = (
        torch.logsumexp(rows, -1, keepdim=True) if kernel is None else kernel.log_sums(rows)
    )
    return sums


def _top(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest logits of each row, ``[num_rows, k]``, by (logit descending, id
    ascending).

    A compiled kernel finds them on a CPU. Elsewhere they are looked for in the groups with the largest
    maxima: the first k of them hold the k largest logits, but for equal ones in other groups. A few more
    hold those, too, as a rule; where the last group's maximum could still be among the k, the whole row
    is looked at.
    """
    k = min(k, rows.shape[1])
    if k == 0:
        nothing = rows.new_empty(len(rows), 0)
        return nothing.long(), nothing
    kernel = _kernel_for(rows)
    if kernel is not None:
        return kernel.top_rows(rows, k)  # type: ignore[no-any-return]
    maxima = group_maxima(rows)
    num = min(k + _FURTHER_GROUPS, maxima.shape[1])
    best, groups = maxima.topk(num)
    owners = torch.arange(len(rows), device=rows.device).repeat_interleave(num)
    table = group_table(maxima.shape[1], rows.device)
    token_ids = table.token_ids.index_select(0, groups.view(-1))
    values = gather_logits(rows, owners, token_ids).view(len(rows), -1)
    token_ids = token_ids.view(len(rows), -1)
    at = _ordered(values, token_ids).topk(k).indices
    values, token_ids = values.gather(1, at), token_ids.gather(1, at)
    if num < maxima.shape[1]:
        unsure = (best[:, -1] >= values[:, -1]).nonzero()[:, 0]
        for row in unsure.tolist():
            _look_at_all(rows[row], values[row], token_ids[row])
    return token_ids, values


def _ordered(values: Tensor, token_ids: Tensor) -> Tensor:
    """Integers that order float32 values, and among equal ones the lowest id as largest: int64."""
    bits = (values + 0.0).view(torch.int32)  # there are two zeros, of one value
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) - token_ids


def _look_at_all(row: Tensor, values: Tensor, token_ids: Tensor) -> None:
    """Put a whole row's largest logits and their ids in place of what was found in some groups."""
    ids = (row >= values[-1]).nonzero()[:, 0]
    best, order = row[ids].sort(descending=True, stable=True)
    num = min(len(values), len(ids))  # fewer where a row has NaNs
    values[:num], token_ids[:num] = best[:num], ids[order[:num]]
