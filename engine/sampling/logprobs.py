"""Log-probabilities and likeliest tokens of chosen rows, from the model's unprocessed logits.

Everything is computed row by row in float32, so a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.events import TokenLogprobs
from engine.sampling.gumbel_argmax import gather_logits, group_maxima
from engine.sampling.noise_torch import group_table


def emitted_logprobs(
    logits: Tensor, row_indices: Sequence[int], token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """For each row: the log-probability of its token and the ``num_top`` likeliest, best first.

    ``logits`` ``[num_rows, vocab_size]``, any float type, as the model gave them; ``token_ids`` has
    one token per row index. Rows of prompt tokens are asked for in the same way, with the token
    that follows.
    """
    if not len(row_indices):
        return []
    with torch.inference_mode():
        rows = _rows(logits, row_indices)
        logprobs = torch.log_softmax(rows, dim=-1)  # [num_rows, vocab_size]
        chosen = torch.tensor(token_ids, device=logits.device)[:, None]
        chosen_logprobs = logprobs.gather(1, chosen)[:, 0].tolist()
        top = [[token_id for token_id, _ in pairs] for pairs in _top(rows, num_top)]
        top_logprobs = [logprobs[i, ids].tolist() for i, ids in enumerate(top)]
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(ids, values, strict=True)))
        for token_id, logprob, ids, values in zip(
            token_ids, chosen_logprobs, top, top_logprobs, strict=True
        )
    ]


def top_tokens(logits: Tensor, row_indices: Sequence[int], k: int) -> list[list[int]]:
    """The ``k`` likeliest tokens of each row, best first, lowest id among equals; those with
    probability 0 are left out."""
    if not len(row_indices):
        return []
    with torch.inference_mode():
        top = _top(_rows(logits, row_indices), k)
    return [[token_id for token_id, value in pairs if value > -math.inf] for pairs in top]


def top_probs(
    logits: Tensor, row_indices: Sequence[int], k: int
) -> tuple[list[list[int]], list[list[float]]]:
    """``top_tokens``, and their probabilities under the unprocessed logits."""
    if not len(row_indices):
        return [], []
    with torch.inference_mode():
        rows = _rows(logits, row_indices)
        totals = torch.logsumexp(rows, dim=-1).tolist()
        pairs = [[each for each in row if each[1] > -math.inf] for row in _top(rows, k)]
    token_ids = [[token_id for token_id, _ in row] for row in pairs]
    probs = [
        [math.exp(value - total) for _, value in row]
        for row, total in zip(pairs, totals, strict=True)
    ]
    return token_ids, probs


def _rows(logits: Tensor, row_indices: Sequence[int]) -> Tensor:
    index = torch.tensor(row_indices, device=logits.device)
    return logits.index_select(0, index).float()


def _top(rows: Tensor, k: int) -> list[list[tuple[int, float]]]:
    """The k largest logits of each row and their ids, by (logit descending, id ascending).

    The k + 1 groups with the largest maxima hold the k + 1 largest logits. ``topk`` leaves open which
    of equal values it returns, so ties across the border are settled by looking at the whole row.
    """
    k = min(k, rows.shape[1])
    if k == 0:
        return [[] for _ in rows]
    maxima = group_maxima(rows)
    num = min(k + 1, maxima.shape[1])
    groups = maxima.topk(num).indices.view(-1)
    owners = torch.arange(len(rows), device=rows.device).repeat_interleave(num)
    candidates = group_table(maxima.shape[1], rows.device).token_ids.index_select(0, groups)
    values = gather_logits(rows, owners, candidates).view(len(rows), -1)
    values, at = values.topk(k + 1)
    token_ids = candidates.view(len(rows), -1).gather(1, at)
    top = []
    for row, (best, ids) in enumerate(zip(values.tolist(), token_ids.tolist(), strict=True)):
        pairs = list(zip(ids, best, strict=True))[:k]
        if best[k] == best[k - 1]:
            ids = (rows[row] >= best[k - 1]).nonzero()[:, 0].tolist()
            pairs = list(zip(ids, rows[row, ids].tolist(), strict=True))
        top.append(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k])
    return top
