"""Models that ranks cannot share are refused before a weight is read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from engine.request.errors import UnsupportedModelError
from engine.weights import shards
from engine.weights.shards import local_part, sharding_options, whole, whole_layer
from worlds.tiny_models import tiny_config


@pytest.fixture(autouse=True)
def placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every library passes for installed: refusals here do not depend on that."""
    monkeypatch.setattr(shards, "find_spec", lambda name: name)


def quantised() -> transformers.PreTrainedConfig:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "compressed-tensors"}
    return config


@pytest.mark.parametrize(
    ("config", "num_ranks", "reason"),
    [
        (tiny_config("llama"), 4, "2 heads (num_key_value_heads) cannot be divided among 4 ranks"),
        (tiny_config("qwen3"), 3, "4 heads (num_attention_heads) cannot be divided among 3 ranks"),
        (tiny_config("gpt2"), 2, "transformers has no plan to divide gpt2 among ranks"),
        (quantised(), 2, "the checkpoint's weights are quantised"),
    ],
    ids=["key heads", "heads", "no plan", "quantised"],
)
def test_what_cannot_be_divided_says_why(config: Any, num_ranks: int, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)) as refused:
        sharding_options(config, num_ranks)
    assert "tensor_parallel_size" in str(refused.value)


def test_heads_that_stay_whole_need_not_be_divided() -> None:
    options = sharding_options(tiny_config("phi3"), 3)
    assert options["distributed_config"].tp_size == 3


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedModelError, match=r"accelerate.*\.\[tensor-parallel\]"):
        sharding_options(tiny_config("llama"), 2)


def test_one_process_asks_transformers_for_nothing() -> None:
    assert sharding_options(tiny_config("gpt2"), 1) == {}


def test_what_is_whole_is_itself() -> None:
    layer = torch.nn.Linear(2, 3)
    assert whole_layer(layer) is layer
    assert whole(layer.weight) is local_part(layer.weight) is layer.weight
