"""Tiny folders of EAGLE-3 and P-EAGLE with random weights, in every form that is published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from engine.drafting.facts import TargetFacts
from engine.drafting.published.eagle3 import read
from engine.drafting.published.eagle3_network import Eagle3Network
from engine.drafting.published.folder import DraftFolder

FACTS = TargetFacts(hidden_size=24, vocab_size=40, num_layers=10, fingerprint="a" * 32)
IDS = "eagle_aux_hidden_state_layer_ids"
P_EAGLE_TOKENS = 4


@dataclass(frozen=True)
class Form:
    """A folder to be written. ``hidden_size``: of the draft. ``prefix``: of its first layer. ``norms``:
    names of norms of states. ``binary``: as ``pytorch_model.bin``. ``more``: keys at the top of its
    configuration; ``layer``: keys of its layers' configuration. ``facts``: of its target."""

    method: str | None = None  # speculators_model_type
    model_type: str = "llama"
    hidden_size: int = 24
    head_dim: int = 6
    num_layers: int = 1
    num_states: int = 3
    draft_vocab: int = 40
    prefix: str = "midlayer."
    norms: tuple[str, ...] = ()
    has_bias: bool = False
    has_fc_bias: bool = False
    owns_embedding: bool = False
    owns_head: bool = True
    binary: bool = False
    more: Mapping[str, Any] | None = None
    layer: Mapping[str, Any] | None = None
    facts: TargetFacts = FACTS

    def but(self, **changes: Any) -> Form:
        return replace(self, **changes)

    def config(self) -> dict[str, Any]:
        layer = {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.facts.vocab_size,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "attention_bias": self.has_bias,
            **(self.layer or {}),
        }
        top = {"draft_vocab_size": self.draft_vocab, **(self.more or {})}
        if self.method is None:
            return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **top}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": self.method,
            "speculators_config": {
                "algorithm": self.method,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": P_EAGLE_TOKENS}
                ],
                "verifier": {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": layer,
            **top,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns random tensors under the names of the form."""
        generator = torch.Generator().manual_seed(5)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.3

        size, states = self.hidden_size, self.num_states * self.facts.hidden_size
        found = {"fc.weight": noise(size, states), "norm.weight": 1 + noise(size)}
        if self.has_fc_bias:
            found["fc.bias"] = noise(size)
        for index in range(self.num_layers):
            prefix = self.prefix if index == 0 else f"layers.{index}."
            found |= {f"{prefix}{name}": each for name, each in self._layer(index, noise).items()}
        for name in self.norms:
            width = states if name == "input_norm" else self.facts.hidden_size
            found[f"{name}.weight"] = 1 + noise(width)
        if self.owns_embedding:
            found["embed_tokens.weight"] = noise(self.facts.vocab_size, size)
        if self.owns_head:
            found["lm_head.weight"] = noise(self.draft_vocab, size)
        if self.draft_vocab < self.facts.vocab_size:
            order = torch.randperm(self.facts.vocab_size, generator=generator)
            ids = order[: self.draft_vocab].sort().values
            found["d2t"] = ids - torch.arange(self.draft_vocab)
            found["t2d"] = torch.zeros(self.facts.vocab_size, dtype=torch.bool).index_fill(
                0, ids, True
            )
        if self.method == "peagle":
            found["mask_hidden"] = noise(1, 1, states)
        return found

    def _layer(self, index: int, noise: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
        size = self.hidden_size
        width = 2 * size if index == 0 else size
        dims = {"q": 4 * self.head_dim, "k": 2 * self.head_dim, "v": 2 * self.head_dim}
        found = {f"self_attn.{each}_proj.weight": noise(dim, width) for each, dim in dims.items()}
        found["self_attn.o_proj.weight"] = noise(size, dims["q"])
        if self.has_bias:
            for each, dim in {**dims, "o": size}.items():
                found[f"self_attn.{each}_proj.bias"] = noise(dim)
        if self.model_type == "qwen3":
            for each in ("q", "k"):
                found[f"self_attn.{each}_norm.weight"] = 1 + noise(self.head_dim)
        for name in ("gate", "up"):
            found[f"mlp.{name}_proj.weight"] = noise(20, size)
        found["mlp.down_proj.weight"] = noise(size, 20)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.weight"] = 1 + noise(size)
        if index == 0:
            found["hidden_norm.weight"] = 1 + noise(size)
        return found


def write_folder(
    path: Path, config: Any, tensors: Mapping[str, torch.Tensor], binary: bool
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if binary:
        torch.save(dict(tensors), path / "pytorch_model.bin")
    else:
        save_file(dict(tensors), path / "model.safetensors")
    return path


def written(path: Path, form: Form) -> Path:
    return write_folder(path, form.config(), form.tensors(), form.binary)


def target_ends() -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and output head of the target, ``[vocab_size, hidden_size]``."""
    generator = torch.Generator().manual_seed(9)
    size = (FACTS.vocab_size, FACTS.hidden_size)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def loaded(path: Path, form: Form) -> Eagle3Network:
    """The network of a folder, bound to the target's ends."""
    network = read(DraftFolder.open(written(path, form)), FACTS)
    embedding, weight = target_ends()
    head = nn.Linear(FACTS.hidden_size, FACTS.vocab_size, bias=False)
    head.weight = nn.Parameter(weight)
    network.bind(nn.Embedding.from_pretrained(embedding), head)
    return network


LINEAR = {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
NEW_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
WIDER = Form(hidden_size=32, head_dim=10, owns_embedding=True)
FORMS = {
    "midlayer": Form(draft_vocab=16),
    "a pickle": Form(prefix="layers.0.", binary=True, owns_embedding=True),
    "several wider layers": WIDER.but(num_layers=3, has_bias=True, draft_vocab=16),
    "norms of three layers": Form(
        norms=("aux_norm_low", "aux_norm_mid", "aux_norm_high"), more={"norm_output": True}
    ),
    "a norm of all": WIDER.but(
        num_states=4,
        norms=("input_norm",),
        has_fc_bias=True,
        layer=LINEAR,
        more={IDS: [0, 3, 6, 10], "norm_before_residual": True, "norm_before_fc": True},
    ),
    "the target's ends": Form(owns_head=False, layer=NEW_ROPE),
    "speculators": Form(
        method="eagle3",
        prefix="layers.0.",
        norms=("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        draft_vocab=16,
        more={"fc_norm": True},
    ),
    "speculators, residual before": Form(
        method="eagle3", prefix="layers.0.", more={"norm_before_residual": False}
    ),
    "speculators, Qwen3": WIDER.but(
        method="eagle3", model_type="qwen3", prefix="layers.0.", num_layers=2, draft_vocab=16
    ),
    "P-EAGLE": WIDER.but(
        method="peagle",
        prefix="layers.0.",
        num_layers=2,
        norms=("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        more={"mask_token_id": 7},
    ),
}
