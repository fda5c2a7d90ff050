"""The configuration that a GGUF file's metadata describes, in transformers' words.

llama.cpp's keys are regular: most of what a model is called ``{architecture}.key`` in every file, and
each class of transformers knows some of the names that the key has there. What only a few architectures
have is in ``architectures``. Whatever no key says is as in the class, as llama.cpp has it in code.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from statistics import NormalDist
from typing import Any

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import GgufHeader

Values = Mapping[str, Any]
_MOST_QUOTED = 40
_LAYER = re.compile(r"blk\.(\d+)\.")
_COUNTS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size n_inner ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads num_kv_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "altup.active_idx": "altup_active_idx",
    "altup.num_inputs": "altup_num_inputs",
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok moe_topk moe_k top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size"
    ),
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval interleave_moe_layer_step",
    "moe_latent_size": "moe_latent_size",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim mamba_d_conv conv_kernel",
    "ssm.state_size": "linear_key_head_dim mamba_d_state ssm_state_size state_size",
    "ssm.group_count": "linear_num_key_heads mamba_n_groups n_groups",
    "ssm.time_step_rank": "linear_num_value_heads mamba_n_heads mamba_num_heads num_heads",
    "kda.head_dim": "linear_head_dim",
}
"""Names that configurations have for a key whose value counts something; each class knows some."""
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_eps norm_epsilon norm_eps layer_norm_epsilon",
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale logits_scaling",
    "expert_weights_scale": "routed_scaling_factor route_scale",
}
_FLAGS = {
    "attention.causal": "",
    "expert_weights_norm": "norm_topk_prob",
    "use_parallel_residual": "use_parallel_residual",
}
_SHOWN = {
    "attn_q.bias": "attention_bias qkv_bias use_qkv_bias",
    "attn_qkv.bias": "attention_bias",
    "attn_output.bias": "use_bias attention_out_bias",
    "ffn_up.bias": "mlp_bias use_bias",
    "attn_q_norm.weight": "use_qk_norm qk_layernorm",
    "ssm_conv1d.bias": "mamba_conv_bias use_conv_bias",
    "ssm_norm.weight": "mamba_rms_norm",
    "shortconv.in_proj.bias": "conv_bias",
}
"""Configuration fields about layers' parts, by a tensor that shows the part."""


