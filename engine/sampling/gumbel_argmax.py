"""Finds the token of each row that wins: the largest logit, or the largest ``logit / T + noise`` that
survives top-k, top-p and min-p.

On a CPU compiled kernels search for it. The three truncations keep an upward-closed set of logits, so a
winner among *more* tokens than survive that itself survives is the winner among the survivors: the
search (``engine/kernels/gumbel_argmax.py``) comes first and membership is tested after, without sorting
and without most of the noise. How much of it there is to do depends on the numbers, so elsewhere all
tokens are looked at, in operations whose shapes do not.

What a row gets depends on that row alone: elementwise arithmetic, maxima and integer sums only,
whose bits the other rows of the batch cannot change (a float sum's can). Ties go to the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request.params import SamplingParams
from engine.sampling.noise_torch import vocabulary_noise
from engine.sampling.truncation import truncated
from engine.transfer import host_kernel, upload

_PIECE_NUMEL = 1 << 21
"""Logits looked at in one go: with noise, truncation and what is sorted for it some 90 bytes each."""


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token of each row, lowest id among equals; 0 where no logit is finite. Float32 in,
    int64 ``[num_rows]`` out."""
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

    ``logits``: float32 ``[num_rows, vocab_size]``, contiguous. ``keys`` and ``positions``: int64
    ``[num_rows]``, of the rows' noise. ``params``: what each row's request asked for. Top-k keeps what is
    not below the k-th largest logit (0: off); top-p then keeps a token while the mass strictly above it
    is below ``top_p`` of the whole (1: off); min-p what is not below ``min_p`` times the largest
    probability. Tokens with equal logits share their fate.
    """
    kernel = host_kernel("gumbel_argmax", logits.device)
    if kernel is None:
        return _dense_tokens(logits, keys, positions, params)
    limits = [(each.temperature, each.top_p, each.min_p, each.top_k) for each in params]
    tokens: Tensor = kernel.search_rows(logits, keys, positions, limits)
    return tokens


def _dense_tokens(
    logits: Tensor,
    keys: NDArray[np.int64],
    positions: NDArray[np.int64],
    params: Sequence[SamplingParams],
) -> Tensor:
    """Looks at all tokens, of a few rows at a time."""
    num_rows, vocab_size = logits.shape
    noise_keys, noise_positions = upload(np.stack([keys, positions]), logits.device)
    size = max(1, _PIECE_NUMEL // vocab_size)
    winners = []
    for part in (slice(first, first + size) for first in range(0, num_rows, size)):
        noise = vocabulary_noise(noise_keys[part], noise_positions[part], vocab_size)
        winners.append(_first_best(truncated(logits[part], params[part]).add_(noise)))
    return torch.cat(winners)


def _first_best(scores: Tensor) -> Tensor:
    """``max`` gives the first of equals, and nan where there is one."""
    best, tokens = scores.max(dim=-1)
    return tokens.masked_fill_(best.isnan(), 0)
