"""Rotary embeddings in one pass: what they replace is seen in what it does, for one model at a time."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama import modeling_llama

from engine.kernels import rotary as kernel
from engine.model.rotary import _rotated, fuse_rotary
from worlds.tiny_models import own_logits, random_ids, tiny_model

IDS = random_ids(1, 28)


def rotations(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "forward" in vars(module)]


def counting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call in a rotary embedding's place, whether the kernel took it."""
    calls: list[bool] = []
    decide = kernel.can_rotate

    def noted(*parts: torch.Tensor) -> bool:
        calls.append(decide(*parts))
        return calls[-1]

    monkeypatch.setattr(kernel, "can_rotate", noted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"head_dim": 32}),
        ("llama", {"head_dim": 64, "num_key_value_heads": 1}),
        ("qwen2", {"head_dim": 32}),
        ("qwen3", {"head_dim": 32}),
        ("mistral", {"head_dim": 64}),
        ("gemma2", {"head_dim": 32}),
        ("phi3", {"head_dim": 64, "hidden_size": 256}),
        ("qwen3_moe", {"head_dim": 32}),
    ],
)
def test_logits_keep_their_bits(
    name: str, changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name, dtype, **changes)
    expected = own_logits(model, IDS)
    num_layers = model.config.num_hidden_layers
    assert fuse_rotary(model) == num_layers
    calls = counting(monkeypatch)
    assert torch.equal(own_logits(model, IDS), expected)
    assert calls == [True] * num_layers


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"head_dim": 16}),
        ("phi3", {"head_dim": 64, "hidden_size": 256, "partial_rotary_factor": 0.5}),
        ("deepseek_v3", {}),
    ],
)
def test_what_the_kernel_does_not_take_is_still_the_functions(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name, **changes)
    expected = own_logits(model, IDS)
    assert fuse_rotary(model) == 2
    calls = counting(monkeypatch)
    assert torch.equal(own_logits(model, IDS), expected)
    assert not any(calls)


def test_so_is_what_is_said_of_other_dimensions_batches_and_types() -> None:
    asked = []

    def function(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        asked.append(q)
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    rotation = partial(_rotated, function)
    query, key = torch.randn(1, 4, 6, 64), torch.randn(1, 2, 6, 64)
    cos, sin = torch.randn(2, 1, 6, 64)
    rotation(query, key, cos, sin)
    assert not asked
    given: list[Any] = [
        [(query, key, cos, sin), {"unsqueeze_dim": 1}],
        [(query, key, cos, sin, 1), {}],
        [(query.transpose(1, 2), key.transpose(1, 2), cos, sin), {"unsqueeze_dim": 2}],
        [(query, key), {"cos": cos, "sin": sin}],
        [(query.double(), key.double(), cos.double(), sin.double()), {}],
        [tuple(each.expand(2, *each.shape[1:]) for each in (query, key, cos, sin)), {}],
        [(query, key.expand(2, -1, -1, -1), cos, sin), {}],
        [(query[..., :48], key[..., :48], cos[..., :48], sin[..., :48]), {}],
    ]
    for positional, named in given:
        expected = modeling_llama.apply_rotary_pos_emb(*positional, **named)
        got = rotation(*positional, **named)
        assert asked.pop() is positional[0]
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """As transformers', except that keys turn the other way."""
    mine = modeling_llama.apply_rotary_pos_emb
    return mine(q, k, cos, sin)[0], mine(q, k, cos, -sin)[1]


class TurnsBack(nn.Module):
    def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin)


class Twists(modeling_llama.LlamaAttention):
    """With a forward of its own already."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, 0)
        self.forward = super().forward


def test_other_functions_and_modules_are_left_alone() -> None:
    """Also one that rotates interleaved pairs."""
    assert fuse_rotary(TurnsBack()) == 0
    assert fuse_rotary(nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(32))) == 0
    assert fuse_rotary(Twists(hf.LlamaConfig(hidden_size=64, num_attention_heads=2))) == 0
    config = hf.HeliumConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, pad_token_id=0,
    )  # fmt: skip
    assert fuse_rotary(hf.AutoModelForCausalLM.from_config(config)) == 0


def test_models_of_the_same_class_stay_as_they_are_and_copies_are_their_own() -> None:
    forward = modeling_llama.LlamaAttention.forward
    model, neighbour = tiny_model("llama", head_dim=32), tiny_model("llama", head_dim=32)
    assert fuse_rotary(model) == 2
    assert fuse_rotary(model) == 0  # nothing is left
    assert modeling_llama.LlamaAttention.forward is forward
    assert forward.__globals__["apply_rotary_pos_emb"] is modeling_llama.apply_rotary_pos_emb
    assert not rotations(neighbour)
    assert len(rotations(model)) == 2
    expected = own_logits(model, IDS)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(own_logits(twin, IDS), expected)