class Said:
    """A file's metadata, with a one-line error for a value of the wrong kind. ``floats``: reads a small
    tensor of the file by name."""

    def __init__(self, header: GgufHeader, floats: Callable[[str], list[float]]) -> None:
        self.header, self.floats = header, floats
        self.tensors = {name: tensor.shape for name, tensor in header.tensors.items()}
        self.has_layers_with = {name.split(".", 2)[-1] for name in self.tensors}
        self.num_layers = self._num_layers()

    def _num_layers(self) -> int:
        """Returns the model's number of layers, without multi-token-prediction layers."""
        layers = {int(found[1]) for name in self.tensors if (found := _LAYER.match(name))}
        number = self.count("block_count")
        if number is None or layers != set(range(min(number, len(layers) + 1))):
            raise UnsupportedModelError(
                f"its configuration says {number} layers, and it has tensors of {len(layers)}"
            )
        return max(0, number - (self.count("nextn_predict_layers") or 0))

    def value(self, name: str) -> Any:
        """Returns what the architecture's key says, None where it is not there."""
        return self.header.metadata.get(self._key(name))

    def list(self, name: str) -> list[Any] | None:
        """Returns a value for each layer, None where the key says one for all, or nothing."""
        value = self.value(name)
        if not isinstance(value, list):
            return None
        if len(value) < self.num_layers:
            raise self._odd(name, f"{len(value)} values, for {self.num_layers} layers")
        return value[: self.num_layers]

    def varies(self, name: str) -> bool:
        """Whether layers that have any of something have several numbers of it."""
        return len({each for each in self.list(name) or () if each}) > 1

    def count(self, name: str) -> int | None:
        """Returns a number of things: of a value for each layer the largest."""
        value = self.value(name)
        if isinstance(value, list):
            value = max((each for each in value if isinstance(each, int)), default=None)
        if value is not None and (not isinstance(value, int) or value < 0):
            raise self._odd(name, repr(value))
        return value

    def number(self, name: str) -> float | None:
        value = self.value(name)
        if value is not None and not isinstance(value, int | float):
            raise self._odd(name, repr(value))
        # The digits that a float32 has: 0.00001, not 0.0000099999997.
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def needed(self, name: str) -> int:
        """Returns a number of things, which has to be said."""
        found = self.count(name)
        if not found:
            raise UnsupportedModelError(f"its {self._key(name)} is {found}, and the model needs it")
        return found

    @property
    def head_dim(self) -> int:
        width, heads = self.needed("embedding_length"), self.needed("attention.head_count")
        return self.count("attention.key_length") or max(1, width // heads)

    def _key(self, name: str) -> str:
        return f"{self.header.architecture}.{name}"

    def _odd(self, name: str, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"its {self._key(name)} is {what[:_MOST_QUOTED]}")


def described(said: Said, kind: Any, known: Values) -> dict[str, Any]:
    """Returns what the regular keys and the tensors say, in the words of ``kind``, a class of
    configurations, and what is known besides. Raises UnsupportedModelError for values that cannot
    be."""
    found: dict[str, Any] = {"num_hidden_layers": said.num_layers}
    names = {field.name for field in fields(kind)} | {*kind.attribute_map}
    if not hasattr(kind, "head_dim"):
        # Models ask for it, whether or not their class of configurations has it.
        names.add("head_dim")
    # The last: values that change nothing, of keys that a class need not know; the third is what norms
    # without a setting add.
    for keys, read, usual in (
        (_COUNTS, said.count, None),
        (_NUMBERS, said.number, (0, 1, 1e-5)),
        (_FLAGS, said.value, (True,)),
    ):
        for key, several in keys.items():
            if (value := read(key)) is not None:
                found |= dict.fromkeys(several.split(), value)
                if usual and value not in usual and names.isdisjoint(several.split()):
                    raise UnsupportedModelError(
                        f"its {key} is {value}, of which {kind.model_type} knows nothing"
                    )
            if known.keys().isdisjoint(several.split()) and said.varies(key):
                raise UnsupportedModelError(f"its layers have several values of {key}")
    shown = {name for tensor in said.has_layers_with for name in _SHOWN.get(tensor, "").split()}
    for several in _SHOWN.values():
        found |= {name: name in shown for name in several.split()}
    found["vocab_size"] = found["vocab_size_per_layer_input"] = _vocab_size(said)
    found["tie_word_embeddings"] = "output.weight" not in said.tensors
    found["lm_head_bias"] = "output.bias" in said.tensors
    found["layer_types"] = _layer_types(said)
    if said.count("attention.head_count"):
        found["head_dim"] = said.head_dim
    found["sliding_window"] = found.get("sliding_window") or None  # 0: none
    if (dense := said.count("leading_dense_block_count")) is not None:
        found["mlp_layer_types"] = [
            "dense" if layer < dense else "sparse" for layer in range(said.num_layers)
        ]
    found = {name: each for name, each in found.items() if name in names and each is not None}
    tokens = {
        f"{name}_token_id": said.header.metadata.get(f"tokenizer.ggml.{stored}_token_id")
        for name, stored in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return found | tokens | dict(known)


def _vocab_size(said: Said) -> int | None:
    tokens = said.header.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    num_rows, *_ = said.tensors.get("token_embd.weight", (0,))
    for number, what in (
        (num_tokens, "its tokenizer has"),
        (said.count("vocab_size") or 0, "its configuration says"),
    ):
        if num_rows and number > num_rows:
            raise UnsupportedModelError(f"{what} {number} tokens, and its embedding {num_rows}")
    return num_rows or num_tokens or None


def _layer_types(said: Said) -> list[str] | None:
    states = said.list("attention.recurrent_layers")
    if states is not None:
        return ["linear_attention" if each else "full_attention" for each in states]
    interval = said.count("full_attention_interval")
    if interval:
        return _every(interval, said.num_layers, "linear_attention")
    pattern = said.list("attention.sliding_window_pattern")
    if pattern is not None:
        return ["sliding_attention" if each else "full_attention" for each in pattern]
    period = said.count("attention.sliding_window_pattern")
    return _every(period, said.num_layers, "sliding_attention") if period else None


def _every(period: int, num_layers: int, others: str) -> list[str]:
    return [others if (layer + 1) % period else "full_attention" for layer in range(num_layers)]


def kinds_by_heads(said: Said, attending: str, other: str) -> list[str]:
    """Returns each layer's kind: ``attending`` with keys and values, ``other`` for the rest."""
    heads = said.list("attention.head_count_kv")
    if heads is None:
        heads = [said.needed("attention.head_count_kv")] * said.num_layers
    return [attending if each else other for each in heads]


def latent(said: Said) -> dict[str, Any]:
    """Returns the sizes of attention with latent keys and values: newer files say those of the heads
    apart from those of what is stored."""
    width = said.needed("rope.dimension_count")
    own = "_mla" if said.count("attention.key_length_mla") else ""
    heads = said.needed("attention.head_count")
    return {
        "qk_rope_head_dim": width,
        "qk_nope_head_dim": said.needed(f"attention.key_length{own}") - width,
        "v_head_dim": said.count(f"attention.value_length{own}")
        or said.needed("embedding_length") // heads,
        "num_key_value_heads": heads,
        "head_dim": width,
    }


def sparsity(scales: Sequence[float]) -> list[float]:
    """Returns which share of activations is left out, of how many deviations that is."""
    return [NormalDist().cdf(each) for each in scales]
