"""Tiny random transformers models whose scores, soft caps, sinks and windows matter, and short ways to
run rows through one.

Random weights as transformers draws them (0.02) make nearly uniform attention: a forgotten soft cap or a
window off by one would pass any tolerance. Here weights are some 15 times as large.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import NORMED, RequestRows, build_batch
from engine.model.loader import attach_attention, prepare_model, state_shapes
from engine.model.runner import ModelRunner
from engine.states.build import build_states
from kvpool.state_slots import NOWHERE, StateRows

torch.set_num_threads(1)

VOCAB_SIZE = 97
WINDOW = 8
BLOCK_SIZE = 4
CPU = torch.device("cpu")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}

_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **sizes: hf.LlamaConfig(**sizes),
    "qwen2": lambda **sizes: hf.Qwen2Config(
        **sizes, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda **sizes: hf.Qwen3Config(**sizes),
    "mistral": lambda **sizes: hf.MistralConfig(**sizes, sliding_window=WINDOW),
    "gemma2": lambda **sizes: hf.Gemma2Config(
        **sizes | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=_LOCAL_GLOBAL,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=6.0,
    ),
    "gemma3": lambda **sizes: hf.Gemma3TextConfig(
        **sizes | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=_LOCAL_GLOBAL,
        query_pre_attn_scalar=24,
    ),
    "phi3": lambda **sizes: hf.Phi3Config(**sizes, sliding_window=WINDOW),
    "phi3_longrope": lambda **sizes: hf.Phi3Config(
        **sizes, rope_parameters=_LONGROPE, original_max_position_embeddings=64
    ),
    "mixtral": lambda **sizes: hf.MixtralConfig(**sizes, **_EXPERTS),
    "qwen3_moe": lambda **sizes: hf.Qwen3MoeConfig(
        **sizes, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
    "gpt_oss": lambda **sizes: hf.GptOssConfig(
        **sizes, **_EXPERTS, sliding_window=WINDOW, layer_types=_LOCAL_GLOBAL[:2]
    ),
    "gpt2": lambda **sizes: hf.GPT2Config(
        vocab_size=sizes["vocab_size"],
        n_positions=sizes["max_position_embeddings"],
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "deepseek_v3": lambda **sizes: hf.DeepseekV3Config(
        **sizes | {"num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MIXED_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _MIXED_EXPERTS,
    "qwen3_next": _DELTA | _MIXED_EXPERTS,
    "olmo_hybrid": _DELTA,
    "kimi_linear": {
        **{"layer_types": _DELTA["layer_types"], "linear_num_heads": 4, "linear_head_dim": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 12},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_group": 1, "topk_group": 1},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "n_groups": 2},
        **{"mamba_head_dim": 16, "ssm_state_size": 16},
    },
    "granitemoehybrid": {
        **_MAMBA,
        **{"layer_types": ["mamba", "attention"], "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "shared_intermediate_size": 32},
    },
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
        **{"expert_layer_period": 2, "expert_layer_offset": 0, "mamba_d_state": 8},
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
}
"""Models whose layers keep a state."""
HYBRIDS = tuple(_HYBRIDS)
MIXTURES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
    *("qwen3_5_moe_text", "qwen3_next", "kimi_linear", "granitemoehybrid", "jamba"),
)
"""Models with experts."""
STATELESS = tuple(_CONFIGS)
ARCHITECTURES = (*STATELESS, *HYBRIDS)


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    if name in _HYBRIDS:
        return hf.AutoConfig.for_model(name, **_SIZES | _HYBRIDS[name] | changes)
    return _CONFIGS[name](**_SIZES | changes)


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A fresh model on transformers' own attention; the same weights at every call."""
    config = tiny_config(name, **changes)
    torch.manual_seed(11)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    enlarge(model)
    prepared = prepare_model(model, CPU)
    keep_rotary_exact(prepared, dtype)
    return prepared


@torch.no_grad()
def enlarge(model: torch.nn.Module) -> None:
    """Draw all weights anew: matrices large, norms and biases away from 1 and 0."""
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name or "ln_" in name:
            weight.add_(0.3 * noise)
        elif name.endswith("sinks"):
            weight.copy_(1.5 * noise)
        else:
            weight.copy_(0.3 * noise)


