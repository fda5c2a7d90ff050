"""The bundled demonstration models, and a larger copy that writes exactly the same text.

Speculative decoding pays off when one step of the target costs much more than one step of
the draft.  A model small enough to ship in a repository is too cheap to show that, so
`build_scaled_copy` spends the time and memory of a model of several hundred million
parameters on the computation of a few million.
"""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_FILLER_STD = 0.02


class _Filler:
    """Hands out random bf16 tensors cheaply, cut from one pool at shifting offsets.

    Drawing every weight afresh would take most of the build time, and the values only have
    to be ordinary non-zero numbers.
    """

    def __init__(self, largest: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pool = torch.randn(largest + 8191, generator=generator) * _FILLER_STD
        self._pool = pool.to(torch.bfloat16)
        self._turn = 0

    def make(self, rows: int, columns: int) -> torch.Tensor:
        """Return a fresh random matrix."""
        self._turn += 1
        start = self._turn * 1009 % 8191
        return self._pool[start : start + rows * columns].clone().view(rows, columns)


def _kv_heads(config: LlamaConfig) -> int:
    return int(config.num_key_value_heads or config.num_attention_heads)


def _head_dim(config: LlamaConfig) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)


def _scaled_config(config: LlamaConfig, width: int) -> LlamaConfig:
    wide = copy.deepcopy(config)
    wide.head_dim = _head_dim(config)
    wide.hidden_size = config.hidden_size * width
    wide.intermediate_size = config.intermediate_size * width
    wide.num_attention_heads = config.num_attention_heads * width
    wide.rms_norm_eps = config.rms_norm_eps / width
    return wide


def _parameters_per_layer(config: LlamaConfig) -> int:
    heads = 2 * config.num_attention_heads + 2 * _kv_heads(config)
    attention = config.hidden_size * _head_dim(config) * heads
    mlp = 3 * config.hidden_size * config.intermediate_size
    return int(attention + mlp + 2 * config.hidden_size)


def _query_rows(config: LlamaConfig, width: int) -> torch.Tensor:
    """Return where the rows of the real query heads go among the widened query heads.

    Query head i reads key-value head i // group, and widening makes the groups larger, so
    the real heads of each group move to the front of the widened group.
    """
    group = config.num_attention_heads // _kv_heads(config)
    heads = torch.arange(config.num_attention_heads)
    moved = heads // group * group * width + heads % group
    return (moved[:, None] * _head_dim(config) + torch.arange(_head_dim(config))).reshape(-1)


