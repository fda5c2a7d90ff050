"""What truncation leaves of rows of logits, as an explicit table: what rejection verification and draft
models need, and sample-and-match never does.

A row of :func:`target_probs` is the distribution of what ``sample_tokens`` gives: the same edits of
the logits, the same truncation down to the bit (``gumbel_argmax.py`` has its definition), then the
softmax of what is left. Greedy rows are certain of the lowest id among the largest logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from drafters.base import DraftSampling
from engine.params import SamplingParams
from engine.sampling.gumbel_argmax import greedy_tokens, probability_weights
from engine.sampling.sampler import edited_logits
from engine.sampling.state import RowGroup

_INFINITY = float("inf")


Truncation: TypeAlias = SamplingParams | DraftSampling
"""Greedy rows count as of temperature 1."""


def target_probs(logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Float64 ``[num_rows_of_groups, vocab_size]``, the groups' rows one after the other.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row without
    a finite logit is certain of token 0, as in ``sample_tokens``.
    """
    with torch.inference_mode():
        rows, moved = _gathered(logits, groups)
        values = edited_logits(rows, moved)
        params = [group.state.params for group in groups for _ in range(group.num_rows)]
        probs = torch.softmax(truncated(values, params), dim=-1)
        is_empty = ~(values.amax(dim=-1) > -_INFINITY)  # NaN rows too
        probs.masked_fill_(is_empty[:, None], 0.0)[is_empty, 0] = 1.0
        greedy = _where([each.temperature == 0 for each in params], values)
        if len(greedy):
            probs[greedy] = 0.0
            probs[greedy, greedy_tokens(values[greedy])] = 1.0
        return probs


def truncated(
    values: Tensor, truncations: Sequence[Truncation], shares: Tensor | None = None
) -> Tensor:
    """``values / temperature`` where top-k, then top-p, then min-p keep it, else -inf. Float64.

    ``values``: float32 ``[num_rows, num_tokens]``, a vocabulary or its likeliest tokens; then
    ``shares`` ``[num_rows, 1]`` says how much of each row's probability they have.
    """
    temperatures = _column([each.temperature or 1.0 for each in truncations], values)
    scaled = values / temperatures
    kept = torch.ones_like(values, dtype=torch.bool)
    for top_k in {each.top_k for each in truncations if 0 < each.top_k < values.shape[1]}:
        rows = _where([each.top_k == top_k for each in truncations], values)
        kept[rows] = values[rows] >= values[rows].topk(top_k, dim=-1).values[:, -1:]
    rows = _where([each.top_p < 1 for each in truncations], values)
    if len(rows):
        whole = _column([each.top_p for each in truncations], values)
        if shares is not None:
            in_all = _where([not each.top_k for each in truncations], values)
            whole[in_all] /= shares[in_all]
        left = values[rows].masked_fill_(~kept[rows], -_INFINITY)
        kept[rows] = _in_nucleus(left, temperatures[rows], whole[rows])
    rows = _where([each.min_p > 0 for each in truncations], values)
    if len(rows):
        least = _column([each.min_p for each in truncations], values)[rows].log()
        kept[rows] &= scaled[rows] >= scaled[rows].amax(dim=-1, keepdim=True) + least
    return scaled.masked_fill_(~kept, -_INFINITY)


def _in_nucleus(values: Tensor, temperatures: Tensor, top_ps: Tensor) -> Tensor:
    """Where the mass of strictly larger logits is below ``top_ps`` of the mass of all: bool like
    ``values``; nothing at -inf."""
    ordered = values.sort(dim=-1, descending=True).values
    weights = probability_weights(ordered.clone(), ordered[:, :1], temperatures).long()
    sums = weights.cumsum(dim=-1)
    # Equal logits share the mass above the first of them.
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    above = torch.where(is_first, sums - weights, 0).cummax(dim=-1).values
    inside = above.double() < top_ps * sums[:, -1:].double()
    inside[:, 0] = True
    least = ordered.masked_fill_(~inside, _INFINITY).amin(dim=-1, keepdim=True)
    return (values >= least) & (values > -_INFINITY)


def _gathered(logits: Tensor, groups: Sequence[RowGroup]) -> tuple[Tensor, list[RowGroup]]:
    """The groups' rows alone, and the groups as they lie in them."""
    index: list[int] = []
    moved = []
    for group in groups:
        moved.append(replace(group, first_row=len(index)))
        index += range(group.first_row, group.first_row + group.num_rows)
    return logits.index_select(0, torch.tensor(index, device=logits.device)), moved


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64)).to(like.device)[:, None]


def _where(flags: list[bool], like: Tensor) -> Tensor:
    return torch.tensor(flags, device=like.device).nonzero()[:, 0]
