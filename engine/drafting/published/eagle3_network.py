"""EAGLE-3's network, and P-EAGLE's, under the names of tensors that published files use.

Known rows read the target's states of three layers (or as many as the file is made for), fused by one
product; later rows read what the network itself wrote for the row before. The first layer's attention
reads the token's embedding beside that, so its projections are twice as wide; further layers are
ordinary. P-EAGLE drafts several tokens in one pass: rows of a mask token, which all read one fused vector
of the checkpoint's, follow the known ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from engine.attention.backend import AttentionPlan, KVShape, attending
from engine.drafting.published.captured import Layers
from engine.model.loader import max_position


@dataclass(frozen=True, slots=True)
class Blocks:
    """The parts of transformers that a family's layers are made of."""

    config: Any
    attention: Any
    mlp: Any
    norm: Any
    rotary: Any
    layer: Any


_PARTS = ("Attention", "MLP", "RMSNorm", "RotaryEmbedding", "DecoderLayer")
FAMILIES: Mapping[str, Blocks] = MappingProxyType(
    {
        "llama": Blocks(LlamaConfig, *(getattr(llama, f"Llama{each}") for each in _PARTS)),
        "qwen3": Blocks(Qwen3Config, *(getattr(qwen3, f"Qwen3{each}") for each in _PARTS)),
    }
)
"""Layer classes by ``model_type``."""


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """The sizes of a network. ``layer``: the configuration of its layers, with the target's vocabulary;
    ``candidate_layers``: the layers of the target that it may have been trained on, the likeliest first.
    ``norms_states``: a norm of all fused states at once (``input_norm``); ``norms_each_state``: one of
    each (``fc_norm``). ``mask_shape``: of P-EAGLE's vector in the file; None: it is EAGLE-3."""

    layer: PretrainedConfig
    target_size: int
    candidate_layers: tuple[Layers, ...]
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_output: bool = False
    norms_states: bool = False
    norms_each_state: bool = False
    has_fc_bias: bool = False
    owns_embedding: bool = False
    owns_head: bool = True
    num_parallel: int = 1
    mask_token_id: int | None = None
    mask_shape: tuple[int, ...] | None = None

    @property
    def num_states(self) -> int:
        return len(self.candidate_layers[0])


class FirstLayer(nn.Module):
    """A decoder layer that reads embeddings and features side by side and goes on from the features."""

    def __init__(self, spec: Eagle3Spec, blocks: Blocks) -> None:
        super().__init__()
        config: Any = spec.layer
        size = config.hidden_size
        self._norm_before_residual = spec.norm_before_residual
        self.hidden_norm = blocks.norm(size, eps=config.rms_norm_eps)
        self.input_layernorm = blocks.norm(size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = blocks.norm(size, eps=config.rms_norm_eps)
        self.self_attn = blocks.attention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            usual = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, usual.out_features, bias=usual.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = blocks.mlp(config)

    def forward(
        self,
        embeddings: torch.Tensor,  # [1, num_rows, hidden_size]
        features: torch.Tensor,  # the same
        **keywords: Any,
    ) -> torch.Tensor:
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended, _ = self.self_attn(both, attention_mask=None, **keywords)
        hidden = attended + (normed if self._norm_before_residual else features)
        result: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Eagle3Network(nn.Module):
    """A ``ChainNetwork``. ``hidden_layers`` may be set to another of ``candidate_layers``. Embedding
    and output head are its own if the spec says so, otherwise the ones it is bound to."""

    token_map: torch.Tensor | None

    def __init__(self, spec: Eagle3Spec, token_map: torch.Tensor | None = None) -> None:
        super().__init__()
        config: Any = spec.layer
        blocks = FAMILIES[config.model_type]
        size, width = config.hidden_size, spec.num_states * spec.target_size
        self.spec = spec
        self.candidate_layers = spec.candidate_layers
        self.hidden_layers = spec.candidate_layers[0]
        self.feature_size: int = size
        self.max_len = max_position(config)
        self.num_parallel = spec.num_parallel
        self.mask_token_id = spec.mask_token_id
        heads = config.num_attention_heads, config.num_key_value_heads
        shape = KVShape(*heads, config.head_dim, config.head_dim)
        self.shapes: Sequence[KVShape] = [shape] * config.num_hidden_layers
        self.fc = nn.Linear(width, size, bias=spec.has_fc_bias)
        if spec.norms_states:
            self.input_norm = blocks.norm(width, eps=config.rms_norm_eps)
        if spec.norms_each_state:
            norms = [
                blocks.norm(spec.target_size, eps=config.rms_norm_eps)
                for _ in range(spec.num_states)
            ]
            self.fc_norm = nn.ModuleList(norms)
        further = [blocks.layer(config, index) for index in range(1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([FirstLayer(spec, blocks), *further])
        self.norm = blocks.norm(size, eps=config.rms_norm_eps)
        if spec.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if spec.owns_head:
            self.lm_head = nn.Linear(size, spec.draft_vocab_size, bias=False)
        if spec.mask_shape is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(spec.mask_shape))
        self.register_buffer("token_map", token_map, persistent=False)
        with torch.device("cpu"):  # there are numbers in it, also where weights have none yet
            self.rotary_emb = blocks.rotary(config)
        self._bound: tuple[nn.Module, ...] = ()

    def bind(self, embed: nn.Module, output_head: nn.Module) -> None:
        # In a tuple: they are no parts of this module, which is cast and moved without them.
        self._bound = (embed, output_head)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Takes ``[num_rows, n * target_size]``, returns ``[num_rows, feature_size]``."""
        if self.spec.norms_states:
            states = self.input_norm(states)
        if self.spec.norms_each_state:
            parts = states.split(self.spec.target_size, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        fused: torch.Tensor = self.fc(states)
        return fused

    def mask_feature(self) -> torch.Tensor:
        """Returns what rows of the mask token read, ``[feature_size]``. For P-EAGLE alone."""
        return self.fuse(self.mask_hidden.reshape(1, -1))[0]

    def forward(
        self,
        token_ids: torch.Tensor,  # [num_rows] int64
        features: torch.Tensor,  # [num_rows, feature_size]
        positions: torch.Tensor,  # [num_rows] int64
        plan: AttentionPlan | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the features that the next rows read, and what the head reads, of the same shape."""
        embed = self.embed_tokens if self.spec.owns_embedding else self._bound[0]
        rotations = self.rotary_emb(features, positions[None])
        with attending(plan):
            first = embed(token_ids)[None], features[None]
            hidden = self.layers[0](*first, position_embeddings=rotations)
            for layer in self.layers[1:]:
                hidden = layer(hidden, position_embeddings=rotations)
        normed = self.norm(hidden)[0]
        return normed if self.spec.norm_output else hidden[0], normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes ``[num_rows, hidden_size]``, returns ``[num_rows, draft_vocab_size]``."""
        head = self.lm_head if self.spec.owns_head else self._bound[1]
        scored: torch.Tensor = head(hidden)
        return scored
