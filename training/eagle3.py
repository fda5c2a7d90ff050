"""EAGLE-3 and P-EAGLE in training: the served network's own modules, run over whole texts.

After Li et al., EAGLE-3 (https://arxiv.org/abs/2503.01840), and P-EAGLE
(https://arxiv.org/abs/2602.01469). Row i holds the embedding of token i + 1 and the target's states of
token i. From the second step on a row of EAGLE-3 reads the token after that and what the network made of
its row a step before, as it does when it drafts ("training-time test"); one of P-EAGLE reads the mask
token and the mask's feature. Row i of step d thus stands at position i + d; it sees the known rows up to
i and its own earlier steps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from engine.drafting.published.eagle3_network import Eagle3Network, Eagle3Spec
from training.head_losses import Rows

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_FIRST_SHARE = 0.1
"""How large random weights are beside those of the target that a network begins with."""


def llama_config(target: Any, num_layers: int) -> LlamaConfig:
    """Returns the configuration of layers as the ``target``'s, which is a text model's configuration, as
    far as those are like Llama's."""
    num_heads = int(target.num_attention_heads)
    kept = {
        name: value
        for name in ("max_position_embeddings", "rms_norm_eps", "head_dim")
        if (value := getattr(target, name, None)) is not None
    }
    rope = getattr(target, "rope_parameters", None) or {}
    if "rope_theta" in rope:  # one for all layers, not one for each kind of them
        kept["rope_parameters"] = {key: rope[key] for key in rope if key != "partial_rotary_factor"}
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=getattr(target, "intermediate_size", None) or 3 * target.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or num_heads,
        tie_word_embeddings=False,
        **kept,
    )


def make_network(
    config: LlamaConfig,
    layers: tuple[int, ...],
    draft_ids: Tensor | None,
    num_parallel: int = 1,
    mask_token_id: int | None = None,
) -> Eagle3Network:
    """Returns a network with random weights. ``layers``: whose states it reads; ``draft_ids``: the
    target's ids of its vocabulary, None: all. With a mask token it is P-EAGLE's."""
    width = len(layers) * int(config.hidden_size)
    spec = Eagle3Spec(
        config,
        int(config.hidden_size),
        (layers,),
        int(config.vocab_size) if draft_ids is None else len(draft_ids),
        num_parallel=num_parallel,
        mask_token_id=mask_token_id,
        mask_shape=None if mask_token_id is None else (1, 1, width),
    )
    return Eagle3Network(spec, draft_ids)


@torch.no_grad()
def begin_from(
    network: Eagle3Network,
    layers: Sequence[Mapping[str, Tensor]],
    norm: Tensor | None,
    head: Tensor,
) -> None:
    """Gives a network weights of the target to begin with: those of its last ``layers``, of its final
    norm and of its output head ``[draft_vocab_size, hidden_size]``. What is missing or of another shape
    stays random. The first layer reads the newest of the states at first, and hardly the token."""
    network.lm_head.weight.copy_(head)
    if norm is not None:
        network.norm.weight.copy_(norm)
    for index, (own, weights) in enumerate(zip(network.layers, layers, strict=True)):
        _begin_layer(own, weights, is_first=index == 0)
    width = network.fc.out_features
    network.fc.weight.mul_(_FIRST_SHARE)
    network.fc.weight[:, -width:] += torch.eye(width, device=network.fc.weight.device)


def _begin_layer(own: Any, weights: Mapping[str, Tensor], is_first: bool) -> None:
    places = {
        "input_layernorm": (own.hidden_norm if is_first else own.input_layernorm).weight,
        "post_attention_layernorm": own.post_attention_layernorm.weight,
        "o_proj": own.self_attn.o_proj.weight,
        **{name: each.weight for name, each in own.mlp.named_children() if name != "act_fn"},
    }
    for name in _PROJECTIONS:
        weight = getattr(own.self_attn, name).weight
        width = weight.shape[1] // 2 if is_first else 0
        # What it does with the token's embedding, the target's layer does not say.
        places[name] = weight[:, width:]
        if name in weights:
            weight[:, :width].mul_(_FIRST_SHARE)
    for name, place in places.items():
        if name in weights and weights[name].shape == place.shape:
            place.copy_(weights[name])


class Turn(NamedTuple):
    """Rotary factors of rows, ``[num_texts or 1, 1, num_rows, head_dim]``."""

    cos: Tensor
    sin: Tensor

    def of(self, vectors: Tensor) -> Tensor:
        """``vectors``: ``[num_texts, num_heads, num_rows, head_dim]``."""
        low, high = vectors.chunk(2, dim=-1)
        return vectors * self.cos + torch.cat([-high, low], -1) * self.sin


