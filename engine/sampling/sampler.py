"""From the logits of a step to the target's token at every row, or to its distribution there.

Order, per row: the request's processors (``processor.py``): penalties, biases, what is forbidden,
and truncations that the search does not know; then greedy rows take the largest logit, and sampled
rows divide by the temperature, keep what top-k, top-p and min-p keep, in this order, and take the
largest sum of logit and noise (the Gumbel-max trick). Everything from here on is float32 or wider.

On a CPU compiled kernels search for it. The three truncations keep an upward-closed set of logits, so a
winner among *more* tokens than survive that itself survives is the winner among the survivors: the
search (``engine/kernels/gumbel_argmax.py``) comes first and membership is tested after, without sorting
and without most of the noise. How much of it there is to do depends on the numbers, so elsewhere all
tokens are looked at, in operations whose shapes do not. Top-p sums integers, whose sums have the same
bits in any order and any batch, so that both find the same membership.

What a row gets depends on that row alone: elementwise arithmetic, maxima and integer sums only,
whose bits the other rows of the batch cannot change (a float sum's can). Ties go to the lowest id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.base import DraftSampling
from engine.kernels import are_read, host_kernel
from engine.kernels.triton.choice_ops import can_choose, choose_rows
from engine.request.params import SamplingParams
from engine.sampling.logprobs import begin_top_tokens
from engine.sampling.noise_torch import gumbel
from engine.sampling.state import SampledRequest, noise_positions, rows_of, truncates
from engine.transfer import Readback, upload

Truncation: TypeAlias = SamplingParams | DraftSampling
"""Greedy rows count as of temperature 1."""
_NO_TOKEN = -1
_INFINITY = float("inf")
_WEIGHT_SCALE = 2.0**40
_PIECE_NUMEL = 1 << 21
"""Logits looked at in one go: with noise, truncation and what is sorted for it some 90 bytes each."""


def choose_tokens(
    logits: Tensor,
    requests: Sequence[SampledRequest],
    likeliest: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """The target's token at every row of ``requests``; -1 at rows that belong to none. Int64
    ``[num_rows]``, where the logits are.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; unchanged. A row's token depends
    on its own logits, its request's parameters, its path, the request's key and the position, and on
    nothing else in the batch. ``likeliest`` ``[num_rows]``: the result of ``greedy_tokens`` over all
    logits, if known already; rows without a request then keep theirs. ``known`` ``[num_rows]``: the
    tokens of plain requests, if the forward has chosen them.
    """
    with torch.inference_mode():
        if known is not None:
            requests = [each for each in requests if not each.sampling.is_plain]
            if not requests:
                return known
        values = edited_logits(logits, requests)
        are_greedy = all(each.sampling.is_greedy for each in requests)
        if likeliest is not None and are_greedy and values is logits:
            return likeliest
        parts: list[tuple[list[int], Callable[[Tensor], Tensor]]] = []
        for is_greedy in (True, False):
            own = [each for each in requests if each.sampling.is_greedy == is_greedy]
            if own:
                rows = [row for each in own for row in rows_of(each)]
                parts.append((rows, greedy_tokens if is_greedy else partial(_sampled, own)))
        if len(parts) == 1 and parts[0][0] == [*range(len(values))]:
            return parts[0][1](values.contiguous())
        nobody = torch.full((len(values),), _NO_TOKEN, device=values.device)
        chosen = nobody if known is None else known.clone()
        for rows, choose in parts:
            index = upload(rows, values.device)
            chosen.index_copy_(0, index, choose(values.index_select(0, index)))
        return chosen


def target_probs(logits: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """The distributions that rows are sampled from, which rejection verification needs and
    sample-and-match never does: float64 ``[num_rows_of_requests, vocab_size]``, the requests' rows one
    after the other.

    A row is the distribution of what ``choose_tokens`` gives: the same edits of the logits, the same
    truncation down to the bit, then the softmax of what is left. A row without a finite logit is certain
    of token 0. ``logits`` as there; no row is greedy, since greedy requests are matched.
    """
    with torch.inference_mode():
        rows = [row for each in requests for row in rows_of(each)]
        values = (
            edited_logits(logits, requests).index_select(0, upload(rows, logits.device)).float()
        )
        params = [each.sampling.params for each in requests for _ in rows_of(each)]
        probs = torch.softmax(truncated(values, params), dim=-1)
        is_empty = ~(values.amax(dim=-1) > -_INFINITY)  # NaN rows too
        probs.masked_fill_(is_empty[:, None], 0.0)
        probs[:, 0].masked_fill_(is_empty, 1.0)
        return probs


def edited_logits(logits: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """Logits after the requests' processors, each row by the state after its path: ``logits`` itself
    where nothing changes, else a copy in float32, in which all are on a device. Same shape."""
    values = logits if are_read(logits) else logits.float()
    for each in requests:
        processors = [one for one in each.sampling.processors if one.is_active()]
        if processors:
            values = logits.to(torch.float32, copy=True) if values is logits else values
            own = rows_of(each)
            rows, row_paths = values[own.start : own.stop], each.draft.paths()
            for processor in processors:
                processor.process(rows, row_paths)
    return values


def _sampled(requests: Sequence[SampledRequest], values: Tensor) -> Tensor:
    """``values``: the requests' rows, one after another."""
    states = [each.sampling for each in requests for _ in rows_of(each)]
    keys = np.array([state.key for state in states], np.int64)
    ends = [position for each in requests for position in noise_positions(each)]
    positions = np.array(ends, np.int64)
    return sampled_tokens(values, keys, positions, [state.params for state in states])


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row, lowest id among equals; 0 where no logit is finite. Int64
    ``[num_rows]``."""
    kernel = host_kernel("top_tokens", logits.device)
    if kernel is None:
        return _first_best(logits)
    tokens: Tensor = kernel.top_rows(logits.contiguous(), 1)[0]
    return tokens[:, 0]


def sampled_tokens(
    logits: Tensor,
    keys: NDArray[np.int64],
    positions: NDArray[np.int64],
    params: Sequence[SamplingParams],
) -> Tensor:
    """The sampled token of each row: int64 ``[num_rows]``. A row without a finite logit gets token 0.

    ``logits`` ``[num_rows, vocab_size]``, contiguous, float32 but on a CPU. ``keys`` and ``positions``:
    int64 ``[num_rows]``, of the rows' noise. ``params``: what each row's request asked for. Top-k keeps
    what is not below the k-th largest logit (0: off); top-p then keeps a token while the mass strictly
    above it is below ``top_p`` of the whole (1: off); min-p what is not below ``min_p`` times the largest
    probability. Tokens with equal logits share their fate.
    """
    kernel = host_kernel("gumbel_argmax", logits.device)
    if kernel is not None:
        limits = [(each.temperature, each.top_p, each.min_p, each.top_k) for each in params]
        tokens: Tensor = kernel.search_rows(logits, keys, positions, limits)
        return tokens
    num_rows, vocab_size = logits.shape
    noise_keys, noise_positions = upload(np.stack([keys, positions]), logits.device)
    temperatures = _column([each.temperature for each in params], logits.device)
    if can_choose(logits.device) and not any(map(truncates, params)):
        return choose_rows(logits, noise_keys, noise_positions, temperatures[:, 0])
    size = max(1, _PIECE_NUMEL // vocab_size)
    winners = []
    for part in (slice(first, first + size) for first in range(0, num_rows, size)):
        scaled, own = (
            truncated(logits[part], params[part]),
            (noise_keys[part], noise_positions[part]),
        )
        if can_choose(logits.device):
            winners.append(choose_rows(scaled, *own, torch.ones_like(scaled[:, 0])))
        else:
            token_ids = torch.arange(vocab_size, device=logits.device)
            winners.append(_first_best(scaled.add_(gumbel(*own, token_ids))))
    return torch.cat(winners)


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


def _first_best(scores: Tensor) -> Tensor:
    """``max`` gives the first of equals, and nan where there is one."""
    best, tokens = scores.max(dim=-1)
    return tokens.masked_fill_(best.isnan(), 0)


def warm_up(vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Compiles the kernels of sampling before there are requests to wait for them: samples a token, and
    reads a top token. ``dtype``: of the model's logits; edited ones are float32."""
    zero = np.zeros(1, np.int64)
    with torch.inference_mode():
        given = torch.zeros(1, vocab_size, device=device, dtype=dtype)
        for kind in {torch.float32, dtype} if are_read(given) else {torch.float32}:
            logits = given.to(kind)
            for params in (SamplingParams(), SamplingParams(top_p=0.5, top_k=1)):
                sampled_tokens(logits, zero, zero, [replace(params, temperature=1.0)])
            for with_probs in (False, True):
                readback = Readback()
                finish, _ = begin_top_tokens(logits, [0], 1, readback, with_probs)
                readback.fetch()
                finish()
