"""Configurations that anyone may have written: each is a plan or a refusal in one line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig

from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.checkpoint import load_weights
from engine.weights.formats import read_places
from engine.weights.layer import StoredWeight
from worlds.changed_folders import rename_tensors
from worlds.packed_checkpoints import (
    AWQ,
    GPTQ,
    INT4,
    TOKENS,
    Tensors,
    awq,
    draw,
    fill,
    gptq,
    load,
    make_all,
    packed,
    signed,
    stored,
    write_folder,
)
from worlds.tiny_models import CPU

CODES = draw(16, 64)
BYTES = draw(16, 64, 8)
FLOATS: Tensors = {
    "weight": torch.zeros(16, 64).to(torch.float8_e4m3fn),
    "weight_scale_inv": torch.ones(1, 1),
    "input_scale": torch.ones(()),
}
TENSORS = (awq(CODES), gptq(CODES), gptq(BYTES, True), packed(CODES), signed(BYTES, False), FLOATS)
BASES: tuple[dict[str, Any], ...] = (
    AWQ | {"modules_to_not_convert": ["lm_head"]},
    GPTQ
    | {
        "lm_head": True,
        "checkpoint_format": "gptq",
        "dynamic": {"-:.*a": {}, "+:.*up": {"bits": 8, "group_size": 32}},
    },
    {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "ignored_layers": ["lm_head"],
    },
    {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["re:.*lm_head", "b"],
        "kv_cache_scheme": None,
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": INT4,
                "input_activations": None,
            },
            "group_1": {
                "targets": ["re:.*gate", "up"],
                "format": "int-quantized",
                "weights": INT4 | {"num_bits": 8, "symmetric": True, "strategy": "channel"},
                "input_activations": TOKENS,
            },
            "group_2": {
                "targets": ["down"],
                "format": "float-quantized",
                "weights": INT4
                | {"num_bits": 8, "type": "float", "strategy": "block"}
                | {"block_structure": [128, 128], "symmetric": True, "group_size": None},
                "input_activations": TOKENS,
            },
        },
    },
)
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 16, 32, 33, 64, 128, 2**31]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        ["4", "re:(", "re:a{9999999999}", "int", "float", "channel", "tensor", "gptq_v2"]
    ),
    st.sampled_from(["pack-quantized", "int-quantized", "naive-quantized", "float-quantized"]),
    st.lists(st.one_of(st.integers(-2, 130), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(
        st.text(max_size=4), st.one_of(st.none(), st.integers(), st.text()), max_size=2
    ),
)


def paths(found: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns where every value of an object stands, those inside others too."""
    inside = found.items() if isinstance(found, dict) else ()
    return [place for key, each in inside for place in [(*at, key), *paths(each, (*at, key))]]


@st.composite
def configurations(draw_one: st.DrawFn) -> Any:
    """A configuration of those above with up to three values changed, left out or added."""
    found = copy.deepcopy(draw_one(st.sampled_from(BASES)))
    for _ in range(draw_one(st.integers(0, 3))):
        *outer, last = draw_one(st.sampled_from(paths(found)))
        parent: Any = found
        for key in outer:
            parent = parent[key]
        kind = draw_one(st.sampled_from(["changed", "changed", "left out", "added"]))
        if kind == "left out":
            del parent[last]
        else:
            name = (
                last if kind == "changed" else draw_one(st.sampled_from(["format", "dynamic", "x"]))
            )
            parent[name] = draw_one(_ODD)
        if not paths(found):
            break
    return found


def attempt(call: Callable[[], Any]) -> Any:
    """Returns what the call does, or how it refuses, as a text."""
    try:
        return call()
    except UnsupportedModelError as refused:
        return str(refused)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations(), st.sampled_from(TENSORS), st.sampled_from(["a", "up", "down"]))
def test_every_configuration_is_a_plan_or_refused_in_one_line(
    found: Any, tensors: Tensors, name: str
) -> None:
    config = SimpleNamespace(quantization_config=found)
    plan = attempt(lambda: read_places(config))
    if plan is None:  # a format that is not read here
        assert config.quantization_config is found
    elif isinstance(plan, str):
        assert plan
        assert "\n" not in plan
    else:
        layer = attempt(lambda: fill(plan.place, nn.Linear(64, 16, bias=False), tensors, name))
        if isinstance(layer, str):  # tensors of something else
            assert "\n" not in layer
        elif layer is not None:
            assert isinstance(layer, StoredWeight)
            assert layer.scheme
            assert 4 <= layer.bits <= 8 * 33
            assert layer.dequantized(torch.float32).shape == (16, 64)


def test_what_is_not_changed_is_read() -> None:
    for base in BASES:
        assert read_places(SimpleNamespace(quantization_config=copy.deepcopy(base))) is not None


def test_names_may_lack_the_models_prefix(tmp_path: Path) -> None:
    said = copy.deepcopy(BASES[3]) | {"ignore": []}
    said["config_groups"] = {"all": said["config_groups"]["group_0"]}
    write_folder(tmp_path, said, make_all(packed, head=True))
    rename_tensors(tmp_path, lambda name: name.removeprefix("model."))
    assert len(stored(load(tmp_path))) == 15


def test_names_may_be_those_of_a_larger_model(tmp_path: Path) -> None:
    write_folder(tmp_path, BASES[0], make_all(awq))
    rename_tensors(tmp_path, lambda name: re.sub(r"^model\.", "whole.text.", name))
    config = AutoConfig.from_pretrained(tmp_path)
    names: Any = {"key_mapping": {r"^whole\.text\.": "model."}, "dtype": "auto"}
    places = read_places(config, names["key_mapping"])
    model = load_weights(str(tmp_path), config, quantization_config=places, **names)
    assert len(stored(model)) == 14


def test_experts_in_fp8_are_left_to_transformers() -> None:
    found = copy.deepcopy(BASES[2])
    assert read_places(SimpleNamespace(quantization_config=found, num_experts=None)) is not None
    config = SimpleNamespace(quantization_config=found, num_experts=8)
    assert read_places(config) is None
    # To be floats on every device.
    assert config.quantization_config == found | {"dequantize": True}


def test_a_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, BASES[0], lambda *_: None)
    path = tmp_path / "model.safetensors"
    for size in (len(path.read_bytes()) // 2, 20, 0):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(UnsupportedModelError, match=r"model.safetensors cannot be read"):
            load_model(str(tmp_path), CPU)


def test_models_without_and_formats_of_others_are_left_to_transformers() -> None:
    for found in (None, "awq", {}, {"quant_method": "torchao"}, {"quant_method": ["awq"]}):
        config = SimpleNamespace(quantization_config=found)
        assert read_places(config) is None
        assert config.quantization_config is found
