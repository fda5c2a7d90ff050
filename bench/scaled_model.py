"""Larger copies of Llamas, and of EAGLE-3 heads for them, that write exactly the same text.

Speculative decoding pays off when one step of the target costs much more than one step of
the draft.  A model small enough to ship is too cheap to show that, so a copy spends the time
and memory of a larger one on the computation of the small one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_FILLER_STD = 0.02
_READS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
"""Matrices whose further outputs meet nothing but zeros."""


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


def scaled_config(config: LlamaConfig, width: int) -> LlamaConfig:
    """The copy's, with as many layers. Raises ValueError for a ``width`` that is no power of four, and
    for a model with biases."""
    if width < 1 or width & (width - 1) or width.bit_length() % 2 == 0:
        raise ValueError("width must be a power of four")
    if config.attention_bias or config.mlp_bias:
        raise ValueError("models with biases are not supported")
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


@dataclass(frozen=True)
class Widening:
    """Pads tensors of a Llama's shape to ``width`` times the hidden and MLP sizes and the number of query
    heads; key-value heads and the head size stay.

    Channels that the small model has read zeros beyond its own features, so that blocks and channels in
    few bits keep their scales where hidden sizes are multiples of the blocks'. Channels that it has not
    are random where nothing reads them, and zero where they would reach the residual stream.
    """

    config: LlamaConfig
    width: int

    def widened(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """``name``: a tensor's of a checkpoint. Tensors that are neither matrices nor norms stay."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part.endswith("norm"):
            return self._norm(weight)
        if weight.ndim != 2:
            return weight
        rows, num_rows = self._places(part, weight.shape[0])
        columns, num_columns = self._features(part, weight.shape[1])
        if part in _READS:
            wide = self._filler.make(num_rows, num_columns).to(weight.dtype)
            wide[rows] = 0
        else:
            wide = torch.zeros(num_rows, num_columns, dtype=weight.dtype)
        wide[rows[:, None], columns] = weight
        return wide

    def further_layer(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The bf16 tensors of a layer that adds nothing, which begin with ``name``."""
        wide = scaled_config(self.config, self.width)
        hidden, ffn = wide.hidden_size, wide.intermediate_size
        q_size, kv_size = (n * wide.head_dim for n in (wide.num_attention_heads, _kv_heads(wide)))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
        for part, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            yield f"{name}self_attn.{part}.weight", self._filler.make(rows, hidden)
        for part in ("gate_proj", "up_proj"):
            yield f"{name}mlp.{part}.weight", self._filler.make(ffn, hidden)
        for part, columns in (("self_attn.o_proj", q_size), ("mlp.down_proj", ffn)):
            yield f"{name}{part}.weight", torch.zeros(hidden, columns, dtype=torch.bfloat16)

    @cached_property
    def _filler(self) -> _Filler:
        wide = scaled_config(self.config, self.width)
        rows = max(wide.intermediate_size, wide.num_attention_heads * wide.head_dim)
        # A head's first layer reads two states; its vocabulary's channels are all real.
        return _Filler(max(2 * rows, self.config.vocab_size) * wide.hidden_size)

    def _norm(self, weight: torch.Tensor) -> torch.Tensor:
        """The same values among `width` times as many dimensions have a root mean square smaller by
        sqrt(width), so the normalised values grow by sqrt(width) and the weight has to shrink by it.
        A power of four keeps that exact in any binary format."""
        wide = torch.ones(weight.numel() * self.width, dtype=weight.dtype)
        wide[: weight.numel()] = weight / self.width**0.5
        return wide

    def _places(self, part: str, size: int) -> tuple[torch.Tensor, int]:
        """Where a matrix's own channels go, and how many there are then."""
        if part == "q_proj":
            return self._queries, size * self.width
        stay = part in ("k_proj", "v_proj", "lm_head", "embed_tokens")
        return torch.arange(size), size if stay else size * self.width

    def _features(self, part: str, size: int) -> tuple[torch.Tensor, int]:
        if part == "o_proj":
            return self._queries, size * self.width
        # A head reads several states one after the other.
        one = size if part == "down_proj" else self.config.hidden_size
        at = torch.arange(size)
        return at // one * one * self.width + at % one, size * self.width

    @cached_property
    def _queries(self) -> torch.Tensor:
        """Where the rows of the real query heads go among the widened query heads.

        Query head i reads key-value head i // group, and widening makes the groups larger, so
        the real heads of each group move to the front of the widened group.
        """
        config, head_dim = self.config, _head_dim(self.config)
        group = config.num_attention_heads // _kv_heads(config)
        heads = torch.arange(config.num_attention_heads)
        moved = heads // group * group * self.width + heads % group
        return (moved[:, None] * head_dim + torch.arange(head_dim)).reshape(-1)


def scaled_tensors(
    config: LlamaConfig, state: Mapping[str, torch.Tensor], width: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint, or of a head for it, one after the other, each widened when it is
    asked for. ``config``: whose the tensors are."""
    widening = Widening(config, width)
    for name, weight in state.items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            yield name, widening.widened(name, weight.detach())


def build_scaled_copy(
    model: LlamaForCausalLM,
    width: int = 4,
    num_layers: int | None = None,
    min_params: int = 400_000_000,
) -> LlamaForCausalLM:
    """Return a bf16 model that computes the same function at a much higher cost.

    Tensors are padded as ``Widening`` says.  Layers that add nothing to the residual stream
    follow the real ones: up to `num_layers` in all or, when that is None, until the model has
    at least `min_params` parameters.  `width` has to be a power of four, and tied embeddings
    stay tied.
    """
    small: LlamaConfig = model.config
    config = scaled_config(small, width)
    if num_layers is None:
        embeddings = small.vocab_size * config.hidden_size * (1 if small.tie_word_embeddings else 2)
        missing = min_params - embeddings - config.hidden_size
        num_layers = max(small.num_hidden_layers, -(-missing // _parameters_per_layer(config)))
    if num_layers < small.num_hidden_layers:
        raise ValueError("num_layers must not be smaller than the model's own")
    config.num_hidden_layers = num_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = [layer_types[0]] * num_layers

    old = {k: v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    state = dict(scaled_tensors(small, old, width))
    widening = Widening(small, width)
    for i in range(small.num_hidden_layers, num_layers):
        state.update(widening.further_layer(f"model.layers.{i}."))

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
