"""From the logits of a step to the target's token at every row, in one pass over all rows.

Order, per row: the request's processors (``processor.py``): penalties, biases, what is forbidden,
and truncations that the search does not know; then greedy rows take the largest logit, and sampled
rows divide by the temperature, keep what top-k, top-p and min-p keep, in this order, and take the
largest sum of logit and noise (the Gumbel-max trick). Everything from here on is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.gumbel_argmax import greedy_tokens, sampled_tokens
from engine.sampling.state import SampledRequest, paths, rows_of
from engine.transfer import upload

_NO_TOKEN = -1


def choose_tokens(logits: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """The target's token at every row of ``requests``; -1 at rows that belong to none. Int64
    ``[num_rows]``, where the logits are.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row's
    token depends on its own logits, its request's parameters, its path, the request's key and the
    position, and on nothing else in the batch.
    """
    with torch.inference_mode():
        values = edited_logits(logits, requests)
        greedy = [each for each in requests if each.sampling.is_greedy]
        sampled = [each for each in requests if not each.sampling.is_greedy]
        chosen = torch.full((len(values),), _NO_TOKEN, device=values.device)
        if greedy:
            rows = _all_rows(greedy)
            chosen = _assigned(chosen, rows, greedy_tokens(_select(values, rows)))
        if sampled:
            rows = _all_rows(sampled)
            chosen = _assigned(chosen, rows, _sampled(_select(values, rows), sampled))
        return chosen


def edited_logits(logits: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """Float32 logits after the requests' processors, each row by the state after its path: ``logits``
    itself where nothing changes, else a copy. Same shape."""
    values = logits.float()
    for each in requests:
        processors = each.sampling.processors_now()
        if processors:
            values = logits.clone() if values is logits else values
            own = rows_of(each)
            rows, row_paths = values[own.start : own.stop], paths(each.draft)
            for processor in processors:
                processor.process(rows, row_paths)
    return values


def _sampled(values: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """``values``: the requests' rows, one after another."""
    rows = [(each.sampling, depth) for each in requests for depth in (0, *each.draft.depths())]
    keys = np.array([state.key for state, _ in rows], np.int64)
    positions = np.array([state.num_tokens + depth for state, depth in rows], np.int64)
    return sampled_tokens(values, keys, positions, [state.params for state, _ in rows])


def _all_rows(requests: Sequence[SampledRequest]) -> list[int]:
    return [row for each in requests for row in rows_of(each)]


def _select(values: Tensor, rows: list[int]) -> Tensor:
    if _are_all(rows, values):
        return values.contiguous()
    return values.index_select(0, upload(rows, values.device))


def _assigned(chosen: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
    if _are_all(rows, chosen):
        return tokens
    return chosen.index_copy_(0, upload(rows, chosen.device), tokens)


def _are_all(rows: list[int], of: Tensor) -> bool:
    return len(rows) == len(of) and rows == list(range(len(rows)))
