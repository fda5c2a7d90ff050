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

from engine.sampling.gumbel_argmax import SampledRows, greedy_tokens, sampled_tokens
from engine.sampling.state import RowGroup

_NO_TOKEN = -1


def sample_tokens(logits: Tensor, groups: Sequence[RowGroup]) -> list[int]:
    """The target's token at every row of ``groups``; -1 at rows that belong to none.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row's
    token depends on its own logits, its request's parameters, its path, the request's key and the
    position, and on nothing else in the batch.
    """
    with torch.inference_mode():
        return _sample(logits, groups)


def _sample(logits: Tensor, groups: Sequence[RowGroup]) -> list[int]:
    values = edited_logits(logits, groups)
    greedy = [g for g in groups if g.state.is_greedy]
    sampled = [g for g in groups if not g.state.is_greedy]
    chosen = [_NO_TOKEN] * len(logits)
    if greedy:
        rows = _rows_of(greedy)
        _assign(chosen, rows, greedy_tokens(_select(values, rows)))
    if sampled:
        rows = _rows_of(sampled)
        _assign(chosen, rows, sampled_tokens(_sampled_rows(_select(values, rows), sampled)))
    return chosen


def edited_logits(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Float32 logits after the requests' processors, each row by the state after its path: ``logits``
    itself where nothing changes, else a copy. Same shape."""
    values = logits.float()
    for group in groups:
        processors = group.state.processors_now()
        if processors:
            values = logits.clone() if values is logits else values
            rows, paths = values[group.first_row : group.first_row + group.num_rows], group.paths()
            for processor in processors:
                processor.process(rows, paths)
    return values


def _rows_of(groups: Sequence[RowGroup]) -> list[int]:
    return [row for g in groups for row in range(g.first_row, g.first_row + g.num_rows)]


def _select(values: Tensor, rows: list[int]) -> Tensor:
    if len(rows) == len(values) and rows == list(range(len(rows))):
        return values.contiguous()
    return values.index_select(0, torch.tensor(rows, device=values.device))


def _assign(chosen: list[int], rows: list[int], tokens: Tensor) -> None:
    for row, token in zip(rows, tokens.tolist(), strict=True):
        chosen[row] = token


def _sampled_rows(values: Tensor, groups: Sequence[RowGroup]) -> SampledRows:
    rows = [(group.state, depth) for group in groups for depth in group.depths()]
    keys = np.array([state.key for state, _ in rows], np.int64)
    positions = np.array([state.num_tokens + depth for state, depth in rows], np.int64)
    return SampledRows(values, keys, positions, [state.params for state, _ in rows])
