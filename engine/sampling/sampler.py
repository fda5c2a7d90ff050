"""From the logits of a step to the target's token at every row, in one pass over all rows.

Order, per row: repetition, frequency and presence penalties; ``logit_bias``; bad words and
``min_tokens`` (-inf); then greedy rows take the largest logit, and sampled rows divide by the
temperature, keep what top-k, top-p and min-p keep, in this order, and take the largest sum of logit
and noise. Everything from here on is float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.gumbel_argmax import SampledRows, greedy_tokens, sampled_tokens
from engine.sampling.noise_torch import row_states
from engine.sampling.state import RowGroup, SamplingState

__all__ = ["RowGroup", "SamplingState", "choose_tokens"]

_NO_TOKEN = -1


def choose_tokens(logits: Tensor, groups: Sequence[RowGroup]) -> list[int]:
    """The target's token at every row of ``groups``; -1 at rows that belong to none.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row's
    token depends on its own logits, its request's parameters, its path, the request's key and the
    position, and on nothing else in the batch.
    """
    with torch.inference_mode():
        return _choose(logits, groups)


def _choose(logits: Tensor, groups: Sequence[RowGroup]) -> list[int]:
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
    """Float32 logits after penalties, bias, bad words and ``min_tokens``, each row by the state after
    its path: ``logits`` itself where nothing changes, else a copy. Same shape."""
    edited = [group for group in groups if group.state.edits_logits]
    values = logits.float()
    if edited:
        values = logits.clone() if values is logits else values
        _edit(values, logits, edited)
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
    keys: list[int] = []
    positions: list[int] = []
    temperatures: list[float] = []
    top_ks: list[int] = []
    top_ps: list[float] = []
    min_ps: list[float] = []
    for group in groups:
        state, num_rows = group.state, group.num_rows
        keys += [state.key] * num_rows
        positions += [state.num_tokens + depth for depth in group.depths()]
        temperatures += [state.params.temperature] * num_rows
        top_ks += [state.params.top_k] * num_rows
        top_ps += [state.params.top_p] * num_rows
        min_ps += [state.params.min_p] * num_rows
    # By way of numpy, which reads a list seven times as fast.
    counters = torch.from_numpy(np.array([keys, positions], np.int64)).to(values.device)
    return SampledRows(
        values,
        row_states(counters[0], counters[1]),
        torch.from_numpy(np.array(temperatures, np.float64)).to(values.device),
        top_ks,
        top_ps,
        min_ps,
    )


def _edit(values: Tensor, raw: Tensor, groups: Sequence[RowGroup]) -> None:
    """Apply to ``values`` (float32, in place) what the groups ask for; ``raw`` are the model's
    logits."""
    for group in groups:
        view = values[group.first_row : group.first_row + group.num_rows]
        paths = group.paths()
        if group.state.counts is not None:
            _penalise(view, raw[group.first_row : group.first_row + group.num_rows], group, paths)
        if group.state.bias_token_ids.size:
            token_ids = torch.from_numpy(group.state.bias_token_ids).to(view.device)
            view[:, token_ids] += torch.from_numpy(group.state.biases).to(view.device)
        forbidden = [
            (row, token_id)
            for row, path in enumerate(paths)
            for token_id in group.state.forbidden_token_ids(path)
        ]
        if forbidden:
            at = torch.tensor(forbidden, device=view.device)
            view[at[:, 0], at[:, 1]] = float("-inf")


def _penalise(view: Tensor, raw: Tensor, group: RowGroup, paths: list[tuple[int, ...]]) -> None:
    """The request's own tokens for all its rows, then, from the raw logit again, each path's
    tokens."""
    counts = group.state.counts
    assert counts is not None
    if len(counts.token_ids):
        token_ids = torch.from_numpy(counts.token_ids).to(view.device)
        seen = torch.from_numpy(counts.counts).to(view.device)
        view[:, token_ids] = _penalised(view[:, token_ids], seen, group.state)
    on_path = [
        (row, token_id, counts.get(token_id) + path.count(token_id))
        for row, path in enumerate(paths)
        for token_id in set(path)
    ]
    if on_path:
        at = torch.from_numpy(np.array(on_path, np.int64)).to(view.device)
        logits = raw[at[:, 0], at[:, 1]].float()
        view[at[:, 0], at[:, 1]] = _penalised(logits, at[:, 2].float(), group.state)


def _penalised(logits: Tensor, counts: Tensor, state: SamplingState) -> Tensor:
    """CTRL's repetition penalty (arXiv 1909.05858), then OpenAI's two. All of ``logits`` were
    seen."""
    params = state.params
    # As tensors: a Python divisor may be turned into a product with its reciprocal.
    factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    repetition, frequency, presence = logits.new_tensor([[f] for f in factors])
    penalised: Tensor = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = penalised - frequency * counts
    return torch.sub(penalised, presence * (counts > 0))
