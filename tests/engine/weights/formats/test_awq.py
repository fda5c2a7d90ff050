"""AutoAWQ's format: nibbles in an order of their own, groups with zero points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.files import described
from engine.weights.formats.awq import read
from engine.weights.index import TensorIndex
from worlds.changed_folders import stored_tensors
from worlds.packed_checkpoints import (
    AWQ,
    Tensors,
    awq,
    checked_places,
    draw,
    fill,
    load,
    make_all,
    stored,
    write_folder,
)
from worlds.tiny_models import CPU

MAKE = make_all(awq)


def layer_of(tensors: Tensors, linear: nn.Linear, **changes: Any) -> Any:
    return fill(read(AWQ | changes), linear, tensors)


@pytest.mark.parametrize("model_name", ["llama", "qwen2"])
def test_a_checkpoint_means_the_weights_that_were_packed(tmp_path: Path, model_name: str) -> None:
    expected = write_folder(tmp_path, AWQ, MAKE, model_name)
    places = checked_places(load(tmp_path), expected)
    assert len(places) == 14  # the head keeps its type
    assert {each.scheme for each in places.values()} == {"4 bits, groups of 32, zero points"}
    assert {each.bits for each in places.values()} == {4 + (16 + 4) / 32}


def test_any_channels_can_be_asked_for() -> None:
    codes = draw(40, 64)
    layer = layer_of(awq(codes), nn.Linear(64, 40))
    assert torch.equal(layer.part(3, 29).dequantized(), codes.weight()[3:29])
    assert layer.part(3, 29).codes.is_contiguous()


def test_a_group_may_be_a_row_and_all_zero_points_one_number() -> None:
    codes = draw(16, 48, group=-1, symmetric=True)
    layer = layer_of(awq(codes), nn.Linear(48, 16), group_size=-1, zero_point=False)
    (part,) = layer.parts()
    assert (part.zero, part.zeros, part.span) == (8, None, 48)
    assert layer.scheme == "4 bits, a scale per channel"
    assert layer.bits == 4 + 16 / 48
    assert torch.equal(layer.dequantized(torch.float32), codes.weight())


def test_names_of_older_versions_are_read() -> None:
    codes = draw(16, 64)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    named = {f"up.{key}": each for key, each in awq(codes).items()}
    assert read(old)("up", nn.Linear(64, 16), TensorIndex(described(named, Path()))) is not None


def test_layers_without_codes_stay(tmp_path: Path) -> None:
    found = AWQ | {"modules_to_not_convert": ["down_proj"]}
    write_folder(tmp_path, found, lambda name, m: None if "down" in name else MAKE(name, m))
    model = load(tmp_path)
    assert len(stored(model)) == 12
    assert type(model.get_submodule("model.layers.0.mlp.down_proj")) is nn.Linear


def test_a_bias_that_only_the_file_has_is_added(tmp_path: Path) -> None:
    write_folder(tmp_path, AWQ, MAKE)
    name = "model.layers.0.mlp.up_proj"
    with stored_tensors(tmp_path) as tensors:
        tensors[f"{name}.bias"] = torch.randn(96).bfloat16()
    place: Any = stored(load(tmp_path))[name]
    assert torch.equal(place.bias, tensors[f"{name}.bias"])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"bits": 8}, "bits=8; served: 4"),
        ({"bits": "4"}, "bits='4'; served: 4"),
        ({"version": "gemv"}, "version='gemv'; served: gemm"),
        ({"version": "marlin"}, "version='marlin'; served: gemm"),
        ({"group_size": 0}, "group_size=0; served: multiples of 32, and -1"),
        ({"group_size": -128}, "group_size=-128"),
        ({"zero_point": "yes"}, "zero_point='yes'; served: true, false"),
    ],
)
def test_variants_that_are_not_served_are_said(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^quantization_config \(awq\) has {fault}"):
        read(AWQ | changes)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, AWQ | {"group_size": 64}, MAKE)
    fault = r"self_attn.q_proj.qzeros \[2, 8\] instead of \[1, 8\]"
    with pytest.raises(UnsupportedModelError, match=fault):
        load_model(str(tmp_path), CPU)
    with pytest.raises(UnsupportedModelError, match="does not divide into groups of 64 features"):
        layer_of(awq(draw(16, 96)), nn.Linear(96, 16), group_size=64)
    tensors = {key: each for key, each in awq(draw(16, 64)).items() if key != "scales"}
    with pytest.raises(UnsupportedModelError, match=r"missing: up\.scales"):
        layer_of(tensors, nn.Linear(64, 16))
