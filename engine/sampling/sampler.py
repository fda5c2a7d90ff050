"""From the logits of a step to the target's token at every row, in one pass over all rows.

Order, per row: the request's processors (``processor.py``): penalties, biases, what is forbidden,
and truncations that the search does not know; then greedy rows take the largest logit, and sampled
rows divide by the temperature, keep what top-k, top-p and min-p keep, in this order, and take the
largest sum of logit and noise (the Gumbel-max trick). Everything from here on is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.gumbel_argmax import SampledRows, greedy_tokens, sampled_tokens
from engine.sampling.state import RowGroup
from engine.transfer import Readback, read_now, upload

_NO_TOKEN = -1


def sample_tokens(logits: Tensor, groups: Sequence[RowGroup]) -> list[int]:
    """``choose_tokens``, and wait for them."""

    def begin(readback: Readback) -> Callable[[], list[int]]:
        return readback.add(choose_tokens(logits, groups)).tolist

    return read_now(begin)


def choose_tokens(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """The target's token at every row of ``groups``; -1 at rows that belong to none. Int64
    ``[num_rows]``, where the logits are.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row's
    token depends on its own logits, its request's parameters, its path, the request's key and the
    position, and on nothing else in the batch.
    """
    with torch.inference_mode():
        values = edited_logits(logits, groups)
        greedy = [g for g in groups if g.state.is_greedy]
        sampled = [g for g in groups if not g.state.is_greedy]
        chosen = torch.full((len(values),), _NO_TOKEN, device=values.device)
        if greedy:
            rows = _rows_of(greedy)
            chosen = _assigned(chosen, rows, greedy_tokens(_select(values, rows)))
        if sampled:
            rows = _rows_of(sampled)
            tokens = sampled_tokens(_sampled_rows(_select(values, rows), sampled))
            chosen = _assigned(chosen, rows, tokens)
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
    if _are_all(rows, values):
        return values.contiguous()
    return values.index_select(0, upload(rows, values.device))


def _assigned(chosen: Tensor, rows: list[int], tokens: Tensor) -> Tensor:
    if _are_all(rows, chosen):
        return tokens
    return chosen.index_copy_(0, upload(rows, chosen.device), tokens)


def _are_all(rows: list[int], of: Tensor) -> bool:
    return len(rows) == len(of) and rows == list(range(len(rows)))


def _sampled_rows(values: Tensor, groups: Sequence[RowGroup]) -> SampledRows:
    rows = [(group.state, depth) for group in groups for depth in group.depths()]
    keys = np.array([state.key for state, _ in rows], np.int64)
    positions = np.array([state.num_tokens + depth for state, depth in rows], np.int64)
    return SampledRows(values, keys, positions, [state.params for state, _ in rows])
