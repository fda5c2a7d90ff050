"""Heads that truly read certain layers of a small target: what they read of them is decoded by a product
that was fitted to the target's own texts, and nothing else in them says anything."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from worlds.published_eagle3 import write_folder
from worlds.tiny_models import own_states

VOCAB, HIDDEN, NUM_LAYERS = 64, 64, 8
HALF = HIDDEN // 2
_GROWTH = 1.6
LAYERS = (2, 4, 6)
"""The layers that the heads read, whatever their files say."""
WIDTH, BLOCK, MASK = 96, 4, 63
_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": WIDTH // 4,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
Tensors = dict[str, torch.Tensor]


@cache
def counting_target(seed: int) -> PreTrainedModel:
    """A Llama that counts in circles of eight. One half of its states is the token's embedding, which
    its output head reads and no layer changes; into the other every layer writes more than all before.
    Shared: not to be changed."""
    torch.manual_seed(1000 + seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    embeddings = torch.randn(VOCAB, HIDDEN)
    embeddings[:, HALF:] *= 0.1
    model.model.embed_tokens.weight.copy_(embeddings)
    before = [token // 8 * 8 + (token - 1) % 8 for token in range(VOCAB)]
    model.lm_head.weight.copy_(embeddings[before])
    model.lm_head.weight[:, HALF:] = 0
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight *= 0.05
        layer.mlp.down_proj.weight *= 0.3 * _GROWTH**number
        for writing in (layer.self_attn.o_proj, layer.mlp.down_proj):
            writing.weight[:HALF] = 0
    counting: PreTrainedModel = model
    return counting


def prompts(seed: int, count: int, length: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(VOCAB, (count, length), generator=generator).tolist()
    return found


@dataclass(frozen=True)
class Lesson:
    """Places of the target's own texts: ``states`` of the token before the anchor, by layer, and the
    token that follows the anchor."""

    states: dict[int, torch.Tensor]  # each [num_places, hidden_size]
    following: torch.Tensor  # [num_places]


@cache
@torch.no_grad()
def lesson(seed: int) -> Lesson:
    model = counting_target(seed)
    texts = torch.tensor(prompts(50 + seed, 48))
    for _ in range(26):
        chosen = model(texts, use_cache=False).logits[:, -1].argmax(-1)
        texts = torch.cat([texts, chosen[:, None]], dim=1)
    found = [own_states(model, text) for text in texts.tolist()]
    states = {
        layer: torch.cat([each[layer][4:-2] for each in found]) for layer in range(NUM_LAYERS)
    }
    return Lesson(states, texts[:, 6:].flatten())


def taught_eagle(path: Path, seed: int, shift: int = 0, **more: Any) -> Path:
    """Writes a folder of EAGLE-3 for ``counting_target(seed)``. ``shift``: of the layers that its file
    names, against those that it reads."""
    zeros = {
        f"midlayer.self_attn.{name}_proj.weight": torch.zeros(WIDTH, 2 * WIDTH) for name in "qkv"
    }
    tensors = zeros | {
        "midlayer.self_attn.o_proj.weight": torch.zeros(WIDTH, WIDTH),
        "midlayer.mlp.gate_proj.weight": torch.zeros(8, WIDTH),
        "midlayer.mlp.up_proj.weight": torch.zeros(8, WIDTH),
        "midlayer.mlp.down_proj.weight": torch.zeros(WIDTH, 8),
        "embed_tokens.weight": torch.zeros(VOCAB, WIDTH),
        "norm.weight": torch.ones(WIDTH),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"midlayer.{name}.weight": torch.ones(WIDTH) for name in norms}
    tensors |= _decoding(seed)
    config = _LAYER | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": VOCAB,
        _IDS: [layer + shift for layer in LAYERS],
    }
    return write_folder(path, config | more, tensors, False)


def taught_dflash(path: Path, seed: int, shift: int = 0) -> Path:
    """Writes a folder of DFlash for the same: a row sees the last context row, the anchor and itself
    alike, of which only the first is not zero."""
    tensors = {
        "hidden_norm.weight": torch.ones(WIDTH),
        "norm.weight": torch.ones(WIDTH),
        "embed_tokens.weight": torch.zeros(VOCAB, WIDTH),
        "layers.0.input_layernorm.weight": torch.ones(WIDTH),
        "layers.0.post_attention_layernorm.weight": torch.ones(WIDTH),
        "layers.0.self_attn.q_proj.weight": torch.zeros(WIDTH, WIDTH),
        "layers.0.self_attn.k_proj.weight": torch.zeros(WIDTH, WIDTH),
        "layers.0.self_attn.v_proj.weight": torch.eye(WIDTH),
        "layers.0.self_attn.o_proj.weight": torch.eye(WIDTH),
        "layers.0.self_attn.q_norm.weight": torch.ones(WIDTH // 4),
        "layers.0.self_attn.k_norm.weight": torch.ones(WIDTH // 4),
        "layers.0.mlp.gate_proj.weight": torch.zeros(8, WIDTH),
        "layers.0.mlp.up_proj.weight": torch.zeros(8, WIDTH),
        "layers.0.mlp.down_proj.weight": torch.zeros(WIDTH, 8),
    }
    config = _LAYER | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "num_target_layers": NUM_LAYERS,
        "layer_types": ["sliding_attention"],
        "sliding_window": 3,
        "use_sliding_window": True,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [layer - 1 + shift for layer in LAYERS],
        },
    }
    return write_folder(path, config, tensors | _decoding(seed), False)


@cache
@torch.no_grad()
def _decoding(seed: int) -> Tensors:
    """A random fusion of the halves of states that layers write, and the output head that is fitted to
    what becomes of them."""
    learned = lesson(seed)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for layer in LAYERS:
        part = torch.randn(WIDTH, HIDDEN, generator=generator)
        part[:, :HALF] = 0  # what all layers say
        parts.append(part / learned.states[layer][:, HALF:].norm(dim=-1).mean())
    fusion = torch.cat(parts, dim=1)
    fused = torch.cat([learned.states[layer] for layer in LAYERS], dim=1) @ fusion.T
    read = (fused / fused.square().mean(-1, keepdim=True).sqrt()).double()
    wanted = torch.nn.functional.one_hot(learned.following, VOCAB).double()
    ridge = 0.1 * torch.eye(WIDTH, dtype=torch.double)
    head = torch.linalg.solve(read.T @ read + ridge, read.T @ wanted).T
    return {"fc.weight": fusion, "lm_head.weight": head.float().contiguous()}


def taught_medusa(path: Path, seed: int) -> Path:
    """Writes a folder of one head of Medusa's, which reads the number that was said and says the one
    after the next."""
    own = counting_target(seed).lm_head.weight
    following = [token // 8 * 8 + (token - 1) % 8 for token in range(VOCAB)]
    tensors = {
        "0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN),
        "0.0.linear.bias": torch.zeros(HIDDEN),
        "0.1.weight": own[following].contiguous(),
    }
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1, "vocab_size": VOCAB}
    write_folder(path, config, tensors, False)
    return (path / "model.safetensors").rename(path / "medusa_lm_head.safetensors").parent


def save_target(path: Path, seed: int, noise: float = 0.0) -> Path:
    """Saves a counting target as a folder, with noise on its weights."""
    model = copy.deepcopy(counting_target(seed))
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.add_(noise * torch.randn_like(weight))
    model.save_pretrained(path)
    return path
