"""DSpark's additions to DFlash: a head that corrects a row's logits for the preceding token, and one
that estimates how likely a row's token is accepted.

A block's rows are computed at once, without knowledge of each other's tokens. The first head makes up
for that: tokens are chosen from left to right, and each row's logits are corrected for the token chosen
before it. In a tree every node has its own token, so its children get their own logits.
"""

from __future__ import annotations

import torch
from torch import nn


class MarkovHead(nn.Module):
    """A table of what follows what, as a product of two narrow ones. ``draft_vocab_size``: of the logits
    that it corrects."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def forward(self, previous_token_ids: torch.Tensor) -> torch.Tensor:
        """From the target's ids to what is added to logits, ``[.., draft_vocab_size]``."""
        corrections: torch.Tensor = self.markov_w2(self.markov_w1(previous_token_ids))
        return corrections


class ConfidenceHead(nn.Module):
    """``input_size``: of what the output head reads, and of the embedding of the token before, where that
    is read as well."""

    def __init__(self, input_size: int, has_bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1, bias=has_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """From ``[.., input_size]`` to probabilities ``[..]``, float32."""
        scores: torch.Tensor = self.proj(features)
        return scores.squeeze(-1).float().sigmoid()
