"""AutoAWQ's, AutoGPTQ's and GPTQModel's formats: codes in words of 32 bits, in orders of their own, two
ways to hold zero points, groups in any order, layers with fields of their own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.request.errors import UnsupportedModelError
from engine.weights.files import described
from engine.weights.formats import read_places
from engine.weights.index import TensorIndex
from worlds.changed_folders import stored_tensors
from worlds.packed_checkpoints import (
    AWQ,
    GPTQ,
    Tensors,
    awq,
    checked_places,
    draw,
    fill,
    gptq,
    load,
    make_all,
    stored,
    write_folder,
)


def place_of(found: dict[str, Any]) -> Any:
    plan = read_places(SimpleNamespace(quantization_config=found))
    assert plan is not None
    return plan.place


def layer_of(found: dict[str, Any], tensors: Tensors, linear: nn.Linear, **changes: Any) -> Any:
    return fill(place_of(found | changes), linear, tensors)


# --- AWQ ---


def test_any_channels_of_awq_can_be_asked_for() -> None:
    codes = draw(40, 64)
    layer = layer_of(AWQ, awq(codes), nn.Linear(64, 40))
    assert torch.equal(layer.part(3, 29).dequantized(), codes.weight()[3:29])
    assert layer.part(3, 29).codes.is_contiguous()
    assert layer.bits == 4 + (16 + 4) / 32


def test_a_group_may_be_a_row_and_all_zero_points_one_number() -> None:
    codes = draw(16, 48, group=-1, symmetric=True)
    layer = layer_of(AWQ, awq(codes), nn.Linear(48, 16), group_size=-1, zero_point=False)
    (part,) = layer.parts()
    assert (part.zero, part.zeros, part.span) == (8, None, 48)
    assert layer.scheme == "4 bits, a scale per channel"
    assert layer.bits == 4 + 16 / 48
    assert torch.equal(layer.dequantized(torch.float32), codes.weight())


def test_names_of_older_versions_are_read() -> None:
    codes = draw(16, 64)
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}
    named = {f"up.{key}": each for key, each in awq(codes).items()}
    index = TensorIndex(described(named, Path()))
    assert place_of(old)("up", nn.Linear(64, 16), index) is not None


def test_layers_without_codes_stay(tmp_path: Path) -> None:
    found = AWQ | {"modules_to_not_convert": ["down_proj"]}
    write_folder(
        tmp_path, found, lambda name, m: None if "down" in name else make_all(awq)(name, m)
    )
    model = load(tmp_path)
    assert len(stored(model)) == 12
    assert type(model.get_submodule("model.layers.0.mlp.down_proj")) is nn.Linear


def test_a_bias_that_only_the_file_has_is_added(tmp_path: Path) -> None:
    write_folder(tmp_path, AWQ, make_all(awq))
    name = "model.layers.0.mlp.up_proj"
    with stored_tensors(tmp_path) as tensors:
        tensors[f"{name}.bias"] = torch.randn(96).bfloat16()
    place: Any = stored(load(tmp_path))[name]
    assert torch.equal(place.bias, tensors[f"{name}.bias"])


# --- GPTQ ---


def test_columns_are_sorted_by_group() -> None:
    codes = draw(8, 96, shuffled=True)
    layer = layer_of(GPTQ, gptq(codes), nn.Linear(96, 8), desc_act=True)
    order = layer.order
    assert torch.equal(codes.group_of[order], torch.arange(96) // 32)
    assert all(bool((order[i : i + 32].diff() > 0).all()) for i in (0, 32, 64))
    (part,) = layer.parts()
    assert torch.equal(part.codes.long(), codes.codes[:, order])
    assert torch.equal(part.dequantized(), codes.weight()[:, order])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_a_zero_point_that_all_have_is_one_number(bits: int, v2: bool) -> None:
    codes = draw(40, 64, bits, symmetric=True)
    layout = "gptq_v2" if v2 else "gptq"
    linear = nn.Linear(64, 40)
    layer = layer_of(GPTQ, gptq(codes, v2), linear, bits=bits, checkpoint_format=layout, sym=True)
    (part,) = layer.parts()
    assert (part.zero, part.zeros) == (1 << (bits - 1), None)
    assert layer.scheme == f"{bits} bits, groups of 32"
    assert layer.bits == bits + 0.5
    assert torch.equal(part.dequantized(), codes.weight())


def test_a_zero_point_of_0_borrows_from_its_neighbour() -> None:
    codes = draw(16, 32)
    codes.zeros.copy_(torch.tensor([3, 0, 0, 15, 8, 0, 1, 0] * 2)[:, None])
    layer = layer_of(GPTQ, gptq(codes), nn.Linear(32, 16))
    assert torch.equal(layer.dequantized(torch.float32), codes.weight())


def test_a_short_last_group_a_row_as_a_group_and_no_groups_said() -> None:
    short = draw(8, 80)
    layer = layer_of(GPTQ, gptq(short), nn.Linear(80, 8))
    assert torch.equal(layer.dequantized(torch.float32), short.weight())
    row = draw(8, 80, group=-1)
    tensors = gptq(row)
    del tensors["g_idx"]
    layer = layer_of(GPTQ, tensors, nn.Linear(80, 8), group_size=-1)
    assert (layer.span, layer.order) == (80, None)
    assert torch.equal(layer.part(2, 5).dequantized(), row.weight()[2:5])


def test_a_head_with_codes_of_its_own_is_not_the_embedding(tmp_path: Path) -> None:
    def make(name: str, linear: nn.Linear) -> tuple[Tensors, torch.Tensor] | None:
        if name != "lm_head":
            return None
        codes = draw(linear.out_features, linear.in_features)
        return gptq(codes), codes.weight()

    write_folder(tmp_path, GPTQ, make, tie_word_embeddings=True, vocab_size=96)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    model = load(tmp_path)
    head = stored(model)["lm_head"].dequantized(torch.float32)
    assert torch.equal(head, draw(96, 64).weight())
    assert not torch.equal(head, model.get_input_embeddings().weight.float())


def test_what_is_held_is_what_the_file_has(tmp_path: Path) -> None:
    write_folder(tmp_path, GPTQ, make_all(gptq, head=True, symmetric=True), vocab_size=96)
    model = load(tmp_path)
    assert not [each for place in stored(model).values() for each in place.buffers()]
    held = sum(each.nbytes for each in model.parameters())
    assert held <= (tmp_path / "model.safetensors").stat().st_size


def test_layers_may_have_fields_of_their_own(tmp_path: Path) -> None:
    def make(name: str, linear: nn.Linear) -> tuple[Tensors, torch.Tensor] | None:
        if "o_proj" in name:
            return None
        bits, group = (8, -1) if "layers.1.mlp" in name else (4, 32)
        return make_all(gptq, bits=bits, group=group)(name, linear)

    dynamic = {r"+:.*\.1\.mlp\..*": {"bits": 8, "group_size": -1}, r"-:.*\.o_proj": {}}
    expected = write_folder(tmp_path, GPTQ | {"dynamic": dynamic}, make)
    places = checked_places(load(tmp_path), expected)
    assert len(places) == 12
    assert places["model.layers.1.mlp.up_proj"].scheme == "8 bits, a scale per channel, zero points"


@pytest.mark.parametrize(
    "groups",
    [
        torch.zeros(64),
        torch.arange(64) // 32 + 1,
        torch.arange(64) // 32 - 1,
        torch.arange(64) // 33,
    ],
    ids=["one", "above", "below", "uneven"],
)
def test_groups_of_other_sizes_are_refused(groups: torch.Tensor) -> None:
    tensors = gptq(draw(8, 64)) | {"g_idx": groups.int()}
    with pytest.raises(UnsupportedModelError, match=r"^up\.g_idx does not give each of 2 groups"):
        layer_of(GPTQ, tensors, nn.Linear(64, 8))
