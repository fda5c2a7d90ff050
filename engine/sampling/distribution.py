"""The target's distribution at every row, as an explicit table: what rejection verification needs and
sample-and-match never does.

It is the law of what ``choose_tokens`` draws: the same edits of the logits, the same truncation down
to the bit (``gumbel_argmax.py`` has its definition), then the softmax of what is left. Greedy
rows are certain of the lowest id among the largest logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.sampling.gumbel_argmax import greedy_tokens, probability_weights
from engine.sampling.sampler import edited_logits
from engine.sampling.state import RowGroup, SamplingState

_INFINITY = float("inf")


def target_probs(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Float64 ``[num_rows_of_groups, vocab_size]``, the groups' rows one after the other.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row without
    a finite logit is certain of token 0, as in ``choose_tokens``.
    """
    with torch.inference_mode():
        rows, moved = _gathered(logits, groups)
        values = edited_logits(rows, moved)
        states = [group.state for group in groups for _ in range(group.num_rows)]
        return _probs(values, states)


def _gathered(logits: Tensor, groups: Sequence[RowGroup]) -> tuple[Tensor, list[RowGroup]]:
    """The groups' rows alone, and the groups as they lie in them."""
    index: list[int] = []
    moved = []
    for group in groups:
        moved.append(replace(group, first_row=len(index)))
        index += range(group.first_row, group.first_row + group.num_rows)
    return logits.index_select(0, torch.tensor(index, device=logits.device)), moved


def _probs(values: Tensor, states: Sequence[SamplingState]) -> Tensor:
    # Greedy rows divide by 1 and are overwritten.
    temperatures = _column([s.params.temperature or 1.0 for s in states], values)
    scaled = values / temperatures
    kept = _kept(values, scaled, temperatures, states)
    probs = torch.softmax(scaled.masked_fill_(~kept, -_INFINITY), dim=-1)
    is_empty = ~(values.amax(dim=-1) > -_INFINITY)  # NaN rows too
    probs = probs.masked_fill(is_empty[:, None], 0.0)
    probs[is_empty, 0] = 1.0
    greedy = _where([s.is_greedy for s in states], values)
    if len(greedy):
        probs[greedy] = 0.0
        probs[greedy, greedy_tokens(values[greedy])] = 1.0
    return probs


def _kept(
    values: Tensor, scaled: Tensor, temperatures: Tensor, states: Sequence[SamplingState]
) -> Tensor:
    """What top-k, then top-p, then min-p leave: bool ``[num_rows, vocab_size]``."""
    vocab_size = values.shape[1]
    in_top_k = torch.ones_like(values, dtype=torch.bool)
    for top_k in {s.params.top_k for s in states if 0 < s.params.top_k < vocab_size}:
        rows = _where([s.params.top_k == top_k for s in states], values)
        kth = values[rows].topk(top_k, dim=-1).values[:, -1:]
        in_top_k[rows] = values[rows] >= kth
    kept = in_top_k.clone()
    rows = _where([s.params.min_p > 0 for s in states], values)
    if len(rows):
        least = _column([s.params.min_p for s in states], values)[rows].log()
        kept[rows] &= scaled[rows] >= scaled[rows].amax(dim=-1, keepdim=True) + least
    rows = _where([s.params.top_p < 1 for s in states], values)
    if len(rows):
        top_ps = _column([s.params.top_p for s in states], values)[rows]
        kept[rows] &= _in_nucleus(values[rows], in_top_k[rows], temperatures[rows], top_ps)
    return kept


def _in_nucleus(values: Tensor, in_top_k: Tensor, temperatures: Tensor, top_ps: Tensor) -> Tensor:
    """Where the mass of strictly larger logits is below ``top_ps`` of what top-k leaves."""
    left = values.masked_fill(~in_top_k, -_INFINITY)
    top = left.amax(dim=-1, keepdim=True)
    weights = probability_weights(left.clone(), top, temperatures).long()
    ordered, order = left.sort(dim=-1, descending=True)
    weights = weights.gather(-1, order)
    sums = weights.cumsum(dim=-1)
    # Equal logits share the mass above the first of them.
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    above = torch.where(is_first, sums - weights, 0).cummax(dim=-1).values
    inside = (above.double() < top_ps * sums[:, -1:].double()) | (ordered == top)
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64)).to(like.device)[:, None]


def _where(flags: list[bool], like: Tensor) -> Tensor:
    return torch.tensor(flags, device=like.device).nonzero()[:, 0]
