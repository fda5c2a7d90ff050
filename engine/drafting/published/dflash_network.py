"""The network of DFlash and DSpark, under the names of tensors that published files use.

Every committed token has keys and values in each layer, made of the target's states of that token alone
(``context``); they need no forward of the layers. To draft, one block goes through the layers: the newest
token, which has no keys of the target's yet, and mask tokens behind it. Its rows see the text before
them and each other. A row says which token stands at its own position, so the first says nothing; where
``anchor_predicts``, each says which token follows it. The block's own keys are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from engine.attention.backend import AttentionPlan, KVShape, attending
from engine.drafting.published.dspark import ConfidenceHead, MarkovHead


class Attention(NamedTuple):
    """How a layer attends. ``window``: as in ``AttentionOptions``."""

    window: int | None
    sees_block: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, read. ``layers``: of the decoder layers, as transformers has it; ``attentions``:
    by layer; ``candidate_layers`` as in ``DFlashNetwork``; ``has_norms``: queries and keys are
    normalised; ``markov_rank``, ``confidence_size``: 0 where there is no such head; ``owns``: which of
    the target's ends the folder brings along."""

    layers: Any
    attentions: Sequence[Attention]
    candidate_layers: tuple[tuple[int, ...], ...]
    block_size: int
    mask_token_id: int
    anchor_predicts: bool
    has_norms: bool
    draft_vocab_size: int
    markov_rank: int
    confidence_size: int
    confidence_has_bias: bool
    owns: Collection[str]


class DFlashNetwork(nn.Module):
    """An ``engine.drafting.published.networks.BlockNetwork``.

    ``candidate_layers``: the layers whose states it may have been trained on, likeliest first: formats
    count them differently, and published folders mix them up. ``hidden_layers`` is the first of these
    until somebody finds that another fits better.
    """

    def __init__(
        self, settings: Settings, target_size: int, token_map: torch.Tensor | None
    ) -> None:
        """Its weights are on the device "meta", until they are read."""
        super().__init__()
        config = settings.layers
        size, eps = config.hidden_size, config.rms_norm_eps
        num_layers = config.num_hidden_layers
        self.candidate_layers = settings.candidate_layers
        self.hidden_layers = self.candidate_layers[0]
        self.block_size = settings.block_size
        self.mask_token_id = settings.mask_token_id
        self.anchor_predicts = settings.anchor_predicts
        self.max_len: int = config.max_position_embeddings
        shape = KVShape(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim
        )
        self.shapes: Sequence[KVShape] = [shape] * num_layers
        self._ends: tuple[nn.Module, nn.Module] | None = None
        with torch.device("meta"):
            self.fc = nn.Linear(len(self.hidden_layers) * target_size, size, bias=False)
            self.hidden_norm = Qwen3RMSNorm(size, eps=eps)
            self.layers = nn.ModuleList(
                _make_layer(config, layer, attention, settings.has_norms)
                for layer, attention in enumerate(settings.attentions)
            )
            self.norm = Qwen3RMSNorm(size, eps=eps)
            draft_vocab, rank = settings.draft_vocab_size, settings.markov_rank
            if "embed_tokens" in settings.owns:
                self.embed_tokens = nn.Embedding(config.vocab_size, size)
            if "lm_head" in settings.owns:
                self.lm_head = nn.Linear(size, draft_vocab, bias=False)
            self.markov_head = MarkovHead(config.vocab_size, draft_vocab, rank) if rank else None
            self.confidence_head = (
                ConfidenceHead(settings.confidence_size, settings.confidence_has_bias)
                if settings.confidence_size
                else None
            )
        self._confidence_reads_tokens = settings.confidence_size > size
        self.token_map: torch.Tensor | None
        self.register_buffer("token_map", token_map, persistent=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def bind(self, embed: nn.Module, output_head: nn.Module) -> None:
        """Gives it the target's embedding and output head, for what its folder leaves to them."""
        # In a tuple, so that they do not become parts of this module.
        self._ends = (
            getattr(self, "embed_tokens", embed),
            getattr(self, "lm_head", output_head),
        )

    def context(
        self,
        states: torch.Tensor,  # [num_rows, len(hidden_layers) * target_size]
        positions: torch.Tensor,  # [num_rows] int64
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each layer's keys and values of committed tokens, ``[num_rows, num_kv_heads, dim]``,
        as they are stored. ``states`` are theirs, side by side in the order of ``hidden_layers``."""
        fused = self.hidden_norm(self.fc(states))
        cos, sin = (each[0, :, None] for each in self.rotary_emb(fused[None], positions[None]))
        kept = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            heads = (-1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(fused).unflatten(-1, heads))
            values = attention.v_proj(fused).unflatten(-1, heads)
            kept.append((keys * cos + rotate_half(keys) * sin, values))
        return kept

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows] int64
        positions: torch.Tensor,  # [num_rows] int64
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Runs blocks, one request's after another's. Returns what the output head reads,
        ``[num_rows, hidden_size]``. Needs ``bind``."""
        assert self._ends is not None
        hidden = self._ends[0](token_ids)[None]
        rotations = self.rotary_emb(hidden, positions[None])
        with attending(plan):
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotations)
        normed: torch.Tensor = self.norm(hidden[0])
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns ``[num_rows, draft_vocab]``, before any correction. Needs ``bind``."""
        assert self._ends is not None
        logits: torch.Tensor = self._ends[1](hidden)
        return logits

    def markov(self, previous_token_ids: torch.Tensor) -> torch.Tensor | None:
        """Returns what is added to logits, ``[num_rows, draft_vocab]``, given the target's id of the
        token before each row's own; None: nothing ever is."""
        if self.markov_head is None:
            return None
        corrections: torch.Tensor = self.markov_head(previous_token_ids)
        return corrections

    def confidence(
        self, hidden: torch.Tensor, previous_token_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns how likely each row's token is accepted once all before it are, ``[num_rows]``,
        float32; None where the folder does not say."""
        if self.confidence_head is None:
            return None
        features = hidden
        if self._confidence_reads_tokens:
            assert self.markov_head is not None
            embeddings = self.markov_head.markov_w1(previous_token_ids)
            features = torch.cat([hidden, embeddings], dim=-1)
        confidences: torch.Tensor = self.confidence_head(features)
        return confidences


def _make_layer(config: Any, index: int, attends: Attention, has_norms: bool) -> nn.Module:
    """Returns transformers' own layer with the given attention."""
    layer: Any = Qwen3DecoderLayer(config, index)
    attention = layer.self_attn
    attention.sliding_window, attention.sees_block = attends
    if not has_norms:
        attention.q_norm = attention.k_norm = nn.Identity()
    return layer  # type: ignore[no-any-return]
