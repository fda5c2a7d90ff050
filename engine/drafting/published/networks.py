"""The networks of published heads as drafters see them, whatever method they are of.

A network reads states of chosen layers of the target and has keys and values of its own in the blocks of
the target's requests. Rows are flat: those of all requests of a step one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from engine.attention.backend import AttentionPlan, KVShape


class Network(Protocol):
    """``hidden_layers``: the states that it reads, as in ``InputBatch.hidden_layers``; it may be set to
    another of ``candidate_layers``, what the checkpoint may mean, the likeliest first. ``shapes``: of its
    attention layers, whose ``layer_idx`` counts from 0. ``max_len``: the most tokens of a text that it
    can follow. ``token_map``: ``[draft_vocab]`` int64, the target's id of each of its own; None: they are
    the same."""

    hidden_layers: tuple[int, ...]
    candidate_layers: tuple[tuple[int, ...], ...]
    shapes: Sequence[KVShape]
    max_len: int
    token_map: torch.Tensor | None

    def bind(self, embed: nn.Module, output_head: nn.Module) -> None:
        """Gives it the target's embedding and output head, for what its checkpoint leaves to them."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """From what ``forward`` says the head reads to logits ``[num_rows, draft_vocab]``."""


class ChainNetwork(Network, Protocol):
    """Drafts one token after another, each row from the features of the row before: EAGLE-3, P-EAGLE,
    MTP. ``feature_size``: of a row's features. ``num_parallel``: tokens that one pass drafts; with more
    than one it is a ``MaskedNetwork``."""

    feature_size: int
    num_parallel: int

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """From the states of ``hidden_layers`` side by side, ``[num_rows, n * target_size]``, to the
        features of known rows ``[num_rows, feature_size]``."""

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows] int64
        features: torch.Tensor,  # [num_rows, feature_size], of the tokens before
        positions: torch.Tensor,  # [num_rows] int64
        plan: AttentionPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the features that the next draft step reads, ``[num_rows, feature_size]``, and what the
        head reads, ``[num_rows, hidden_size]``."""


class MaskedNetwork(ChainNetwork, Protocol):
    """Drafts several tokens in one pass, by rows of the mask token behind the known ones: P-EAGLE."""

    mask_token_id: int

    def mask_feature(self) -> torch.Tensor:
        """Returns what rows of the mask token read, ``[feature_size]``."""


class BlockNetwork(Network, Protocol):
    """Drafts a block in one pass from keys and values that the target's states become: DFlash, DSpark.
    ``block_size``: rows of a block, its newest known token included. ``anchor_predicts``: the row of that
    token drafts as well."""

    block_size: int
    mask_token_id: int
    anchor_predicts: bool

    def context(
        self, states: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """From the states of ``hidden_layers`` side by side to each layer's keys
        ``[num_rows, num_kv_heads, dim]``, as the store has them, and values."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Returns what the head reads, ``[num_rows, hidden_size]``."""

    def markov(self, previous_token_ids: torch.Tensor) -> torch.Tensor | None:
        """Returns what is added to logits for the token before each row; None: nothing ever is."""

    def confidence(
        self, hidden: torch.Tensor, previous_token_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns how likely each row's token is accepted, ``[num_rows]``; None: it does not say."""


def place(network: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Moves a network and casts its weights, for inference. Buffers keep their types: rotary
    frequencies that were rounded to 16 bits would turn later positions wrongly."""
    network.to(device)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.requires_grad_(False).eval()
