"""Which token of each row wins: the largest logit, or the largest ``logit / T + noise`` that
survives top-k, top-p and min-p.

The three truncations keep an upward-closed set of logits, so a winner among *more* tokens than
survive that itself survives is the winner among the survivors. So we search first and test
membership after: no sort, no normalisation, and a loser only raises the floor of the next search.
The search itself is a branch and bound over groups of 32 tokens whose largest logit is known and
whose noise is bounded.

What a row gets depends on that row alone: elementwise arithmetic, maxima and integer sums only,
whose bits the other rows of the batch cannot change (a float sum's can). Ties go to the lowest id.

On a CPU a compiled kernel finds the same winners in a fraction of the time that tensors take for a
row (``engine/kernels/gumbel_argmax.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import find_kernel
from engine.noise_numbers import GROUP_TOKENS, TILE_TOKENS
from engine.params import SamplingParams
from engine.sampling.noise_torch import group_bounds, group_noise, group_table, row_states

_KERNEL = "gumbel_argmax"
_FIRST_GROUPS = 16
"""Groups evaluated at once, best bounds first. More makes the second, ragged round rarer."""
_SMALL_NUMEL = 1 << 16
_CHUNK_NUMEL = 1 << 18
_WEIGHT_SCALE = 2.0**40
_INFINITY = float("inf")
_NO_TOKEN = torch.iinfo(torch.int64).max


@dataclass(slots=True)
class SampledRows:
    """Rows to sample: float32 ``[num_rows, vocab_size]``, contiguous; int64 ``[num_rows]``, the keys of
    their noise and their tokens' positions; and what each row's request asked for.

    Top-k keeps what is not below the k-th largest logit (0: off); top-p then keeps a token while the
    mass strictly above it is below ``top_p`` of the whole (1: off); min-p what is not below ``min_p``
    times the largest probability. Tokens with equal logits share their fate.
    """

    logits: Tensor
    keys: NDArray[np.int64]
    positions: NDArray[np.int64]
    params: Sequence[SamplingParams]


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row, lowest id among equals. Float32 in, int64 ``[num_rows]``
    out."""
    if logits.numel() <= _SMALL_NUMEL:
        return logits.argmax(dim=-1)  # documented to return the first maximum
    maxima = group_maxima(logits)  # [num_rows, num_groups]
    table = group_table(maxima.shape[1], logits.device)
    rows, groups = (maxima == maxima.amax(dim=-1, keepdim=True)).nonzero(as_tuple=True)
    token_ids = table.token_ids.index_select(0, groups)  # [num_pairs, 32]
    _, tokens = _best(gather_logits(logits, rows, token_ids), token_ids)
    winners = torch.full((len(logits),), _NO_TOKEN, device=logits.device)
    winners.scatter_reduce_(0, rows, tokens, "amin")
    return torch.where(winners < _NO_TOKEN, winners, 0)  # NaN rows match nothing


def sampled_tokens(rows: SampledRows) -> Tensor:
    """The sampled token of each row: int64 ``[num_rows]``. A row without a finite logit gets token 0."""
    kernel = find_kernel(_KERNEL) if rows.logits.device.type == "cpu" else None
    if kernel is None:
        return _Search(rows).run()
    limits = [(each.temperature, each.top_p, each.min_p, each.top_k) for each in rows.params]
    tokens: Tensor = kernel.search_rows(rows.logits, rows.keys, rows.positions, limits)
    return tokens


def group_maxima(logits: Tensor) -> Tensor:
    """The largest logit of every group of the noise: ``[num_rows, num_groups]``."""
    num_rows, vocab_size = logits.shape
    whole = vocab_size // TILE_TOKENS * TILE_TOKENS
    maxima = []
    if whole:
        tiles = logits[:, :whole].reshape(num_rows, -1, GROUP_TOKENS, GROUP_TOKENS)
        maxima.append(tiles.amax(dim=2).flatten(1))
    if whole < vocab_size:
        tail = logits.new_full((num_rows, TILE_TOKENS), -_INFINITY)
        tail[:, : vocab_size - whole] = logits[:, whole:]
        maxima.append(tail.view(num_rows, GROUP_TOKENS, GROUP_TOKENS).amax(dim=1))
    return maxima[0] if len(maxima) == 1 else torch.cat(maxima, dim=1)


