"""Tiny models of families that have an MTP module, the module's weights, and a plain reading of them: the
joining in plain torch, then the family's layer on transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import InputBuffers, RequestRows, build_batch
from engine.drafting.published.mtp_network import MtpNetwork
from worlds.tiny_models import CPU, VOCAB_SIZE, enlarge, random_ids, tiny_config

HIDDEN, NUM_LAYERS, BLOCK_SIZE = 64, 2, 4
TEXT = random_ids(3, 12)
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """``root``: of the module's names, ``layer``: of its layer's after it. ``offset``: added to weights
    of norms. ``single``: what changes in the configuration where the module's layer is all there is.
    ``is_served``: the engine loads such targets."""

    config: Callable[..., Any]
    root: str
    parts: tuple[str, str, str, str]  # norms of token and state, join, last norm
    layer: str = ""
    offset: float = 0.0
    is_hidden_first: bool = False
    is_blank_first: bool = True
    single: dict[str, Any] = field(default_factory=dict)
    is_served: bool = True


def glm(**changes: Any) -> Any:
    return hf.Glm4MoeConfig(**_SIZES | _HEADS | _EXPERTS | {"use_qk_norm": True} | changes)


def glm_lite(**changes: Any) -> Any:
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    heads = {"qk_rope_head_dim": 8, "v_head_dim": 12, "num_attention_heads": 4}
    sizes = _SIZES | _EXPERTS | ranks | heads
    sizes |= {"num_key_value_heads": 4, "num_nextn_predict_layers": 1}
    return hf.Glm4MoeLiteConfig(**sizes | changes)


def hybrid(kind: Callable[..., Any], **sizes: Any) -> Callable[..., Any]:
    """The last layer attends and the one before keeps a state; a module's only one attends."""
    states = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
    states |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}

    def config(**changes: Any) -> Any:
        kinds = ["linear_attention", "full_attention"][-changes["num_hidden_layers"] :]
        return kind(**_SIZES | _HEADS | states | sizes | {"layer_types": kinds} | changes)

    return config


def mellum(**changes: Any) -> Any:
    kinds = ["full_attention", "sliding_attention"][: changes["num_hidden_layers"]]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    window = {"sliding_window": 5, "num_mtp_layers": 1}  # whose kind is sliding
    return hf.MellumConfig(**_SIZES | _HEADS | experts | window | {"layer_types": kinds} | changes)


_NUMBERED = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_NAMED = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_LISTED = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
LAST = f"model.layers.{NUM_LAYERS}."
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_QWEN: dict[str, Any] = {"offset": 1.0, "is_blank_first": False, "is_served": False}
FAMILIES = {
    "deepseek_v3": Family(
        lambda **changes: tiny_config("deepseek_v3", **changes),
        LAST,
        _NUMBERED,
        single={"first_k_dense_replace": 0},
    ),
    "glm4_moe": Family(glm, LAST, _NUMBERED, single={"first_k_dense_replace": 0}),
    "glm4_moe_lite": Family(glm_lite, LAST, _NUMBERED, single={"mlp_layer_types": ["sparse"]}),
    "qwen3_next": Family(
        hybrid(hf.Qwen3NextConfig, **_SHARED), "mtp.", _NAMED, "layers.0.", **_QWEN
    ),
    "qwen3_5": Family(hybrid(hf.Qwen3_5TextConfig), "mtp.", _NAMED, "layers.0.", **_QWEN),
    "qwen3_5_moe": Family(
        hybrid(hf.Qwen3_5MoeTextConfig, **_SHARED), "mtp.", _NAMED, "layers.0.", **_QWEN
    ),
    "mellum": Family(
        mellum,
        "mtp.",
        _NAMED,
        "layers.0.",
        is_blank_first=False,
        single={"layer_types": ["sliding_attention"]},
    ),
    "mimo": Family(
        lambda **changes: hf.Qwen2Config(**_SIZES | _HEADS | changes),
        "model.mtp_layers.0.",
        _LISTED,
        is_hidden_first=True,
    ),
}


def own_model(config: Any, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    enlarge(model)
    return model.eval().requires_grad_(False)


@cache
def donor(name: str) -> PreTrainedModel:
    """The module's layer and last norm, as a model of the family with nothing else."""
    family = FAMILIES[name]
    config = family.config(num_hidden_layers=1)
    for key, value in family.single.items():
        setattr(config, key, value)
    model = own_model(config, seed=1)
    generator = torch.Generator().manual_seed(23)
    for weight in model.parameters():
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


@cache
def own_parts() -> list[torch.Tensor]:
    """Weights of the norms of token and state, and of the join."""
    generator = torch.Generator().manual_seed(5)
    norms = [1 + 0.3 * torch.randn(HIDDEN, generator=generator) for _ in range(2)]
    return [*norms, 0.2 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)]


def check_whole(name: str, network: MtpNetwork, target: PreTrainedModel) -> torch.Tensor:
    """Compares the rows of the text, in one piece, with the plain reading's, and returns them."""
    features = target_states(target)[:-1]
    found = Served(network).run(TEXT[1:], features)
    wanted = plainly(name, target, TEXT[1:], features)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    return found


def norm(rows: torch.Tensor, weight: torch.Tensor, family: Family, eps: float) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + family.offset)


def plainly(
    name: str, target: PreTrainedModel, ids: list[int], features: torch.Tensor
) -> torch.Tensor:
    """States of the rows at positions 0, 1, ..: of ``ids``, and of the features before each."""
    family, config = FAMILIES[name], target.config
    token_weight, hidden_weight, join = own_parts()
    embeddings = target.get_input_embeddings().weight[torch.tensor(ids)].clone()
    if family.is_blank_first:
        embeddings[0] = 0
    left = norm(embeddings, token_weight, family, config.rms_norm_eps)
    right = norm(features, hidden_weight, family, config.rms_norm_eps)
    both = [right, left] if family.is_hidden_first else [left, right]
    rows = torch.cat(both, dim=1) @ join.T
    body = donor(name).base_model
    output = body(inputs_embeds=rows[None], position_ids=torch.arange(len(ids))[None])
    return output.last_hidden_state[0]


class Served:
    """A network on the engine's attention, whose rows lie from slot 0 on."""

    def __init__(self, network: MtpNetwork) -> None:
        self.network = network
        needs = AttentionNeeds("fast", CPU, torch.float32, BLOCK_SIZE, network.shapes)
        self.attention = build_attention(needs, 8)
        self.buffers = InputBuffers(CPU, 32)
        self.base = 0

    @torch.inference_mode()
    def run(self, ids: list[int], features: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Rows after those that ran before; returns their states. ``first``: position of slot 0."""
        rows = RequestRows(ids, len(ids), self.base, (), [5, 2, 7, 1], 1)
        batch = build_batch([rows], BLOCK_SIZE)
        inputs = self.buffers.fill(batch)
        plan = self.attention.plan(batch, inputs)
        self.base += len(ids)
        found = self.network(inputs.token_ids, features, inputs.positions + first, plan)
        torch.testing.assert_close(found[0], found[1])
        return found[1]


@torch.inference_mode()
def target_states(target: PreTrainedModel) -> torch.Tensor:
    target.config._attn_implementation = "eager"
    return target.base_model(torch.tensor([TEXT])).last_hidden_state[0]
