"""Whole drafts of published heads, read plainly: each row over all that it sees, in one piece and in
plain torch. Satisfy ``worlds.head_runs.Reading``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from worlds.head_runs import Said, Text
from worlds.published_eagle3 import P_EAGLE_TOKENS, Form, target_ends

Tensors = Mapping[str, torch.Tensor]
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    num_heads: int
    num_kv_heads: int
    dim: int
    theta: float
    factor: float = 1.0
    """Positions are divided by it."""


def rms(rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return rows
    return weight * rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt()


def part(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }


def linear(own: Tensors, name: str, rows: torch.Tensor) -> torch.Tensor:
    return rows @ own[f"{name}.weight"].T + own.get(f"{name}.bias", torch.zeros(()))


def turned(rows: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Turns dimensions i and i + dim / 2 of ``[num_rows, heads, dim]`` as one complex number."""
    half = rows.shape[-1] // 2
    speeds = theta ** (-torch.arange(half).double() / half)
    angles = positions.double()[:, None, None] * speeds
    spun = torch.complex(rows[..., :half].double(), rows[..., half:].double())
    spun = spun * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([spun.real, spun.imag], dim=-1).to(rows.dtype)


def heads(
    own: Tensors, name: str, rows: torch.Tensor, positions: torch.Tensor, sizes: Sizes
) -> torch.Tensor:
    """Queries, keys or values: ``[num_rows, heads, dim]``. Values are not turned."""
    flat = linear(own, f"self_attn.{name}_proj", rows)
    found: torch.Tensor = flat.unflatten(1, (-1, sizes.dim))
    if name == "v":
        return found
    normed = rms(found, own.get(f"self_attn.{name}_norm.weight"))
    return turned(normed, positions / sizes.factor, sizes.theta)


