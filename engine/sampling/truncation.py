"""Top-k, top-p and min-p, applied to whole rows of logits.

Top-p sums integers, whose sums have the same bits in any order and any batch, so that membership is what
the search of ``engine/kernels/gumbel_argmax.py`` finds it to be. Which rows ask for what is known to the
host, so no operation's shape depends on a number of the device's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from drafters.base import DraftSampling
from engine.kernels import host_kernel
from engine.request.params import SamplingParams
from engine.transfer import upload

_INFINITY = float("inf")
_WEIGHT_SCALE = 2.0**40

Truncation: TypeAlias = SamplingParams | DraftSampling
"""Greedy rows count as of temperature 1."""


def truncated(
    values: Tensor, truncations: Sequence[Truncation], shares: Tensor | None = None
) -> Tensor:
    """``values / temperature`` where top-k, then top-p, then min-p keep it, else -inf. Float64.

    ``values``: float32 ``[num_rows, num_tokens]``, a vocabulary or its likeliest tokens; then
    ``shares`` ``[num_rows, 1]`` says how much of each row's probability they have.
    """
    device = values.device
    temperatures = _column([each.temperature or 1.0 for each in truncations], device)
    scaled = values / temperatures
    kept = torch.ones_like(values, dtype=torch.bool)
    for top_k in {each.top_k for each in truncations if 0 < each.top_k < values.shape[1]}:
        rows = _rows_where([each.top_k == top_k for each in truncations], device)
        kept[rows] = values[rows] >= values[rows].topk(top_k, dim=-1).values[:, -1:]
    rows = _rows_where([each.top_p < 1 for each in truncations], device)
    if len(rows):
        whole = _column([each.top_p for each in truncations], device)
        if shares is not None:
            in_all = _rows_where([not each.top_k for each in truncations], device)
            whole[in_all] /= shares[in_all]
        left = values[rows].masked_fill_(~kept[rows], -_INFINITY)
        kept[rows] = _in_nucleus(left, temperatures[rows], whole[rows])
    rows = _rows_where([each.min_p > 0 for each in truncations], device)
    if len(rows):
        least = _column([math.log(each.min_p) for each in truncations if each.min_p > 0], device)
        kept[rows] &= scaled[rows] >= scaled[rows].amax(dim=-1, keepdim=True) + least
    return scaled.masked_fill_(~kept, -_INFINITY)


def _in_nucleus(values: Tensor, temperatures: Tensor, top_ps: Tensor) -> Tensor:
    """Marks where the mass of strictly larger logits is below ``top_ps`` of the mass of all: bool like
    ``values``; nothing at -inf."""
    ordered = values.sort(dim=-1, descending=True).values
    weights = _weights(ordered, temperatures).long()
    sums = weights.cumsum(dim=-1)
    # Equal logits share the mass above the first of them.
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
    above = torch.where(is_first, sums - weights, 0).cummax(dim=-1).values
    inside = above.double() < top_ps * sums[:, -1:].double()
    inside[:, 0] = True
    least = ordered.masked_fill_(~inside, _INFINITY).amin(dim=-1, keepdim=True)
    return (values >= least) & (values > -_INFINITY)


def _weights(ordered: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities relative to the row's largest logit, scaled so that they become integers."""
    values, top = ordered.clone(), ordered[:, :1]
    kernel = host_kernel("gumbel_argmax", values.device)
    if kernel is not None:
        weights: Tensor = kernel.weigh_rows(values, top, temperatures)
        return weights
    return values.sub_(top).div_(temperatures.float()).exp_().mul_(_WEIGHT_SCALE)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return upload(values, device, torch.float64)[:, None]


def _rows_where(flags: Sequence[bool], device: torch.device) -> Tensor:
    """The numbers of the flagged rows, int64."""
    return upload([row for row, flag in enumerate(flags) if flag], device, torch.int64)
