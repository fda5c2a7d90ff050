"""Tensors by name, as headers describe them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.weights.index import StoredTensor, TensorIndex, named

FILE = Path("model.safetensors")
TENSORS = {
    name: StoredTensor(name, "BF16", (2, 3), FILE)
    for name in ("layers.0.up.weight", "lm_head.weight", "model.layers.1.up.weight")
}


def test_names_are_found_with_the_prefix_of_the_model_and_without() -> None:
    index = TensorIndex(TENSORS, "model")
    for layer in (0, 1):
        assert index[f"model.layers.{layer}.up.weight"].name.endswith(f"layers.{layer}.up.weight")
        assert index.has_module(f"model.layers.{layer}.up")
    assert "lm_head.weight" in index
    assert index.get("model.lm_head.bias") is None
    assert "layers.1.up.weight" not in index  # the file has the prefix there
    assert not index.has_module("model.layers")
    assert list(index) == list(TENSORS)
    assert len(index) == 3


def test_types_are_torchs_where_it_has_them() -> None:
    kinds = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "Q4_K": None, "F4": None}
    for kind, dtype in kinds.items():
        assert StoredTensor("a", kind, (), FILE).dtype is dtype


@pytest.mark.parametrize(
    ("names", "said"), [("a", "a"), ("abc", "a, b, c"), ("abcde", "a, b, c and 2 more")]
)
def test_the_first_names_are_said(names: str, said: str) -> None:
    assert named([*names]) == said
