"""From a draft model's logits to the tokens it would let follow each row.

Tokens are sampled as the verifier samples, and with its noise, so that a draft agrees with the target
as often as the models do. Several at a row are the best few sums of log-probability and noise, which
are samples without replacement (Gumbel-top-k: Kool et al., arXiv 1903.06059). Logits processors are
left to the target: they change what is accepted, never what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import DraftSampling
from drafters.model.protocol import Candidates
from engine.sampling.noise_torch import gumbel
from engine.sampling.sampler import truncated
from engine.transfer import Readback, upload

_NUM_SAMPLED_FROM = 256
"""Sampled drafts come from so many of the likeliest tokens; what is beyond is never drafted."""


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
    def is_sampled(self) -> bool:
        return self.sampling.verification != "match" and not self.is_greedy


class Choice(NamedTuple):
    """The tokens that were chosen, on the device: ``token_ids`` ``[num_rows, most]``, best first.
    ``finish`` returns each row's candidates, once what was added to the readback is fetched."""

    token_ids: Tensor
    finish: Callable[[], list[Candidates]]


@torch.inference_mode()
def begin_candidates(
    logits: Tensor,  # [num_rows, vocab_size], any float type
    rows: Sequence[ScoredRow],
    vocab_size: int,
    readback: Readback,
) -> Choice:
    """Choose each row's candidates. Tokens from ``vocab_size`` on, which the target does not have, are
    left out; ``distribution``s have this size."""
    values = logits[:, :vocab_size].float()
    samplings = [row.sampling for row in rows]
    most = max(row.num_candidates for row in rows)
    if all(row.is_greedy for row in rows):
        top, token_ids = values.topk(min(most, values.shape[1]), dim=-1)  # [num_rows, most]
        shares = (top - values.logsumexp(dim=-1, keepdim=True)).exp()
        return Choice(token_ids, _listed(token_ids, shares, rows, readback))
    top, token_ids = values.topk(min(max(most, _NUM_SAMPLED_FROM), values.shape[1]), dim=-1)
    covered = None
    if any(sampling.top_p < 1 and not sampling.top_k for sampling in samplings):
        temperatures = _column([sampling.temperature or 1.0 for sampling in samplings], values)
        sums = [(part / temperatures).logsumexp(dim=-1, keepdim=True) for part in (top, values)]
        covered = (sums[0] - sums[1]).exp()
    log_probs = truncated(top, samplings, covered).log_softmax(dim=-1)
    scores = log_probs + _noise(token_ids, rows)
    best, order = scores.topk(min(most, scores.shape[1]), dim=-1)
    confidences = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    chosen = token_ids.gather(1, order)
    listed = _listed(chosen, confidences, rows, readback)
    if not any(row.is_sampled for row in rows):
        return Choice(chosen, listed)
    probs = log_probs.exp().float()
    likeliest = readback.add(probs[:, 0])
    distributions = probs.new_zeros(len(rows), vocab_size).scatter_(1, token_ids, probs)

    def finish() -> list[Candidates]:
        return [
            _sampled(each, distribution, sure) if row.is_sampled else each
            for row, each, distribution, sure in zip(
                rows, listed(), distributions, likeliest.tolist(), strict=True
            )
        ]

    return Choice(chosen, finish)


def _noise(token_ids: Tensor, rows: Sequence[ScoredRow]) -> Tensor:
    """Gumbel noise of each row's position; none in greedy rows: ``[num_rows, num_tokens]``."""
    device = token_ids.device
    keys = upload([row.sampling.key for row in rows], device)
    positions = upload([row.position for row in rows], device)
    noise = gumbel(keys, positions, token_ids)
    return noise * _column([float(not row.is_greedy) for row in rows], noise)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(values, like.device)[:, None]


def _listed(
    token_ids: Tensor, confidences: Tensor, rows: Sequence[ScoredRow], readback: Readback
) -> Callable[[], list[Candidates]]:
    """The first ``num_candidates`` of each row that are not ruled out."""
    read = readback.add(token_ids), readback.add(confidences)

    def finish() -> list[Candidates]:
        found = []
        for row, tokens, shares in zip(rows, *(each.tolist() for each in read), strict=True):
            possible = [(t, s) for t, s in zip(tokens, shares, strict=True) if s > 0]
            possible = possible[: row.num_candidates]
            found.append(Candidates([t for t, _ in possible], [s for _, s in possible]))
        return found

    return finish


def _sampled(candidates: Candidates, distribution: Tensor, confidence: float) -> Candidates:
    return Candidates(candidates.token_ids, [confidence] * len(candidates.token_ids), distribution)
