"""AutoGPTQ's and GPTQModel's format: two ways to hold zero points, groups in any order, layers with
fields of their own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.formats.gptq import read
from worlds.changed_folders import stored_tensors
from worlds.packed_checkpoints import (
    GPTQ,
    Tensors,
    checked_places,
    draw,
    fill,
    gptq,
    load,
    make_all,
    stored,
    write_folder,
)
from worlds.tiny_models import CPU


def layer_of(tensors: Tensors, linear: nn.Linear, **changes: Any) -> Any:
    return fill(read(GPTQ | changes), linear, tensors)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_checkpoint_means_the_weights_that_were_packed(
    tmp_path: Path, bits: int, layout: str, shuffled: bool
) -> None:
    lay_out = partial(gptq, v2=layout == "gptq_v2")
    make = make_all(lay_out, head=True, bits=bits, shuffled=shuffled)
    found = GPTQ | {"bits": bits, "checkpoint_format": layout, "desc_act": shuffled}
    expected = write_folder(tmp_path, found | {"lm_head": True}, make, vocab_size=96)
    places = checked_places(load(tmp_path), expected)
    assert len(places) == 15  # the head among them
    assert {each.scheme for each in places.values()} == {f"{bits} bits, groups of 32, zero points"}
    assert {each.order is not None for each in places.values()} == {shuffled}


def test_columns_are_sorted_by_group() -> None:
    codes = draw(8, 96, shuffled=True)
    layer = layer_of(gptq(codes), nn.Linear(96, 8), desc_act=True)
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
    layer = layer_of(gptq(codes, v2), linear, bits=bits, checkpoint_format=layout, sym=True)
    (part,) = layer.parts()
    assert (part.zero, part.zeros) == (1 << (bits - 1), None)
    assert layer.scheme == f"{bits} bits, groups of 32"
    assert layer.bits == bits + 0.5
    assert torch.equal(part.dequantized(), codes.weight())


def test_a_zero_point_of_0_borrows_from_its_neighbour() -> None:
    codes = draw(16, 32)
    codes.zeros.copy_(torch.tensor([3, 0, 0, 15, 8, 0, 1, 0] * 2)[:, None])
    layer = layer_of(gptq(codes), nn.Linear(32, 16))
    assert torch.equal(layer.dequantized(torch.float32), codes.weight())


def test_a_short_last_group_a_row_as_a_group_and_no_groups_said() -> None:
    short = draw(8, 80)
    layer = layer_of(gptq(short), nn.Linear(80, 8))
    assert torch.equal(layer.dequantized(torch.float32), short.weight())
    row = draw(8, 80, group=-1)
    tensors = gptq(row)
    del tensors["g_idx"]
    layer = layer_of(tensors, nn.Linear(80, 8), group_size=-1)
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
    ("changes", "fault"),
    [
        ({"bits": 3}, "has bits=3; served: 4, 8"),
        ({"bits": True}, "has bits=True"),
        ({"bits": None}, "has bits=None"),
        ({"group_size": 16}, "has group_size=16; served: multiples of 32, and -1"),
        ({"checkpoint_format": "marlin"}, "has checkpoint_format='marlin'; served: gptq, gptq_v2"),
        ({"is_marlin_format": True}, "has is_marlin_format=True"),
        ({"pack_dtype": "int64"}, "has pack_dtype='int64'; served: int32"),
        ({"dynamic": [1]}, r"has dynamic=\[1\]; served: an object of patterns"),
        ({"dynamic": {"+:(": {}}}, r"has dynamic with the pattern '\(', which is none"),
        ({"dynamic": {"+:a": {"bits": 2}}}, r"dynamic '\+:a', has bits=2; served: 4, 8"),
    ],
)
def test_variants_that_are_not_served_are_said(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(UnsupportedModelError, match=fault) as refused:
        read(GPTQ | changes)
    assert "\n" not in str(refused.value)


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
        layer_of(tensors, nn.Linear(64, 8))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"
    write_folder(tmp_path, GPTQ | {"bits": 8}, make_all(gptq))
    fault = r"self_attn.q_proj.qweight \[8, 64\] instead of \[16, 64\]"
    with pytest.raises(UnsupportedModelError, match=fault):
        load_model(str(tmp_path), CPU)
    write_folder(tmp_path, GPTQ, make_all(gptq))
    with stored_tensors(tmp_path) as tensors:
        del tensors[f"{name}.qweight"]
    with pytest.raises(UnsupportedModelError, match=rf"missing: {name}\.weight.*not in the conf"):
        load_model(str(tmp_path), CPU)
