"""Ordering stored candidates as the verifier would draw them.

Stored probabilities are the target's at temperature 1. What a request draws from is that, tempered,
truncated as the request asks, and renormalised over the few tokens stored. Gumbel-top-k: sorting by
``log(prob) + noise`` draws without replacement, and with the verifier's own noise the first one is
the verifier's choice wherever the stored distribution is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from drafters.base import DraftSampling

LEAST_SHARE = 1e-3
"""Tokens with less than this share of the likeliest one's probability are not drawn: they would
hardly ever win, and noise costs a microsecond per token."""


def drawn_probs(probs: Sequence[float], sampling: DraftSampling) -> list[float]:
    """What the first tokens of a list are drawn with, summing to 1; the others are never drawn.

    ``probs``: at temperature 1, descending. ``sampling.temperature`` must not be 0.
    """
    exponent, best = 1.0 / sampling.temperature, probs[0]
    least = max(LEAST_SHARE, sampling.min_p)
    weights = []
    for prob in probs[: sampling.top_k] if sampling.top_k > 0 else probs:
        weight: float = (prob / best) ** exponent
        if weight < least:
            break
        weights.append(weight)
    if sampling.top_p < 1:
        left = sampling.top_p * sum(weights)
        for index, weight in enumerate(weights):
            left -= weight
            if left <= 0:
                del weights[index + 1 :]
                break
    total = sum(weights)
    return [weight / total for weight in weights]


def in_drawn_order(
    token_ids: Sequence[int], probs: Sequence[float], position: int, sampling: DraftSampling
) -> tuple[list[int], list[float]]:
    """Gumbel-top-k: tokens by ``log(prob) + noise`` at ``position``, and these scores."""
    if len(probs) == 1:
        return [token_ids[0]], [0.0]
    drawn = token_ids[: len(probs)]
    noise = sampling.noise(position, drawn)
    scores = [math.log(prob) + g for prob, g in zip(probs, noise, strict=True)]
    order = sorted(range(len(drawn)), key=scores.__getitem__, reverse=True)
    return [drawn[index] for index in order], [scores[index] for index in order]
