"""Tiny folders of DFlash's and DSpark's heads with random weights, in every form that they come in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from engine.drafting.facts import TargetFacts
from engine.drafting.published.dflash import read
from engine.drafting.published.dflash_network import DFlashNetwork
from engine.drafting.published.folder import DraftFolder

VOCAB, DRAFT_VOCAB, HIDDEN, TARGET_LAYERS = 96, 40, 32, 12
HEADS, KV_HEADS, DIM, INNER, LAYERS, RANK = 4, 2, 8, 48, 3, 6
BLOCK, MASK = 5, 90
FACTS = TargetFacts(HIDDEN, VOCAB, TARGET_LAYERS, "f" * 32)
LAYER_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
PLAIN: dict[str, Any] = LAYER_CONFIG | {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "num_target_layers": TARGET_LAYERS,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 5, 9]},
}
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash"},
    "transformer_layer_config": LAYER_CONFIG,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "draft_vocab_size": VOCAB,
    "aux_hidden_state_layer_ids": [2, 6, 10],
}
SPARK: dict[str, Any] = SPECULATORS | {"speculators_model_type": "dspark"}
Tensors = dict[str, torch.Tensor]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_tensors(has_norms: bool = True, num_states: int = 3, size: int = HIDDEN) -> Tensors:
    """Random weights under the names of both formats. ``size``: of the target's states and the head's."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, num_states * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for layer in range(LAYERS):
        rest = {
            "input_layernorm.weight": (size,),
            "post_attention_layernorm.weight": (size,),
            "self_attn.q_proj.weight": (HEADS * DIM, size),
            "self_attn.k_proj.weight": (KV_HEADS * DIM, size),
            "self_attn.v_proj.weight": (KV_HEADS * DIM, size),
            "self_attn.o_proj.weight": (size, HEADS * DIM),
            "mlp.gate_proj.weight": (INNER, size),
            "mlp.up_proj.weight": (INNER, size),
            "mlp.down_proj.weight": (size, INNER),
        }
        if has_norms:
            rest |= {"self_attn.q_norm.weight": (DIM,), "self_attn.k_norm.weight": (DIM,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in rest.items()}
    return {
        name: 0.2 * draw(seed, *shape) if len(shape) > 1 else 1 + 0.2 * draw(seed, *shape)
        for seed, (name, shape) in enumerate(shapes.items())
    }


def reduced_vocabulary() -> Tensors:
    """The tensors of a head that drafts every other token, and a few more of the last ones."""
    tokens = torch.cat([torch.arange(0, 60, 2), torch.arange(86, 96)])
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[tokens] = True
    return {
        "d2t": tokens - torch.arange(DRAFT_VOCAB),
        "t2d": known,
        "lm_head.weight": draw(300, DRAFT_VOCAB, HIDDEN),
    }


def spark_tensors(
    draft_vocab: int = VOCAB,
    reads_markov: bool = True,
    has_bias: bool = True,
    vocab: int = VOCAB,
    size: int = HIDDEN,
) -> Tensors:
    """The tensors of DSpark's two heads. ``size`` as for ``block_tensors``."""
    features = size + RANK if reads_markov else size
    tensors = {
        "markov_head.markov_w1.weight": draw(400, vocab, RANK),
        "markov_head.markov_w2.weight": draw(401, draft_vocab, RANK),
        "confidence_head.proj.weight": 0.3 * draw(402, 1, features),
    }
    return tensors | ({"confidence_head.proj.bias": draw(403, 1)} if has_bias else {})


def write_folder(path: Path, config: Mapping[str, Any], tensors: Tensors) -> DraftFolder:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors")
    return DraftFolder.open(path)


class Ends(nn.Module):
    """The target's embedding and output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(draw(200, VOCAB, HIDDEN))
        self.output_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.output_head.weight = nn.Parameter(draw(201, VOCAB, HIDDEN), requires_grad=False)


def read_network(
    path: Path, config: Mapping[str, Any], tensors: Tensors, facts: TargetFacts = FACTS
) -> DFlashNetwork:
    """Writes a folder, reads it, and gives it the target's ends."""
    network = read(write_folder(path, config, tensors), facts)
    network.requires_grad_(False).eval()
    ends = Ends()
    network.bind(ends.embed, ends.output_head)
    return network