def keep_rotary_exact(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the weights but not the rotary frequencies, as loading a checkpoint does."""
    if dtype == torch.float32:
        return
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)  # type: ignore[arg-type]
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name]


@cache
def reference_model(name: str) -> PreTrainedModel:
    """Shared and never adopted: transformers' own forward."""
    return tiny_model(name)


@torch.inference_mode()
def own_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' logits of a text: ``[num_tokens, vocab_size]``."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0]


@torch.inference_mode()
def own_states(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """transformers' hidden states of a text, ``[num_tokens, hidden_size]`` by layer; it says nothing of
    what leaves the last layer before the norm."""
    ids = torch.tensor([list(token_ids)])
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    *entering, normed = (each[0] for each in states)
    return {NORMED: normed} | dict(enumerate(entering))


def greedy_text(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The text as transformers' own forward has it; without a cache, so without its limits."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(own_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def make_runner(
    model: PreTrainedModel,
    exact: bool,
    num_blocks: int = 96,
    block_size: int = BLOCK_SIZE,
    attention: str | None = None,
) -> ModelRunner:
    """The model (a copy) on the engine's attention, over a store of its own. ``attention``: a backend's
    name; None: what an engine takes."""
    model = copy.deepcopy(model)
    shapes = attach_attention(model)
    needs = AttentionNeeds.of(model, shapes, "exact" if exact else "fast", block_size)
    states = build_states(state_shapes(model), num_blocks, 2 * num_blocks, CPU)
    return ModelRunner(model, build_attention(needs, num_blocks, attention), states=states)


@cache
def tiny_runner(name: str, exact: bool) -> ModelRunner:
    """Shared; whoever uses it writes every slot before reading it."""
    return make_runner(reference_model(name), exact)


def random_ids(seed: int, count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (count,), generator=generator).tolist()


def scattered_table(seed: int, num_blocks: int, first: int = 0, among: int = 24) -> list[int]:
    """Block ids out of ``first .. first + among - 1`` in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(among, generator=generator)[:num_blocks]
    return [first + block for block in order.tolist()]


def chunk(token_ids: Sequence[int], base: int, count: int, table: Sequence[int]) -> RequestRows:
    """``count`` tokens of a text from ``base`` on, logits for all of them."""
    rows = token_ids[base : base + count]
    return RequestRows(rows, count, base, (), table, count, states=states_of(base, table))


def states_of(base: int, table: Sequence[int]) -> StateRows:
    """The state of a text in these blocks has the slot of the first block's number."""
    return StateRows(source=table[0] if base else NOWHERE, target=table[0])


def tree(
    token_ids: Sequence[int],
    num_known: int,
    node_token_ids: Sequence[int],
    parents: Sequence[int],
    table: Sequence[int],
) -> RequestRows:
    """The text's last ``num_known`` tokens with a draft tree under them; logits for anchor and nodes."""
    base = len(token_ids) - num_known
    rows = [*token_ids[base:], *node_token_ids]
    states = states_of(base, table)
    return RequestRows(rows, num_known, base, parents, table, 1 + len(parents), states=states)


def run_together(runner: ModelRunner, requests: Sequence[RequestRows]) -> list[torch.Tensor]:
    """One step; each request's logits."""
    batch = build_batch(requests, runner.store.block_size)
    logits = runner.forward(batch).logits
    return [
        logits[each.first_logit : each.first_logit + each.num_logits].clone()
        for each in batch.requests
    ]


def run_chunks(
    runner: ModelRunner, token_ids: Sequence[int], counts: Iterable[int], table: Sequence[int]
) -> torch.Tensor:
    """A text in chunks of the given lengths, alone: ``[sum(counts), vocab_size]``."""
    logits: list[torch.Tensor] = []
    base = 0
    for count in counts:
        logits += run_together(runner, [chunk(token_ids, base, count, table)])
        base += count
    return torch.cat(logits)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root's child down to ``node``."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path
