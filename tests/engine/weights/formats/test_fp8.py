"""Weights in 8-bit floats: scales by tensor, channel and block, and what is left aside."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.model.loader import load_model
from engine.weights.formats.fp8 import Fp8Linear, read
from worlds.changed_folders import configure, stored_tensors
from worlds.packed_checkpoints import (
    FP8,
    Tensors,
    checked_places,
    fill,
    in_fp8,
    load,
    write_folder,
)
from worlds.packed_checkpoints import draw_fp8 as draw
from worlds.tiny_models import CPU, tiny_model


def layer_of(tensors: Tensors, linear: nn.Linear, **changes: Any) -> Any:
    return fill(read(FP8 | changes), linear, tensors)


def test_ranges_of_inputs_are_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(name: str, linear: nn.Linear) -> tuple[Tensors, torch.Tensor] | None:
        if name == "lm_head":
            return None
        codes, scale, weight = draw(linear, (linear.out_features, linear.in_features))
        tensors = {"weight": codes, "weight_scale": scale.reshape(()).clone()}
        return tensors | {"input_scale": torch.tensor(0.5)}, weight

    found = FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}
    expected = write_folder(tmp_path, found, make)
    with caplog.at_level(logging.INFO, "engine.weights.formats"):
        model = load(tmp_path)
    assert caplog.text.count("ranges that the checkpoint has for inputs of FP8 layers") == 1
    assert not [name for name, _ in model.named_parameters() if "input_scale" in name]
    places = checked_places(model, expected)
    assert {each.scheme for each in places.values()} == {"FP8, a scale per tensor"}


@pytest.mark.parametrize("shape", [(8, 1), (8,)])
def test_channels_have_scales(shape: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 8)
    codes, scales, weight = draw(linear, (1, 24), torch.float8_e5m2)
    layer = layer_of({"weight": codes, "weight_scale": scales.reshape(shape)}, linear)
    assert isinstance(layer, Fp8Linear)
    assert layer.scheme == "FP8, a scale per channel"
    assert layer.bits == 8 + 32 / 24
    assert torch.equal(layer.dequantized(torch.float32), weight)


def test_many_rows_and_blocks_that_end_early() -> None:
    linear = nn.Linear(5, 2055)
    codes, scales, weight = draw(linear, (96, 2))
    tensors = {"weight": codes, "weight_scale_inv": scales}
    layer = layer_of(tensors, linear, weight_block_size=[96, 2])
    assert torch.equal(layer.dequantized(torch.float32), weight)


def test_scales_may_be_powers_of_two_in_a_byte() -> None:
    linear = nn.Linear(64, 8)
    codes, _, _ = draw(linear, (8, 32))
    scales = torch.tensor([[0.25, 2.0]]).to(torch.float8_e8m0fnu)
    tensors = {"weight": codes, "weight_scale_inv": scales}
    layer = layer_of(tensors, linear, weight_block_size=[8, 32], scale_fmt="ue8m0")
    expected = codes.float() * torch.tensor([0.25, 2.0]).repeat_interleave(32)
    assert torch.equal(layer.dequantized(torch.float32), expected)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_experts_are_made_floats_by_transformers(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it finds a device that multiplies in FP8, for which it would keep them as they are."""
    pytest.importorskip("accelerate")  # transformers asks for it
    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path)
    weights = {}
    with stored_tensors(tmp_path) as tensors:
        for name in [each for each in tensors if each.endswith("proj.weight")]:
            linear = nn.Linear(*tensors[name].shape[::-1])
            tensors[name], tensors[f"{name}_scale_inv"], weights[name] = draw(linear, (16, 16))
    configure(tmp_path, quantization_config=FP8 | {"weight_block_size": [16, 16]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model: Any = load_model(str(tmp_path), CPU)
    monkeypatch.undo()
    layer, name = model.model.layers[1], "model.layers.1"
    expert = [weights[f"{name}.mlp.experts.3.{each}_proj.weight"] for each in ("gate", "up")]
    # bf16, but on CPUs that have none of it.
    made = layer.mlp.experts.gate_up_proj[3]
    assert torch.equal(made, torch.cat(expert).to(made.dtype))
    query = weights[f"{name}.self_attn.q_proj.weight"].to(made.dtype)
    assert torch.equal(layer.self_attn.q_proj.weight, query)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_of_experts_becomes_floats_of_one_type(tmp_path: Path, dtype: str) -> None:
    """Experts are dequantized by transformers, which leaves other floats as they are stored."""
    experts = ("w1", "w3", "w2")
    found = FP8 | {"weight_block_size": [32, 48], "modules_to_not_convert": ["lm_head"]}
    write_folder(tmp_path, found, in_fp8((32, 48)), "mixtral", torch.bfloat16, experts)
    model = load_model(str(tmp_path), CPU, dtype)
    assert {str(each.dtype) for each in model.parameters()} == {f"torch.{dtype}"}
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()
