"""llama.cpp's architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.architecture import Architecture
from engine.weights.gguf.configuration import Said, kinds_by_heads, latent, sparsity
from engine.weights.gguf.conversion import (
    GATES_IN_TURN,
    GROUPED_QKV,
    LATENT,
    MIXED_HEADS,
    NEIGHBOURS,
    PERMUTED,
    TILED_VALUES,
    TRANSPOSED,
    TURNED,
    less_one,
)


def _always(**values: Any) -> Callable[[Said], Mapping[str, Any]]:
    return lambda _: values


def _where(key: str, model_type: str) -> Callable[[Said], Mapping[str, Any]]:
    """Another type where the key says any."""
    return lambda said: {"model_type": model_type} if said.count(key) else {}


def _mistral3(said: Said) -> Mapping[str, Any]:
    found: dict[str, float] = {}
    if (scale := said.number("rope.scaling.yarn_log_multiplier")) is not None:
        found |= {"mscale": 1.0, "mscale_all_dim": scale}
    if (scale := said.number(_TEMPERATURE)) is not None:
        return {"rope_parameters": found | {"llama_4_scaling_beta": scale}}
    window = said.count("attention.sliding_window")
    return {"model_type": "mistral", "sliding_window": window, "rope_parameters": found}


def _gated_delta(said: Said) -> Mapping[str, Any]:
    return {
        "linear_value_head_dim": said.needed("ssm.inner_size") // said.needed("ssm.time_step_rank")
    }


def _qwen35(said: Said) -> Mapping[str, Any]:
    sections = [each for each in said.value("rope.dimension_sections") or () if each]
    rope = {"mrope_section": sections, "mrope_interleaved": True} if sections else {}
    return {**_gated_delta(said), "rope_parameters": rope}


def _scalar(num_layers: int) -> Callable[[Said], Mapping[str, Any]]:
    """Queries of the largest model of a family are scaled by its width, which no key says."""

    def says(said: Said) -> Mapping[str, Any]:
        whole = said.needed("embedding_length") // said.needed("attention.head_count")
        is_largest = said.num_layers == num_layers
        return {"query_pre_attn_scalar": whole if is_largest else said.head_dim}

    return says


def _gemma3n(said: Said) -> Mapping[str, Any]:
    return {
        "activation_sparsity_pattern": sparsity(said.list("activation_sparsity_scale") or ()),
        "laurel_rank": said.tensors.get("blk.0.laurel_l.weight", (64,))[0],
    }


def _gemma4(said: Said) -> Mapping[str, Any]:
    kinds = said.list("attention.sliding_window_pattern") or [0] * said.num_layers
    widths = said.list("feed_forward_length") or [said.needed("feed_forward_length")]
    heads = said.list("attention.head_count_kv") or [said.needed("attention.head_count_kv")]
    with_keys = range(said.num_layers - (said.count("attention.shared_kv_layers") or 0))
    values = [f"blk.{layer}.attn_v.weight" in said.tensors for layer in with_keys]
    found = {
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "head_dim": said.count("attention.key_length_swa") or said.head_dim,
        "global_head_dim": said.head_dim,
        "num_key_value_heads": heads[kinds.index(1) % len(heads) if 1 in kinds else 0],
        "attention_k_eq_v": not all(values),
        "enable_moe_block": bool(said.count("expert_count")),
    }
    if found["attention_k_eq_v"]:
        found["num_global_key_value_heads"] = heads[kinds.index(0) % len(heads)]
    # Dimensions that do not turn have factors beyond any number.
    factors = said.floats("rope_freqs.weight")
    turning = sum(each < _ENDLESS for each in factors) / len(factors)
    return {
        **found,
        "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": turning},
    }


def _exaone4(said: Said) -> Mapping[str, Any]:
    if said.count("attention.sliding_window"):
        return {}
    # Then all layers turn, too.
    return {"sliding_window": None, "layer_types": ["full_attention"] * said.num_layers}


def _glm4(said: Said) -> Mapping[str, Any]:
    sections = [each for each in said.value("rope.dimension_sections") or () if each]
    return {"rope_parameters": {"mrope_section": sections} if sections else {}}


def _phimoe(said: Said) -> Mapping[str, Any]:
    """All models of the type have this scale, of which files say another."""
    is_scaled = "rope_factors_long.weight" in said.tensors
    scales = dict.fromkeys(("long_mscale", "short_mscale"), 1.243163121016122)
    return {"rope_parameters": scales if is_scaled else {}}


def _gpt_oss(said: Said) -> Mapping[str, Any]:
    # llama.cpp has no word for it; the model was trained with ramps that are not cut to whole ones.
    is_scaled = said.value("rope.scaling.type") == "yarn"
    return {
        "intermediate_size": said.needed("expert_feed_forward_length"),
        "rope_parameters": {"truncate": False} if is_scaled else {},
    }


def _deepseek2(said: Said) -> Mapping[str, Any]:
    if said.number(_TEMPERATURE):
        raise UnsupportedModelError(
            f"deepseek2 with {_TEMPERATURE} (Mistral Large 3) is not served"
        )
    has_bias = "exp_probs_b.bias" in said.has_layers_with
    is_third = has_bias or said.value("expert_gating_func") == _SIGMOID
    scale = said.number("rope.scaling.yarn_log_multiplier")
    # llama.cpp stores a tenth of it.
    rope = {} if scale is None else {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
    groups = said.count("expert_group_count")
    own: dict[str, Any] = {} if is_third else {"model_type": "deepseek_v2"}
    if not is_third and (groups or 1) > 1:
        own["topk_method"] = "group_limited_greedy"
    elif is_third and groups is None and said.count("expert_count") != _EXPERTS_IN_GROUPS:
        own |= {"n_group": 1, "topk_group": 1}
    if not said.count("attention.q_lora_rank"):
        own["q_lora_rank"] = None
    return {**latent(said), **own, "rope_parameters": rope}


def _mamba_sizes(said: Said) -> Mapping[str, Any]:
    inner, heads = said.needed("ssm.inner_size"), said.needed("ssm.time_step_rank")
    found = {"mamba_d_ssm": inner, "mamba_d_head": inner // heads, "mamba_head_dim": inner // heads}
    if not inner % (width := said.needed("embedding_length")):
        found |= {"mamba_expand": inner // width, "expand": inner // width}
    return found


def _mamba2(said: Said) -> Mapping[str, Any]:
    sizes = _mamba_sizes(said)
    return {**sizes, "head_dim": sizes["mamba_d_head"]}


def _falcon_h1(said: Said) -> Mapping[str, Any]:
    # The multipliers are in the weights.
    return {**_mamba_sizes(said), "mamba_norm_before_gate": False}


def _granite_hybrid(said: Said) -> Mapping[str, Any]:
    if said.value("rope.scaling.finetuned"):
        raise UnsupportedModelError("granitehybrid with rotary embeddings (Bamba) is not served")
    has_experts = bool(said.count("expert_count"))
    return {
        **_mamba_sizes(said),
        "layer_types": kinds_by_heads(said, "full_attention", "linear_attention"),
        "num_local_experts": said.count("expert_count") or 0,
        "position_embedding_type": None,
        "shared_intermediate_size": said.count("expert_shared_feed_forward_length")
        or (0 if has_experts else said.needed("feed_forward_length")),
    }


def _nemotron_h(said: Said) -> Mapping[str, Any]:
    kinds = kinds_by_heads(said, "full_attention", "linear_attention")
    widths = said.list("feed_forward_length") or [0] * said.num_layers
    mlp = "moe" if said.count("expert_count") else "mlp"
    return {
        **_mamba_sizes(said),
        "layers_block_type": [
            mlp if width else kind for kind, width in zip(kinds, widths, strict=True)
        ],
    }


def _lfm2(said: Said) -> Mapping[str, Any]:
    # The width of layers is the final one, which the class would adjust.
    return {
        "layer_types": kinds_by_heads(said, "full_attention", "conv"),
        "block_auto_adjust_ff_dim": False,
    }


def _kimi_linear(said: Said) -> Mapping[str, Any]:
    return {
        **latent(said),
        "layer_types": kinds_by_heads(said, "full_attention", "linear_attention"),
        "linear_num_heads": said.needed("attention.head_count"),
    }


def _falcon(said: Said) -> Mapping[str, Any]:
    heads = said.needed("attention.head_count")
    num_kv_heads = said.count("attention.head_count_kv") or heads
    return {
        "new_decoder_architecture": "attn_norm_2.weight" in said.has_layers_with,
        "multi_query": num_kv_heads == 1,
        "bias": "attn_qkv.bias" in said.has_layers_with,
    }


def _llama4(said: Said) -> Mapping[str, Any]:
    found = {
        "intermediate_size": said.needed("expert_feed_forward_length"),
        "intermediate_size_mlp": said.needed("feed_forward_length"),
        # llama.cpp knows the larger of the two models by its experts.
        "use_qk_norm": said.count("expert_count") != _MOST_EXPERTS,
    }
    if said.count("attention.sliding_window") != 0:
        return found
    layers = said.num_layers
    return {**found, "layer_types": ["full_attention"] * layers, "no_rope_layers": [1] * layers}


def _minicpm(said: Said) -> Mapping[str, Any]:
    """Older files leave out the first two models' scales."""
    return {
        "attention_multiplier": said.head_dim**-0.5,
        "embedding_multiplier": said.number("embedding_scale") or 12.0,
        "residual_multiplier": said.number("residual_scale") or 1.4 / said.num_layers**0.5,
        "logits_scaling": said.number("logit_scale") or said.needed("embedding_length") / 256,
    }