def _norm(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Widen an RMSNorm weight.

    The same values among `width` times as many dimensions have a root mean square smaller
    by sqrt(width), so the normalised values grow by sqrt(width) and the weight has to
    shrink by it.  A power of four keeps that exact in any binary format.
    """
    wide = torch.ones(weight.numel() * width, dtype=torch.bfloat16)
    wide[: weight.numel()] = weight / width**0.5
    return wide


def _corner(rows: int, columns: int, block: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(rows, columns, dtype=torch.bfloat16)
    wide[: block.shape[0], : block.shape[1]] = block
    return wide


def build_scaled_copy(
    model: LlamaForCausalLM,
    width: int = 4,
    num_layers: int | None = None,
    min_params: int = 400_000_000,
) -> LlamaForCausalLM:
    """Return a bf16 model that computes the same function at a much higher cost.

    Hidden and MLP sizes and the number of query heads grow `width` times; key-value heads
    and the head size stay, so the cache per layer does too.  Layers that add nothing to the
    residual stream follow the real ones: up to `num_layers` in all or, when that is None,
    until the model has at least `min_params` parameters.

    Weights that must not let anything leak into the padding, or that would add something,
    are zero; every weight that only ever meets zeros or feeds zeros is random.  `width` has
    to be a power of four, and tied embeddings stay tied.
    """
    if width < 1 or width & (width - 1) or width.bit_length() % 2 == 0:
        raise ValueError("width must be a power of four")
    small: LlamaConfig = model.config
    if small.attention_bias or small.mlp_bias:
        raise ValueError("models with biases are not supported")
    config = _scaled_config(small, width)
    per_layer = _parameters_per_layer(config)
    embeddings = small.vocab_size * config.hidden_size * (1 if small.tie_word_embeddings else 2)
    if num_layers is None:
        missing = min_params - embeddings - config.hidden_size
        num_layers = max(small.num_hidden_layers, -(-missing // per_layer))
    if num_layers < small.num_hidden_layers:
        raise ValueError("num_layers must not be smaller than the model's own")
    config.num_hidden_layers = num_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = [layer_types[0]] * num_layers

    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size = config.num_attention_heads * _head_dim(config)
    kv_size = _kv_heads(config) * _head_dim(config)
    filler = _Filler(max(ffn, q_size, small.vocab_size) * hidden)
    query_rows = _query_rows(small, width)
    old = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    state: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": _corner(
            small.vocab_size, hidden, old["model.embed_tokens.weight"]
        ),
        "model.norm.weight": _norm(old["model.norm.weight"], width),
    }
    if not small.tie_word_embeddings:
        head = filler.make(small.vocab_size, hidden)
        head[:, : small.hidden_size] = old["lm_head.weight"]
        state["lm_head.weight"] = head

    def fill_inputs(key: str, rows: int, real_rows: torch.Tensor) -> torch.Tensor:
        """Widen a matrix that reads the residual stream; its padding may hold anything."""
        wide = filler.make(rows, hidden)
        wide[real_rows, : small.hidden_size] = old[key]
        return wide

    for i in range(num_layers):
        at = f"model.layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        if i < small.num_hidden_layers:
            o_proj = torch.zeros(hidden, q_size, dtype=torch.bfloat16)
            o_proj[: small.hidden_size, query_rows] = old[attn + "o_proj.weight"]
            state |= {
                at + "input_layernorm.weight": _norm(old[at + "input_layernorm.weight"], width),
                at + "post_attention_layernorm.weight": _norm(
                    old[at + "post_attention_layernorm.weight"], width
                ),
                attn + "q_proj.weight": fill_inputs(attn + "q_proj.weight", q_size, query_rows),
                attn + "o_proj.weight": o_proj,
                mlp + "down_proj.weight": _corner(hidden, ffn, old[mlp + "down_proj.weight"]),
            }
            state |= {
                key: fill_inputs(key, rows, torch.arange(old[key].shape[0]))
                for key, rows in (
                    (attn + "k_proj.weight", kv_size),
                    (attn + "v_proj.weight", kv_size),
                    (mlp + "gate_proj.weight", ffn),
                    (mlp + "up_proj.weight", ffn),
                )
            }
        else:
            state |= {
                at + "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
                at + "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
                attn + "q_proj.weight": filler.make(q_size, hidden),
                attn + "k_proj.weight": filler.make(kv_size, hidden),
                attn + "v_proj.weight": filler.make(kv_size, hidden),
                attn + "o_proj.weight": torch.zeros(hidden, q_size, dtype=torch.bfloat16),
                mlp + "gate_proj.weight": filler.make(ffn, hidden),
                mlp + "up_proj.weight": filler.make(ffn, hidden),
                mlp + "down_proj.weight": torch.zeros(hidden, ffn, dtype=torch.bfloat16),
            }

    # Built without storage first: initialising 400 M weights only to replace them is slow.
    with torch.device("meta"):
        scaled = LlamaForCausalLM(config)
    scaled.load_state_dict(state, strict=False, assign=True)
    if small.tie_word_embeddings:
        scaled.lm_head.weight = scaled.model.embed_tokens.weight
    scaled.model.rotary_emb = LlamaRotaryEmbedding(config)
    scaled.generation_config = copy.deepcopy(model.generation_config)
    if any(t.is_meta for t in (*scaled.parameters(), *scaled.buffers())):
        raise RuntimeError("a weight of the scaled model was left unset")
    scaled.requires_grad_(False)
    scaled.train(False)
    return scaled
