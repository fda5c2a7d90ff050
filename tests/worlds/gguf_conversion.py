"""Tiny models of any architecture as GGUF files, written as llama.cpp's conversion writes them: its keys,
and what it does to tensors (conversion/*.py of https://github.com/ggml-org/llama.cpp).

Written from the model's side, so that what the engine undoes is done here in another way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.census import tiny_config
from bench.gguf_types import fitting, pack
from worlds.gguf_files import add_value, tiny_llama, values_of, written

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]
Values = dict[str, Any]

NUM_TOKENS = 96


def random_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the type with weights large enough for its logits to tell mistakes apart."""
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1 and tensor.is_floating_point() and "act_fn" not in name:
                tensor += torch.rand_like(tensor) / 4
            elif tensor.ndim > 1 and "conv" not in name:
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
    return model.float().eval()


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def metadata_of(architecture: str, config: Any) -> Values:
    """Returns the keys of every conversion, by the names that configurations have for them."""
    own = config.to_dict()
    for name in ("head_dim", "num_key_value_heads", "layer_types"):
        if name not in own:
            own[name] = getattr(config, name, None)
    rope = own.get("rope_parameters") or {}
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    heads = _first(own, "num_attention_heads", "n_head")
    width = _first(own, "hidden_size", "n_embd")
    head_dim = own.get("head_dim") or width // (heads or 1)
    said = {
        "block_count": config.num_hidden_layers,
        "context_length": _first(own, "max_position_embeddings", "n_positions") or 1024,
        "embedding_length": width,
        "feed_forward_length": _first(own, "intermediate_size", "n_inner", "ffn_hidden_size")
        or 4 * width,
        "attention.head_count": heads,
        "attention.head_count_kv": own.get("num_key_value_heads") or heads,
        "attention.key_length": own.get("head_dim"),
        "attention.value_length": own.get("head_dim"),
        "attention.layer_norm_rms_epsilon": _first(own, "rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": _first(
            own, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"
        ),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": local.get("rope_theta"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "expert_count": _first(own, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": _first(
            own, "num_experts_per_tok", "num_experts_per_token", "top_k_experts"
        ),
        "expert_feed_forward_length": own.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": _first(
            own,
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        "expert_shared_count": _first(own, "n_shared_experts", "num_shared_experts"),
        "expert_group_count": own.get("n_group"),
        "expert_group_used_count": own.get("topk_group"),
        "expert_weights_scale": _first(own, "routed_scaling_factor", "route_scale"),
        "expert_weights_norm": own.get("norm_topk_prob"),
        "leading_dense_block_count": _first(own, "first_k_dense_replace", "num_dense_layers"),
        "attention.sliding_window": own.get("sliding_window"),
        "attention.clamp_kqv": own.get("clip_qkv"),
        "attn_logit_softcapping": own.get("attn_logit_softcapping"),
        "final_logit_softcapping": own.get("final_logit_softcapping"),
        "attention.scale": own.get("attention_multiplier"),
        "embedding_scale": own.get("embedding_multiplier"),
        "residual_scale": own.get("residual_multiplier"),
        "logit_scale": _first(own, "logit_scale", "logits_scaling"),
    }
    said |= _scaling(rope)
    if architecture in _MORE:
        said |= _MORE[architecture](own)
    named = {f"{architecture}.{key}": value for key, value in said.items() if value is not None}
    tokens = {f"tokenizer.ggml.{name}": value for name, value in _tokenizer().items()}
    return {"general.architecture": architecture} | named | tokens


def _tokenizer() -> Values:
    known = values_of(tiny_llama())
    names = ("model", "pre", "merges", "bos_token_id", "eos_token_id", "unknown_token_id")
    found = {name: known[f"tokenizer.ggml.{name}"] for name in names}
    for name in ("tokens", "token_type"):
        found[name] = known[f"tokenizer.ggml.{name}"][:NUM_TOKENS]
    return found | {"merges": ["! !"]}


def _gated_delta(own: Values) -> Values:
    return {
        "ssm.conv_kernel": own["linear_conv_kernel_dim"],
        "ssm.state_size": own["linear_key_head_dim"],
        "ssm.group_count": own["linear_num_key_heads"],
        "ssm.time_step_rank": own["linear_num_value_heads"],
        "ssm.inner_size": own["linear_value_head_dim"] * own["linear_num_value_heads"],
        "full_attention_interval": 1 + own["layer_types"].index("full_attention"),
    }


def _qwen35(own: Values) -> Values:
    sections = (own["rope_parameters"].get("mrope_section") or [11, 11, 10])[:3]
    return _gated_delta(own) | {"rope.dimension_sections": [*sections, 0]}


def _mamba(own: Values) -> Values:
    heads = _first(own, "mamba_n_heads", "mamba_num_heads", "num_heads")
    width = _first(own, "mamba_d_head", "mamba_head_dim", "head_dim")
    return {
        "ssm.conv_kernel": _first(own, "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": _first(own, "mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.group_count": _first(own, "mamba_n_groups", "n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * width,
    }


def _mamba1(own: Values) -> Values:
    expand = _first(own, "mamba_expand", "expand")
    unused = {"attention.head_count": 0, "feed_forward_length": 0}
    return {
        **({} if "num_attention_heads" in own else unused),
        "ssm.conv_kernel": _first(own, "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": _first(own, "mamba_d_state", "state_size"),
        "ssm.time_step_rank": _first(own, "mamba_dt_rank", "time_step_rank"),
        "ssm.inner_size": expand * own["hidden_size"],
        "ssm.dt_b_c_rms": True if own["model_type"] == "falcon_mamba" else None,
    }


def _jamba(own: Values) -> Values:
    return _mamba1(own) | _kv_where(own, "full_attention", list(own["layer_types"]))


def _kv_where(own: Values, kind: str, kinds: list[str]) -> Values:
    heads = own["num_key_value_heads"]
    return {"attention.head_count_kv": [heads if each == kind else 0 for each in kinds]}


def _windows(own: Values) -> Values:
    kinds = [kind == "sliding_attention" for kind in own["layer_types"]]
    return {"attention.sliding_window_pattern": kinds}


def _latent(own: Values) -> Values:
    rank, turning = own["kv_lora_rank"], own["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": own["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turning,
        "attention.value_length": rank,
        "attention.key_length_mla": own["qk_nope_head_dim"] + turning,
        "attention.value_length_mla": own["v_head_dim"],
        "rope.dimension_count": turning,
    }


def _nemotron_h(own: Values) -> Values:
    kinds = list(own["layers_block_type"])
    width = own["moe_intermediate_size"] if "moe" in kinds else own["intermediate_size"]
    return {
        **_mamba(own),
        **_kv_where(own, "full_attention", kinds),
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "expert_count": own["n_routed_experts"] if "moe" in kinds else None,
    }


def _granite_hybrid(own: Values) -> Values:
    kinds = list(own["layer_types"])
    return _mamba(own) | _kv_where(own, "full_attention", kinds)


def _lfm2(own: Values) -> Values:
    kinds = list(own["layer_types"])
    return _kv_where(own, "full_attention", kinds) | {"shortconv.l_cache": own["conv_L_cache"]}


def _kimi(own: Values) -> Values:
    # The class has a type for each layer where the checkpoint counts those that are dense.
    return {
        **_latent(own),
        **_kv_where(own | {"num_key_value_heads": 1}, "full_attention", own["layer_types"]),
        "kda.head_dim": own["linear_head_dim"],
        "ssm.conv_kernel": own["linear_conv_kernel_dim"],
        "leading_dense_block_count": own["mlp_layer_types"].count("dense"),
    }


def _gemma3n(own: Values) -> Values:
    shares = own["activation_sparsity_pattern"]
    normal = NormalDist()
    scales = [normal.inv_cdf(share) if share else float("-inf") for share in shares]
    return _windows(own) | {
        "altup.active_idx": own["altup_active_idx"],
        "altup.num_inputs": own["altup_num_inputs"],
        "embedding_length_per_layer_input": own["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": own["num_kv_shared_layers"],
        "activation_sparsity_scale": scales,
    }


def _gemma4(own: Values) -> Values:
    return _windows(own) | {
        "embedding_length_per_layer_input": own["hidden_size_per_layer_input"],
        "attention.shared_kv_layers": own["num_kv_shared_layers"],
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": own["head_dim"],
        "attention.value_length_swa": own["head_dim"],
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": own["head_dim"],
    }


def _scaling(rope: Values) -> Values:
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    original = {
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings")
    }
    if kind == "longrope":  # its factors are tensors
        return original
    return {
        **original,
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(factor),
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
    }


_MORE: dict[str, Callable[[Values], Values]] = {
    "deepseek2": lambda own: {
        **_latent(own),
        "expert_gating_func": 2 if own["model_type"] == "deepseek_v3" else 1,
    },
    "ernie4_5-moe": lambda own: {
        "expert_count": own["moe_num_experts"],
        "expert_used_count": own["moe_k"],
        "interleave_moe_layer_step": own["moe_layer_interval"],
        "leading_dense_block_count": own["moe_layer_start_index"],
        "expert_shared_count": own["moe_num_shared_experts"],
    },
    "exaone4": _windows,
    "exaone-moe": lambda own: {
        **_windows(own),
        "leading_dense_block_count": own["mlp_layer_types"].count("dense"),
    },
    "falcon": lambda own: {
        "attention.head_count_kv": own["num_kv_heads"]
        if own["new_decoder_architecture"]
        else (1 if own["multi_query"] else own["num_attention_heads"])
    },
    "falcon-h1": _mamba,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "glm4": lambda own: {"rope.dimension_sections": own["rope_parameters"].get("mrope_section")},
    "gpt-oss": lambda own: {"expert_feed_forward_length": own["intermediate_size"]},
    "granitehybrid": _granite_hybrid,
    "hunyuan-moe": lambda own: {
        "expert_feed_forward_length": own["intermediate_size"],
        "expert_shared_feed_forward_length": own["intermediate_size"],
        "expert_used_count": own["moe_topk"][0]
        if isinstance(own["moe_topk"], list)
        else own["moe_topk"],
        "expert_shared_count": 1,
    },
    "kimi-linear": _kimi,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "llama4": lambda own: {
        "attention.key_length": own["head_dim"],
        "expert_feed_forward_length": own["intermediate_size"],
        "feed_forward_length": own["intermediate_size_mlp"],
        "interleave_moe_layer_step": own["interleave_moe_layer_step"],
    },
    "jamba": _jamba,
    "mamba": _mamba1,
    "mamba2": _mamba,
    "minicpm3": lambda own: {
        **_latent(own),
        "attention.head_count_kv": own["num_key_value_heads"],
        "attention.key_length": own["qk_nope_head_dim"] + own["qk_rope_head_dim"],
        "attention.key_length_mla": None,
        "attention.value_length": None,
        "attention.value_length_mla": None,
    },
    "mistral3": lambda own: {
        "attention.temperature_scale": own["rope_parameters"].get("llama_4_scaling_beta"),
        "rope.scaling.yarn_log_multiplier": own["rope_parameters"].get("mscale_all_dim"),
    },
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "olmo2": lambda own: _windows(own) if "sliding_window" in own else {},
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "starcoder": lambda _: {"attention.head_count_kv": 1, "rope.freq_base": None},
    "qwen3next": _gated_delta,
}


def _permuted(weight: Array, num_heads: int) -> Array:
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _tiled(weight: Array, config: Any, first: int = 0, axis: int = 0) -> Array:
    """Value heads that lie by their key heads, laid in turns of key heads."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    moved = np.moveaxis(weight, axis, 0)
    grouped = moved[first:].reshape(keys, values // keys, -1, *moved.shape[1:])
    tiled = grouped.swapaxes(0, 1).reshape(moved[first:].shape)
    return np.moveaxis(np.concatenate([moved[:first], tiled]), 0, axis)


def _neighbours_apart(weight: Array, config: Any) -> Array:
    """Returns each head's dimensions: of those that turn the even ones, then the odd ones, then the
    rest."""
    heads = weight.reshape(-1, config.head_dim, *weight.shape[1:])
    turning = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    parts = heads[:, 0:turning:2], heads[:, 1:turning:2], heads[:, turning:]
    return np.concatenate(parts, axis=1).reshape(weight.shape)


_TURNING = [
    "internlm2",
    "llama",
    "minicpm",
    "granite",
    "granitemoe",
    "granitehybrid",
    "olmo",
    "mistral3",
    "arcee",
    "smollm3",
]
_WITH_ONE = ["gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"]


def _converted(architecture: str, config: Any, name: str, weight: Array) -> Tensors:
    """Returns the tensors that the conversion makes of one parameter, by names of transformers that its
    table knows."""
    if architecture in _TURNING and re.search(r"[qk]_proj\.", name):
        is_query = "q_proj" in name
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        weight = _permuted(weight, heads)
    is_glm = architecture == "glm4" and "mrope_section" in config.rope_parameters
    if is_glm and re.search(r"[qk]_proj\.", name):
        weight = _neighbours_apart(weight, config)
    if architecture in _WITH_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        weight = weight + 1
    if architecture in ("qwen35", "qwen35moe") and "linear_attn." in name:
        keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        if re.search(r"in_proj_qkv|conv1d", name):
            weight = _tiled(weight.reshape(len(weight), -1), config, keys)
        elif "out_proj" in name:
            weight = _tiled(weight, config, axis=1)
        elif ".norm" not in name:
            weight = _tiled(weight, config)
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if re.search(r"conv1d\.weight|conv\.conv\.weight|shared_expert_gate", name):
        weight = weight.squeeze()
    if re.search(r"(mamba|mixer)\.(A_log|D)$", name) and architecture not in ("jamba", "mamba"):
        weight = weight.reshape(-1, 1)
    if re.search(r"(mamba|mixer)\.norm\.weight", name):
        weight = weight.reshape(_first(config.to_dict(), "mamba_n_groups", "n_groups"), -1)
    return _split(architecture, config, name, weight)


def _split(architecture: str, config: Any, name: str, weight: Array) -> Tensors:
    if "in_proj_qkvz" in name:
        return _apart(config, name, weight)
    if "query_key_value" in name:
        return {name: _qkv(config, weight)}
    if architecture == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return {name: weight.T}
    if "kv_b_proj" in name and architecture != "minicpm3":
        heads = config.num_attention_heads
        both = weight.reshape(heads, -1, weight.shape[-1])
        keys, values = np.split(both, [config.qk_nope_head_dim], axis=1)
        return {
            name.replace("kv_b", "k_b"): keys.swapaxes(1, 2),
            name.replace("kv_b", "v_b"): values,
        }
    if architecture == "llama4" and "experts." in name:
        weight = weight.swapaxes(1, 2)
        if "gate_up" not in name:
            return {f"{name}.weight": weight}
    if architecture == "gpt-oss" and "experts" in name:
        is_bias = name.endswith("_bias")
        weight = weight if is_bias else weight.swapaxes(1, 2)
        name = name.replace("_bias", ".bias") if is_bias else f"{name}.weight"
        if "gate_up_proj" not in name:
            return {name: weight}
        return {
            name.replace("gate_up", "gate"): weight[:, ::2],
            name.replace("gate_up", "up"): weight[:, 1::2],
        }
    if architecture == "gemma4" and "experts.gate_up_proj" in name:
        return {f"{name}:both": weight}
    dense = "dense-" if architecture == "granitehybrid" and not config.num_local_experts else ""
    if "experts.gate_up_proj" in name or "shared_mlp.input_linear" in name:
        gate, up = np.split(weight, 2, axis=-2)
        return {f"{name}:{dense}gate": gate, f"{name}:{dense}up": up}
    if dense and "shared_mlp.output_linear" in name:
        return {f"{name}:dense-down": weight}
    if name.endswith("forget_gate.A_log"):
        return {name: weight.reshape(1, 1, -1, 1)}
    if architecture == "kimi-linear" and "conv1d" in name:
        parts = np.split(weight, 3)
        return {
            f"{name}:{which}": part.reshape(1, len(part), 1, -1)
            for which, part in zip("qkv", parts, strict=True)
        }
    return {name: weight}


def _apart(config: Any, name: str, weight: Array) -> Tensors:
    """Queries, keys, values and gates, which the model has for one key head after the other."""
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    per_key = config.linear_num_value_heads // keys * config.linear_value_head_dim
    grouped = weight.reshape(keys, -1, weight.shape[1])
    parts = np.split(grouped, np.cumsum([width, width, per_key]), axis=1)
    query, key, value, gate = (each.reshape(-1, weight.shape[1]) for each in parts)
    return {f"{name}:qkv": np.concatenate([query, key, value]), f"{name}:gate": gate}


def _qkv(config: Any, weight: Array) -> Array:
    heads = config.num_attention_heads
    groups = heads
    if config.model_type == "falcon":
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
    width = len(weight) // (heads + 2 * groups)
    grouped = weight.reshape(groups, heads // groups + 2, width, *weight.shape[1:])
    query, key, value = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return np.concatenate([each.reshape(-1, *weight.shape[1:]) for each in (query, key, value)])


_OWN_NAMES = (
    (r"\.gate_up_proj:(gate|up)$", r"ffn_\1_exps.weight"),
    (r"shared_mlp\.\w+\.weight:dense-(gate|up|down)$", r"ffn_\1.weight"),
    (r"shared_mlp\.input_linear\.weight:(gate|up)$", r"ffn_\1_shexp.weight"),
    (r"(?<!shared_)experts\.(up|down)_proj$", r"ffn_\1_exps.weight"),
    (r"(?<!shared_)experts\.(gate|up|down)_proj\.(weight|bias)$", r"ffn_\1_exps.\2"),
    (r"router\.scale$", "ffn_gate_inp.scale"),
    (r"router\.per_expert_scale$", "ffn_down_exps.scale"),
    (r"gate_up_proj:both$", "ffn_gate_up_exps.weight"),
    (r"\.router\.(weight|bias)$", r"ffn_gate_inp.\1"),
    (r"(e_score_correction_bias|expert_bias)$", "exp_probs_b.bias"),
    (r"in_proj_qkvz\.weight:(qkv|gate)$", r"attn_\1.weight"),
    (r"dt_bias$", "ssm_dt.bias"),
    (r"forget_gate\.A_log$", "ssm_a"),
    (r"conv1d\.weight:([qkv])$", r"ssm_conv1d_\1.weight"),
    (r"forget_gate\.f_([ab])_proj\.weight$", r"ssm_f_\1.weight"),
    (r"self_attn\.sinks$", "attn_sinks.weight"),
    (r"correct_output_scale$", "altup_correct_scale.weight"),
    (r"layer_scalar$", "layer_output_scale.weight"),
    (r"altup_(unembed_)?projections\.\d+\.weight$", None),
)


def _stored_name(table: Any, name: str) -> str | None:
    """The tensor's name; None for what is written with others."""
    layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
    for pattern, own in _OWN_NAMES:
        found = re.search(pattern, name)
        if found is not None:
            return own and f"blk.{layer[1]}." + found.expand(own)  # type: ignore[index]
    for known in (name, name.replace("model.layers", "backbone.layers")):
        stored = table.get_name(known, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            end = re.search(r"\.(weight|bias)$", name)
            return stored if end is None or stored.endswith(end[0]) else stored + end[0]
    raise AssertionError(f"{name} has no name")


def tensors_of(architecture: str, model: PreTrainedModel) -> Tensors:
    number = next(each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name in tied or "act_fn" in name:
            continue
        for part, weight in _converted(
            architecture, model.config, name, tensor.numpy().copy()
        ).items():
            stored = _stored_name(table, part)
            if stored is not None:
                found[stored] = np.ascontiguousarray(weight)
    found |= _frequencies(model)
    for name, stored in (
        ("altup_projections", "altup_proj.weight"),
        ("altup_unembed_projections", "altup_unembd_proj.weight"),
    ):
        if hasattr(model.base_model, name):
            stack = [each.weight.detach() for each in getattr(model.base_model, name)]
            found[stored] = torch.stack(stack).numpy()
    return found


def _frequencies(model: PreTrainedModel) -> Tensors:
    """Returns the divisors of frequencies, where they are scaled in ways that no key has a word for."""
    rope = model.config.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], dtype=np.float32)
            for which in ("long", "short")
        }
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        turning = int(512 * rope["full_attention"]["partial_rotary_factor"] / 2)
        factors = np.where(np.arange(256) < turning, 1.0, 1e30)
    elif rope.get("rope_type") == "llama3":
        scaled = model.base_model.rotary_emb.inv_freq
        powers = torch.arange(len(scaled)) / len(scaled)
        factors = (1 / rope["rope_theta"] ** powers / scaled).numpy()
    else:
        return {}
    return {"rope_freqs.weight": factors.astype(np.float32)}


def _activations(model: PreTrainedModel) -> Values:
    """Returns the values of xIELU that files have for each layer."""
    acts: list[Any] = [
        module for name, module in model.named_modules() if name.endswith("mlp.act_fn")
    ]
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {
        f"xielu.{name}": [float(getattr(each, name).detach()) for each in acts]
        for name in names
        if acts and hasattr(acts[0], name)
    }


_SMALL = re.compile(r"bias|norm|conv|ssm_[ad]\b|gate_inp|altup|ssm_(alpha|beta|ba)|rope_")


def write_converted(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    values: Mapping[str, Any] | None = None,
    change_tensors: Callable[[Tensors], object] = lambda _: None,
) -> Path:
    """``kind``: of matrices of linear layers and experts. ``values``: besides, or otherwise; None leaves
    one out."""
    said = metadata_of(architecture, model.config) | _activations(model) | {**(values or {})}
    writer = gguf.GGUFWriter(path, said.pop("general.architecture"))
    for key, value in said.items():
        if value is not None:
            add_value(writer, key, value)
    tensors = tensors_of(architecture, model)
    change_tensors(tensors)
    for name, weight in tensors.items():
        is_small = weight.ndim == 1 or _SMALL.search(name)
        own = GGMLQuantizationType.F32 if is_small else fitting(kind, weight.shape[-1])
        if own == GGMLQuantizationType.F32:
            writer.add_tensor(name, weight.astype(np.float32))
            continue
        rows = pack(weight.reshape(-1, weight.shape[-1]), own)
        writer.add_tensor(name, rows.reshape(*weight.shape[:-1], -1), raw_dtype=own)
    return written(writer, path)