def _hunyuan_moe(said: Said) -> Mapping[str, Any]:
    layers = said.num_layers
    return {
        "intermediate_size": said.needed("expert_feed_forward_length"),
        "num_shared_expert": [said.count("expert_shared_count") or 1] * layers,
        "moe_topk": [said.needed("expert_used_count")] * layers,
    }


_SIGMOID = 2
_TEMPERATURE = "attention.temperature_scale"
"""The key of what queries grow by down a text."""
_ENDLESS = 1e29
_MOST_EXPERTS = 128
_EXPERTS_IN_GROUPS = 256
"""DeepSeek V3's and R1's. Older files say no groups, and other models of the type have none."""
_NORMS = less_one(r"norm\.weight$")
_OWN_NORMS = less_one(r"(?<!linear_attn\.)norm\.weight$")

ARCHITECTURES = {
    "afmoe": Architecture("afmoe", (), _always(mup_enabled=True)),
    "apertus": Architecture("apertus"),
    "arcee": Architecture("arcee", PERMUTED),
    "chatglm": Architecture("glm"),
    "cohere2": Architecture("cohere2"),
    "command-r": Architecture("cohere"),
    "deepseek2": Architecture("deepseek_v3", (LATENT,), _deepseek2),
    "dots1": Architecture("dots1"),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "exaone": Architecture("llama"),
    "exaone-moe": Architecture("exaone_moe"),
    "exaone4": Architecture("exaone4", (), _exaone4),
    "falcon": Architecture("falcon", (GROUPED_QKV,), _falcon),
    "falcon-h1": Architecture("falcon_h1", (), _falcon_h1),
    "gemma": Architecture("gemma", (_NORMS,)),
    "gemma2": Architecture("gemma2", (_NORMS,), _scalar(46)),
    "gemma3": Architecture("gemma3_text", (_NORMS,), _scalar(62)),
    "gemma3n": Architecture("gemma3n_text", (), _gemma3n),
    "gemma4": Architecture("gemma4_text", (), _gemma4),
    "glm4": Architecture("glm4", (NEIGHBOURS,), _glm4),
    "glm4moe": Architecture("glm4_moe"),
    "gpt-oss": Architecture("gpt_oss", GATES_IN_TURN, _gpt_oss),
    "gpt2": Architecture("gpt2", (TRANSPOSED,)),
    "gptneox": Architecture("gpt_neox", (GROUPED_QKV,)),
    "granite": Architecture("granite", PERMUTED),
    "granitehybrid": Architecture("granitemoehybrid", PERMUTED, _granite_hybrid),
    "granitemoe": Architecture(
        "granitemoe", PERMUTED, _where("expert_shared_feed_forward_length", "granitemoeshared")
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", (), _hunyuan_moe),
    "internlm2": Architecture("llama", PERMUTED),
    "jais2": Architecture("jais2"),
    "kimi-linear": Architecture("kimi_linear", (LATENT,), _kimi_linear),
    "lfm2": Architecture("lfm2", (), _lfm2),
    "lfm2moe": Architecture("lfm2_moe", (), _lfm2),
    "llama": Architecture("llama", PERMUTED, _where("expert_count", "mixtral")),
    "llama4": Architecture("llama4_text", TURNED, _llama4),
    "mamba2": Architecture("mamba2", (), _mamba2),
    "minicpm": Architecture("granite", PERMUTED, _minicpm),
    "minicpm3": Architecture("minicpm3", (LATENT,), latent),
    "minimax-m2": Architecture("minimax_m2", (), _always(use_routing_bias=True)),
    "mistral3": Architecture("ministral3", PERMUTED, _mistral3),
    "nemotron": Architecture("nemotron", (_NORMS,)),
    "nemotron_h": Architecture("nemotron_h", (), _nemotron_h),
    "nemotron_h_moe": Architecture("nemotron_h", (), _nemotron_h),
    "olmo": Architecture("olmo", PERMUTED),
    "olmo2": Architecture("olmo2", (), _where("attention.sliding_window", "olmo3")),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "phimoe": Architecture("phimoe", (), _phimoe),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture("qwen3_5_text", (_OWN_NORMS, *TILED_VALUES), _qwen35),
    "qwen35moe": Architecture("qwen3_5_moe_text", (_OWN_NORMS, *TILED_VALUES), _qwen35),
    # llama.cpp's graph has the weights of chosen experts sum up to one.
    "qwen3moe": Architecture("qwen3_moe", (), _always(norm_topk_prob=True)),
    # Of text the positions in all three dimensions are one.
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", (), _always(norm_topk_prob=True)),
    "qwen3next": Architecture("qwen3_next", (_OWN_NORMS, MIXED_HEADS), _gated_delta),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", PERMUTED),
    "stablelm": Architecture("stablelm"),
    "starcoder": Architecture("gpt_bigcode"),
    "starcoder2": Architecture("starcoder2"),
}