@dataclass(slots=True)
class Past:
    """The keys and values that rows see in a layer: of known rows, ``[num_texts, num_kv_heads, num_rows,
    head_dim]``, and of each row's ``own`` earlier steps."""

    keys: Tensor
    values: Tensor
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class TrainedChain(nn.Module):
    """A network whose settings are those of ``make_network``."""

    def __init__(self, network: Eagle3Network) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        embeddings: Tensor,  # [num_texts, width, hidden_size]: of each row's token, the one after it
        states: Tensor,  # [num_texts, width, num_layers * hidden_size]
        rows: Rows,
        num_steps: int,
    ) -> list[Tensor]:
        """Returns what the output head reads, per step: ``[num_learning, hidden_size]`` of the rows of
        ``rows.of_step``."""
        network = self.network
        device, width = embeddings.device, embeddings.shape[1]
        features = network.fuse(states)
        at = rows.at.to(device)
        bias = _bias(at, width, features.dtype)
        pasts = self._pasts(embeddings, features)
        hidden, found = _picked(features, at), []
        for step in range(num_steps):
            tokens = _picked(embeddings, (at + step).clamp_max(width - 1))
            if step:
                tokens, hidden = self._later(tokens, hidden)
            turn = self._turn(hidden, at + step)
            for index, past in enumerate(pasts):
                read = self._read(index, tokens, hidden)
                if step:
                    past.own.append(self._keys(index, read, turn))
                hidden = self._finish(index, hidden, self._attend(index, read, turn, past, bias))
            learning = rows.of_step(step, width)[0].to(device)
            found.append(_normed(network.norm, hidden.flatten(0, 1).index_select(0, learning)))
        return found

    @abstractmethod
    def _later(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns embeddings and features of rows from the second step on; ``tokens``: embeddings of the
        text's own tokens, ``hidden``: what the network made of the rows a step before."""

    def _pasts(self, embeddings: Tensor, features: Tensor) -> list[Past]:
        """Runs all known rows, for what later rows see of them."""
        turn = self._turn(features, torch.arange(features.shape[1], device=features.device)[None])
        pasts, hidden = [], features
        last = len(self.network.layers) - 1
        for index in range(last + 1):
            read = self._read(index, embeddings, hidden)
            pasts.append(Past(*self._keys(index, read, turn)))
            if index < last:
                query = turn.of(_heads(self._attention(index).q_proj(read), self._head_dim))
                past = pasts[-1]
                mixed = functional.scaled_dot_product_attention(
                    query, past.keys, past.values, is_causal=True, enable_gqa=True
                )
                mixed = mixed.transpose(1, 2).flatten(2)
                hidden = self._finish(index, hidden, self._attention(index).o_proj(mixed))
        return pasts

    @property
    def _head_dim(self) -> int:
        return self.network.shapes[0].key_dim

    def _attention(self, index: int) -> Any:
        layer: Any = self.network.layers[index]
        return layer.self_attn

    def _turn(self, rows: Tensor, positions: Tensor) -> Turn:
        cos, sin = self.network.rotary_emb(rows, positions)
        return Turn(cos[:, None], sin[:, None])

    def _read(self, index: int, embeddings: Tensor, hidden: Tensor) -> Tensor:
        layer: Any = self.network.layers[index]
        if index:
            return _normed(layer.input_layernorm, hidden)
        normed = _normed(layer.hidden_norm, hidden)
        return torch.cat([_normed(layer.input_layernorm, embeddings).to(normed.dtype), normed], -1)

    def _keys(self, index: int, read: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        attention = self._attention(index)
        keys = _heads(attention.k_proj(read), self._head_dim)
        return turn.of(keys), _heads(attention.v_proj(read), self._head_dim)

    def _attend(self, index: int, read: Tensor, turn: Turn, past: Past, bias: Tensor) -> Tensor:
        attention = self._attention(index)
        query = turn.of(_heads(attention.q_proj(read), self._head_dim)) * self._head_dim**-0.5
        # [num_texts, num_kv_heads, heads of each, num_rows, head_dim]
        query = query.unflatten(1, (past.keys.shape[1], -1))
        width = past.keys.shape[2]
        scores = [query @ past.keys[:, :, None].transpose(-1, -2) + bias]
        scores += [(query * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in past.own]
        weights = torch.cat(scores, -1).softmax(-1).to(past.values.dtype)
        mixed = weights[..., :width] @ past.values[:, :, None]
        for number, (_, values) in enumerate(past.own, start=width):
            mixed = mixed + weights[..., number, None] * values[:, :, None]
        attended: Tensor = attention.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))
        return attended

    def _finish(self, index: int, hidden: Tensor, attended: Tensor) -> Tensor:
        layer: Any = self.network.layers[index]
        hidden = hidden + attended
        result: Tensor = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
        return result


class Eagle3Chain(TrainedChain):
    def _later(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, hidden


class PEagleChain(TrainedChain):
    """``mask_embedding``: the target's, of the mask token, ``[hidden_size]``."""

    mask_embedding: Tensor

    def __init__(self, network: Eagle3Network, mask_embedding: Tensor) -> None:
        super().__init__(network)
        self.register_buffer("mask_embedding", mask_embedding, persistent=False)

    def _later(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        masks = self.mask_embedding.to(tokens.dtype), self.network.mask_feature().to(hidden.dtype)
        return masks[0].expand_as(tokens), masks[1].expand_as(hidden)


def _bias(at: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Returns what is added to scores of known rows, ``[num_texts, 1, 1, num_rows, width]``."""
    hides = torch.arange(width, device=at.device) > at[:, :, None]
    bias = torch.zeros(hides.shape, dtype=dtype, device=at.device)
    return bias.masked_fill_(hides, float("-inf"))[:, None, None]


def _normed(norm: Any, rows: Tensor) -> Tensor:
    # In the rows' own type: otherwise autocast keeps torch from its fused operation.
    return functional.rms_norm(
        rows, rows.shape[-1:], norm.weight.to(rows.dtype), norm.variance_epsilon
    )


def _picked(values: Tensor, at: Tensor) -> Tensor:
    """Returns ``values[text, at[text, row]]``."""
    return values.gather(1, at[:, :, None].expand(-1, -1, values.shape[2]))


def _heads(rows: Tensor, head_dim: int) -> Tensor:
    """``[num_texts, num_rows, width]`` to ``[num_texts, num_heads, num_rows, head_dim]``."""
    return torch.unflatten(rows, -1, (-1, head_dim)).transpose(1, 2)