class _Search:
    """The rows of one step and what is known about them."""

    def __init__(self, rows: SampledRows) -> None:
        self.rows = rows
        self.vocab_size = rows.logits.shape[1]
        self.temperatures = self._per_row([each.temperature for each in rows.params])
        self.maxima = group_maxima(rows.logits)  # [num_rows, num_groups]
        self.top = self.maxima.amax(dim=-1)  # [num_rows]
        device = rows.logits.device
        self.table = group_table(self.maxima.shape[1], device)
        counters = torch.from_numpy(np.stack([rows.keys, rows.positions]))
        self.states = row_states(*counters.to(device))
        noise = group_bounds(self.states, self.table)
        # Float64 sums round monotonically, so no score of a group exceeds its bound.
        self.bounds = (self.maxima / self.temperatures[:, None]).add_(noise)
        self.kth = self._kth_logits()
        self.floors = self._truncation_floors()
        top_ps = [each.top_p for each in rows.params]
        self.top_ps = self._per_row(top_ps) if min(top_ps) < 1 else None
        self.masses = torch.full_like(self.states, -1)
        self._score_best_groups()

    def run(self) -> Tensor:
        index = torch.arange(len(self.top), device=self.top.device)
        winners = self._winners(index)
        tokens = winners
        while self.top_ps is not None:
            logits = self.rows.logits[index, tokens]
            outside = self._outside_nucleus(index, logits)
            if not len(outside):
                break
            index = index[outside]
            self._raise_floors(index, logits[outside])
            tokens = self._winners(index)
            winners[index] = tokens
        return winners

    def _per_row(self, values: list[float]) -> Tensor:
        return torch.from_numpy(np.array(values, np.float64)).to(self.rows.logits.device)

    def _kth_logits(self) -> Tensor | None:
        """The top_k-th largest logit of each row, -inf where top-k is off; None where it is off in
        all.

        The k groups with the largest maxima hold the k largest logits, up to equal ones.
        """
        rows, device = self.rows, self.top.device
        top_ks = [each.top_k for each in rows.params]
        limits = {k for k in top_ks if 0 < k < self.vocab_size}
        if not limits:
            return None
        kth = torch.full_like(self.top, -_INFINITY)
        for k in limits:
            index = torch.tensor([i for i, each in enumerate(top_ks) if each == k], device=device)
            groups = self.maxima[index].topk(min(k, self.maxima.shape[1]), sorted=False).indices
            owners = index.repeat_interleave(groups.shape[1])
            values = gather_logits(
                rows.logits, owners, self.table.token_ids.index_select(0, groups.flatten())
            )
            kth[index] = values.view(len(index), -1).topk(k).values[:, -1]
        return kth

    def _truncation_floors(self) -> Tensor | None:
        """The least ``logit / T`` that top-k and min-p leave in each row; None: all are left."""
        min_ps, floors = [each.min_p for each in self.rows.params], None
        if self.kth is not None:
            floors = self.kth / self.temperatures
        if any(min_ps):
            least = self.top / self.temperatures + self._per_row(min_ps).log()
            floors = least if floors is None else torch.maximum(floors, least)
        return floors

    def _raise_floors(self, index: Tensor, logits: Tensor) -> None:
        """Only what lies above these logits may still win in these rows."""
        if self.floors is None:
            self.floors = torch.full_like(self.temperatures, -_INFINITY)
        above = torch.nextafter(logits, torch.full_like(logits, _INFINITY))
        self.floors[index] = torch.maximum(self.floors[index], above / self.temperatures[index])

    def _score_best_groups(self) -> None:
        """Scores of the groups with the best bounds, which nearly always hold the winner."""
        num = min(_FIRST_GROUPS, self.bounds.shape[1] - 1)
        bounds, groups = self.bounds.topk(num + 1)
        owners = torch.arange(len(self.top), device=self.top.device).repeat_interleave(num)
        parts = self._scores(owners, groups[:, :num].reshape(-1))
        shape = (len(self.top), num * GROUP_TOKENS)
        self.scores, self.scaled, self.token_ids = (part.view(shape) for part in parts)
        self.next_bounds = bounds[:, num]

    def _winners(self, index: Tensor) -> Tensor:
        """For each row of ``index``, the token with the best score among those that reach the
        floor."""
        scores, token_ids, next_bounds = self.scores, self.token_ids, self.next_bounds
        scaled, floors = self.scaled, self.floors
        if len(index) < len(scores):
            scores, token_ids, scaled = scores[index], token_ids[index], scaled[index]
            next_bounds = next_bounds[index]
            floors = None if floors is None else floors[index]
        if floors is not None:
            scores = scores.masked_fill(scaled < floors[:, None], -_INFINITY)
        best, tokens = _best(scores, token_ids)
        unsure = ((next_bounds >= best) & (next_bounds > -_INFINITY)).nonzero()[:, 0]
        if len(unsure):
            best[unsure], tokens[unsure] = self._winners_of_all(index[unsure], best[unsure])
        return torch.where(best > -_INFINITY, tokens, 0)

    def _winners_of_all(self, index: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """Best score and token over all groups that could hold one not below ``found``."""
        could = self.bounds[index] >= found[:, None]
        if self.floors is not None:
            scaled = self.maxima[index] / _column(self.temperatures, index)
            could &= scaled >= _column(self.floors, index)
        local, groups = could.nonzero(as_tuple=True)
        owners = index[local]
        scores, scaled, token_ids = self._scores(owners, groups)  # [num_pairs, 32]
        if self.floors is not None:
            scores.masked_fill_(scaled < _column(self.floors, owners), -_INFINITY)
        scores, tokens = _best(scores, token_ids)  # [num_pairs]
        best = found.scatter_reduce(0, local, scores, "amax")
        tokens = torch.where(scores == best[local], tokens, _NO_TOKEN)
        return best, torch.full_like(index, _NO_TOKEN).scatter_reduce_(0, local, tokens, "amin")

    def _scores(self, owners: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of (row, group) pairs: ``logit / T + noise`` and ``logit / T``, float64, and the tokens,
        ``[num_pairs, 32]`` each."""
        rows = self.rows
        token_ids = self.table.token_ids.index_select(0, groups)
        scaled = gather_logits(rows.logits, owners, token_ids) / _column(self.temperatures, owners)
        noise = group_noise(self.states.index_select(0, owners), groups, self.table)
        return scaled + noise, scaled, token_ids

    def _outside_nucleus(self, index: Tensor, logits: Tensor) -> Tensor:
        """Where in ``index`` top-p removes the winner, which has this logit."""
        assert self.top_ps is not None
        # Nothing lies above the largest logit, so its row needs no sum.
        doubtful = ((logits < self.top[index]) & (self.top_ps[index] < 1)).nonzero()[:, 0]
        if not len(doubtful):
            return doubtful
        which = index[doubtful]
        unknown = which[self.masses[which] < 0]
        if len(unknown):
            self._sum_masses(unknown)
        outside = []
        for part in torch.split(doubtful, max(1, _CHUNK_NUMEL // self.vocab_size)):
            which = index[part]
            above = self._masses_above(which, logits[part]).double()
            outside.append(part[above >= self.top_ps[which] * self.masses[which].double()])
        return torch.cat(outside)

    def _sum_masses(self, index: Tensor) -> None:
        """Mass of what top-k leaves in each row, in units of 2**-40 of its likeliest token.

        A few rows at a time, in scratch memory that stays in the cache.
        """
        num = min(len(index), max(1, _CHUNK_NUMEL // self.vocab_size))
        values = self.top.new_empty(num, self.vocab_size)
        weights = index.new_empty(num, self.vocab_size)
        for part in torch.split(index, num):
            values, weights = values[: len(part)], weights[: len(part)]
            torch.index_select(self.rows.logits, 0, part, out=values)
            if self.kth is not None:
                values.masked_fill_(values < self.kth[part, None], -_INFINITY)
            self.masses[part] = weights.copy_(self._weights_(values, part)).sum(dim=-1)

    def _masses_above(self, index: Tensor, logits: Tensor) -> Tensor:
        """Mass strictly above these logits, one per row."""
        local, groups = (self.maxima[index] > logits[:, None]).nonzero(as_tuple=True)
        owners = index[local]
        values = gather_logits(
            self.rows.logits, owners, self.table.token_ids.index_select(0, groups)
        )
        values.masked_fill_(values <= logits[local, None], -_INFINITY)
        masses = self._weights_(values, owners).long().sum(dim=-1)
        return torch.zeros_like(index).index_add_(0, local, masses)

    def _weights_(self, values: Tensor, owners: Tensor) -> Tensor:
        return probability_weights(
            values, _column(self.top, owners), _column(self.temperatures, owners)
        )


def probability_weights(values: Tensor, top: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities relative to the row's largest logit ``top``, scaled so that they become integers:
    sums of integers have the same bits in any order and any batch. In place; ``values`` float32
    ``[num_rows, k]``, contiguous, the others ``[num_rows, 1]``."""
    kernel = find_kernel(_KERNEL) if values.device.type == "cpu" else None
    if kernel is not None:
        weights: Tensor = kernel.weigh_rows(values, top, temperatures)
        return weights
    return values.sub_(top).div_(temperatures.float()).exp_().mul_(_WEIGHT_SCALE)


def _best(scores: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Best score along the last dimension, and its token: the lowest id among equals."""
    best = scores.amax(dim=-1, keepdim=True)
    return best[..., 0], torch.where(scores == best, token_ids, _NO_TOKEN).amin(dim=-1)


def _column(values: Tensor, rows: Tensor) -> Tensor:
    return values.index_select(0, rows)[:, None]


def gather_logits(logits: Tensor, rows: Tensor, token_ids: Tensor) -> Tensor:
    """``logits[rows[i], token_ids[i, j]]``; -inf for ids past the vocabulary."""
    vocab_size = logits.shape[1]
    offsets = (rows * vocab_size)[:, None]
    inside = vocab_size % TILE_TOKENS == 0
    places = (token_ids if inside else token_ids.clamp(max=vocab_size - 1)) + offsets
    # Several times as fast as indexing with a tensor.
    values = logits.view(-1).index_select(0, places.view(-1)).view_as(places)
    return values if inside else values.masked_fill_(token_ids >= vocab_size, -_INFINITY)
