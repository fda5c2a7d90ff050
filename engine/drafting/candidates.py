"""From a draft model's logits to the tokens it would let follow each row.

Tokens are drawn as the verifier draws, and with its noise, so that a draft agrees with the target as
often as the models do. Several at a row are the best few sums of log-probability and
noise, which are draws without replacement (Gumbel-top-k). Penalties, bias and bad words are left to
the target: they change what is accepted, never what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.base import DraftSampling
from drafters.model.protocol import Candidates
from engine.sampling.noise_torch import gumbel

_NUM_DRAWN_FROM = 256
"""Sampling drafts are drawn from so many of the likeliest tokens; what is beyond is never drafted."""
_INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """``position``: where the row's candidates would stand in the text."""

    sampling: DraftSampling
    position: int
    num_candidates: int

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def is_drawn(self) -> bool:
        return self.sampling.verification != "match" and not self.is_greedy


@torch.inference_mode()
def choose_candidates(
    logits: Tensor,  # [num_rows, vocab_size], any float type
    rows: Sequence[ScoredRow],
    vocab_size: int,
) -> list[Candidates]:
    """Each row's candidates, best first. Tokens from ``vocab_size`` on, which the target does not have,
    are left out; ``distribution``s have this size."""
    values = logits[:, :vocab_size].float()
    vocab_width = values.shape[1]
    most = max(row.num_candidates for row in rows)
    if not all(row.is_greedy for row in rows):
        most = max(most, _NUM_DRAWN_FROM)
        values = values / _column([row.sampling.temperature or 1.0 for row in rows], values)
    top, token_ids = values.topk(min(most, vocab_width), dim=-1)  # [num_rows, most]
    log_probs = top - values.logsumexp(dim=-1, keepdim=True)
    if all(row.is_greedy for row in rows):
        return _listed(token_ids, log_probs.exp(), rows)
    log_probs = _truncated(log_probs, rows)
    scores = log_probs + _noise(token_ids, rows)
    best, order = scores.topk(min(max(row.num_candidates for row in rows), scores.shape[1]), dim=-1)
    shares = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    found = _listed(token_ids.gather(1, order), shares, rows)
    return [
        _drawn(each, token_ids[index], log_probs[index], vocab_size) if row.is_drawn else each
        for index, (row, each) in enumerate(zip(rows, found, strict=True))
    ]


def _truncated(log_probs: Tensor, rows: Sequence[ScoredRow]) -> Tensor:
    """What top-k, top-p and min-p keep of the sorted ``log_probs``, in this order, normalised anew."""
    if not any(_truncates(row) for row in rows):
        return log_probs.log_softmax(dim=-1)
    ranks = torch.arange(log_probs.shape[1], device=log_probs.device)
    top_ks = [row.sampling.top_k or log_probs.shape[1] for row in rows]
    kept = log_probs.masked_fill(ranks >= _column(top_ks, log_probs), -_INFINITY)
    probs = kept.softmax(dim=-1) if any(row.sampling.top_k for row in rows) else kept.exp()
    above = probs.cumsum(dim=-1) - probs
    outside = above >= _column([row.sampling.top_p for row in rows], probs)
    outside |= probs < _column([row.sampling.min_p for row in rows], probs) * probs[:, :1]
    outside[:, 0] = False
    return kept.masked_fill(outside, -_INFINITY).log_softmax(dim=-1)


def _truncates(row: ScoredRow) -> bool:
    sampling = row.sampling
    return bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0


def _noise(token_ids: Tensor, rows: Sequence[ScoredRow]) -> Tensor:
    """Gumbel noise of each row's position; none in greedy rows: ``[num_rows, num_tokens]``."""
    device = token_ids.device
    keys = torch.tensor([row.sampling.key for row in rows], device=device)
    positions = torch.tensor([row.position for row in rows], device=device)
    noise = gumbel(keys, positions, token_ids)
    return noise * _column([float(not row.is_greedy) for row in rows], noise)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)[:, None]


def _listed(token_ids: Tensor, confidences: Tensor, rows: Sequence[ScoredRow]) -> list[Candidates]:
    """The first ``num_candidates`` of each row that are not ruled out."""
    found = []
    for row, tokens, shares in zip(rows, token_ids.tolist(), confidences.tolist(), strict=True):
        possible = [(t, s) for t, s in zip(tokens, shares, strict=True) if s > 0]
        possible = possible[: row.num_candidates]
        found.append(Candidates([t for t, _ in possible], [s for _, s in possible]))
    return found


def _drawn(
    candidates: Candidates, token_ids: Tensor, log_probs: Tensor, vocab_size: int
) -> Candidates:
    probs = log_probs.exp()
    distribution = probs.new_zeros(vocab_size).scatter_(0, token_ids, probs)
    confidence = float(probs[0])
    return Candidates(candidates.token_ids, [confidence] * len(candidates.token_ids), distribution)
