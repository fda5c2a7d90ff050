"""Log-probabilities and likeliest tokens of chosen rows, from the model's unprocessed logits.

Everything is computed row by row in float32, so a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.events import TokenLogprobs


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
        top = _top(rows, min(num_top, rows.shape[1]))
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
        rows = _rows(logits, row_indices)
        top = _top(rows, min(k, rows.shape[1]))
        if bool((rows == float("-inf")).any()):
            return [
                [
                    t
                    for t, value in zip(ids, rows[i, ids].tolist(), strict=True)
                    if value > -torch.inf
                ]
                for i, ids in enumerate(top)
            ]
    return top


def _rows(logits: Tensor, row_indices: Sequence[int]) -> Tensor:
    index = torch.tensor(row_indices, device=logits.device)
    return logits.index_select(0, index).float()


def _top(rows: Tensor, k: int) -> list[list[int]]:
    """Ids of the k largest values of each row, ordered by (value descending, id ascending).

    ``topk`` leaves open which of equal values it returns, so ties are settled afterwards.
    """
    if k == 0:
        return [[] for _ in rows]
    values, token_ids = rows.topk(min(k + 1, rows.shape[1]))
    ordered = []
    for row, (best, ids) in enumerate(zip(values.tolist(), token_ids.tolist(), strict=True)):
        if len(best) > k and best[k] == best[k - 1]:
            # Equal values straddle the border: look at all of them.
            ids = (rows[row] >= best[k - 1]).nonzero()[:, 0].tolist()
            best = rows[row, ids].tolist()
        pairs = sorted(zip(best, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        ordered.append([token_id for _, token_id in pairs[:k]])
    return ordered