def attended(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """``seen``: ``[num_queries, num_keys]`` bool. Returns ``[num_queries, heads * dim]``."""
    share = queries.shape[1] // keys.shape[1]
    found = []
    for head in range(queries.shape[1]):
        scores = queries[:, head] @ keys[:, head // share].T / queries.shape[2] ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(1)
        found.append(weights @ values[:, head // share])
    return torch.cat(found, dim=1)


def mlp(own: Tensors, rows: torch.Tensor) -> torch.Tensor:
    gate = linear(own, "mlp.gate_proj", rows)
    return linear(own, "mlp.down_proj", gate * gate.sigmoid() * linear(own, "mlp.up_proj", rows))


def layer_of(own: Tensors, hidden: torch.Tensor, read: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """A causal layer: ``hidden`` goes on, attention reads ``read``. Rows stand at 0, 1, .."""
    at = torch.arange(len(read))
    seen = at[:, None] >= at
    queries, keys, values = (heads(own, name, read, at, sizes) for name in "qkv")
    hidden = hidden + linear(own, "self_attn.o_proj", attended(queries, keys, values, seen))
    return hidden + mlp(own, rms(hidden, own["post_attention_layernorm.weight"]))


class Chain:
    """The common part of heads that draft token after token: row j is of token j and the states of token
    j - 1. A mask token makes it one that drafts ``num_parallel`` tokens at once."""

    most_depth: int | None = None

    def __init__(self, layers: tuple[int, ...], ids: torch.Tensor) -> None:
        self.layers, self.ids = layers, ids
        self.mask: int | None = None
        self.num_parallel = 1

    @property
    def is_parallel(self) -> bool:
        return self.mask is not None

    def num_positions(self, num_slots: int) -> int:
        return min(self.num_parallel, num_slots)

    @torch.no_grad()
    def after(self, text: Text, path: Text, states: torch.Tensor, num_slots: int) -> Said:
        del num_slots
        tokens, features = list(text[1:]), self.fuse(states)
        for token in path:
            feature = (
                self.mask_feature() if self.is_parallel else self.rows(tokens, features)[0][-1:]
            )
            tokens.append(token if self.mask is None else self.mask)
            features = torch.cat([features, feature])
        return Said(self.rows(tokens, features)[1][-1])

    def mask_feature(self) -> torch.Tensor:
        raise NotImplementedError

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def rows(
        self, tokens: Sequence[int], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the rows make for the next ones, and logits."""
        raise NotImplementedError


class PlainEagle(Chain):
    """EAGLE-3 and P-EAGLE. ``tensors``: by the newest of their names. Where ``norms_residual``, the
    first layer goes on from normed features; where ``norms_output``, the next row reads normed ones."""

    def __init__(
        self,
        tensors: Tensors,
        layers: tuple[int, ...],
        sizes: Sizes,
        ends: tuple[torch.Tensor, torch.Tensor],  # the target's
        norms_residual: bool = False,
        mask: int | None = None,
        num_parallel: int = 1,
        norms_output: bool = False,
    ) -> None:
        self.embedding = tensors.get("embed_tokens.weight", ends[0])
        self.head = tensors.get("lm_head.weight", ends[1])
        super().__init__(layers, torch.arange(len(self.head)) + tensors.get("d2t", 0))
        self.tensors, self.sizes = tensors, sizes
        self.norms_residual, self.norms_output = norms_residual, norms_output
        self.mask, self.num_parallel = mask, num_parallel
        self.depth = 1 + max(
            int(name.split(".")[1]) for name in tensors if name.startswith("layers.")
        )

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.tensors:
            states = rms(states, self.tensors["input_norm.weight"])
        if "fc_norm.0.weight" in self.tensors:
            parts = states.chunk(len(self.layers), dim=1)
            states = torch.cat(
                [rms(each, self.tensors[f"fc_norm.{at}.weight"]) for at, each in enumerate(parts)],
                dim=1,
            )
        return linear(self.tensors, "fc", states)

    def mask_feature(self) -> torch.Tensor:
        return self.fuse(self.tensors["mask_hidden"].reshape(1, -1))

    def rows(
        self, tokens: Sequence[int], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = part(self.tensors, "layers.0.")
        normed = rms(features, first["hidden_norm.weight"])
        both = [rms(self.embedding[list(tokens)], first["input_layernorm.weight"]), normed]
        start = normed if self.norms_residual else features
        hidden = layer_of(first, start, torch.cat(both, dim=1), self.sizes)
        for index in range(1, self.depth):
            own = part(self.tensors, f"layers.{index}.")
            hidden = layer_of(own, hidden, rms(hidden, own["input_layernorm.weight"]), self.sizes)
        normed = rms(hidden, self.tensors["norm.weight"])
        return normed if self.norms_output else hidden, normed @ self.head.T


def plain_eagle(
    form: Form, layers: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> PlainEagle:
    """The reading of what a form writes, in front of ``target_ends()``."""
    config, layer = form.config(), form.layer or {}
    newest = {name: f"fc_norm.{at}" for at, name in enumerate(form.norms) if name != "input_norm"}
    tensors = {}
    for name, each in form.tensors().items():
        if name.startswith(form.prefix):
            name = f"layers.0.{name.removeprefix(form.prefix)}"
        stem = name.removesuffix(".weight")
        name = f"{newest[stem]}.weight" if stem in newest else name
        tensors[name] = each.to(dtype) if each.is_floating_point() else each
    theta = (layer.get("rope_parameters") or layer).get("rope_theta", 10000.0)
    factor = (layer.get("rope_scaling") or {}).get("factor", 1.0)
    embedding, head = target_ends()
    is_parallel = form.method == "peagle"
    return PlainEagle(
        tensors,
        layers,
        Sizes(4, 2, form.head_dim, theta, factor),
        (embedding.to(dtype), head.to(dtype)),
        config.get("norm_before_residual", form.method is not None),
        config["mask_token_id"] if is_parallel else None,
        P_EAGLE_TOKENS if is_parallel else 1,
        config.get("norm_output", False),
    )


class PlainMtp(Chain):
    """MiMo's module: the state beside the token, whose embedding is blank at position 0. ``tensors``: of
    the module, by their names in it."""

    def __init__(
        self, tensors: Tensors, sizes: Sizes, ends: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        super().__init__((-1,), torch.arange(len(ends[1])))
        self.tensors, self.sizes, self.ends = tensors, sizes, ends

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def rows(
        self, tokens: Sequence[int], features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.tensors
        embeddings = self.ends[0][list(tokens)].clone()
        embeddings[0] = 0
        both = [
            rms(features, own["hidden_layernorm.weight"]),
            rms(embeddings, own["token_layernorm.weight"]),
        ]
        joined = linear(own, "input_proj", torch.cat(both, dim=1))
        read = rms(joined, own["input_layernorm.weight"])
        hidden = layer_of(own, joined, read, self.sizes)
        made = rms(hidden, own["final_layernorm.weight"])
        return made, made @ self.ends[1].T


class PlainBlock:
    """DFlash, and DSpark where there is a Markov head. ``sees``: of each layer the window, and whether
    rows of a block see later ones."""

    def __init__(
        self,
        tensors: Tensors,
        layers: tuple[int, ...],
        sizes: Sizes,
        ends: tuple[torch.Tensor, torch.Tensor],  # the target's
        sees: Sequence[tuple[int | None, bool]],
        block_size: int,
        mask: int,
        anchor_predicts: bool = False,
    ) -> None:
        self.embedding = tensors.get("embed_tokens.weight", ends[0])
        self.head = tensors.get("lm_head.weight", ends[1])
        self.ids = torch.arange(len(self.head)) + tensors.get("d2t", 0)
        self.tensors, self.layers, self.sizes, self.sees = tensors, layers, sizes, sees
        self.block_size, self.mask, self.skipped = block_size, mask, int(not anchor_predicts)
        self.is_parallel = "markov_head.markov_w1.weight" not in tensors
        self.most_depth: int | None = block_size - self.skipped

    def num_positions(self, num_slots: int) -> int:
        return min(self.block_size, num_slots) - self.skipped

    @torch.no_grad()
    def after(self, text: Text, path: Text, states: torch.Tensor, num_slots: int) -> Said:
        hidden = self.block(text[-1], states, min(self.block_size, num_slots))
        hidden = hidden[len(path) + self.skipped]
        logits = self.head @ hidden
        if self.is_parallel:
            return Said(logits)
        known = self.tensors["markov_head.markov_w1.weight"][(path or text)[-1]]
        logits = logits + self.tensors["markov_head.markov_w2.weight"] @ known
        if "confidence_head.proj.weight" not in self.tensors:
            return Said(logits)
        size = self.tensors["confidence_head.proj.weight"].shape[1]
        features = torch.cat([hidden, known])[None, :size]
        score = linear(self.tensors, "confidence_head.proj", features)
        return Said(logits, float(score.sigmoid()))

    def block(self, anchor: int, states: torch.Tensor, num_rows: int) -> torch.Tensor:
        """``[num_rows, hidden_size]``, normed: of the anchor and the masks behind it."""
        known = len(states)
        at = torch.arange(known + num_rows)
        fused = rms(linear(self.tensors, "fc", states), self.tensors["hidden_norm.weight"])
        hidden = self.embedding[[anchor, *[self.mask] * (num_rows - 1)]]
        for index, (window, sees_block) in enumerate(self.sees):
            own = part(self.tensors, f"layers.{index}.")
            read = rms(hidden, own["input_layernorm.weight"])
            everything = torch.cat([fused, read])
            queries = heads(own, "q", read, at[known:], self.sizes)
            keys = heads(own, "k", everything, at, self.sizes)
            values = heads(own, "v", everything, at, self.sizes)
            back = at[known:, None] - at
            seen = torch.ones_like(back, dtype=torch.bool) if sees_block else back >= 0
            if window is not None:
                seen = seen & (back < window)
            hidden = hidden + linear(own, "self_attn.o_proj", attended(queries, keys, values, seen))
            hidden = hidden + mlp(own, rms(hidden, own["post_attention_layernorm.weight"]))
        return rms(hidden, self.tensors["norm.weight"])
