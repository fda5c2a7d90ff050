"""compressed-tensors' formats: packed words, bytes and floats, for the layers that groups of targets
name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from engine.model.loader import load_model
from engine.request.errors import UnsupportedModelError
from engine.weights.files import described
from engine.weights.formats.compressed_tensors import read
from engine.weights.formats.fp8 import Fp8Linear
from engine.weights.index import TensorIndex
from engine.weights.patterns import Patterns
from slipstream.tools.quantize.written import written_scheme
from worlds.changed_folders import stored_tensors
from worlds.packed_checkpoints import (
    INT4,
    INT8,
    TOKENS,
    checked_places,
    configuration,
    draw,
    fill,
    load,
    make_all,
    packed,
    signed,
    stored,
    with_inputs,
    write_folder,
)
from worlds.tiny_models import CPU

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def test_scales_keep_their_type_and_layers_of_tokens_have_no_groups(tmp_path: Path) -> None:
    found = with_inputs(configuration("int-quantized", INT8), TOKENS)
    make = make_all(signed, bits=8, group=-1, symmetric=True, scale_dtype=torch.bfloat16)
    write_folder(tmp_path, found, make)
    layer = stored(load(tmp_path))["model.layers.0.mlp.up_proj"]
    assert layer.weight_scale.dtype == torch.bfloat16
    assert layer.bits == 8.25
    (part,) = layer.parts()
    assert part.scales is None
    assert part.zero == 128


def test_layers_that_are_written_are_read() -> None:
    values = torch.randint(-127, 128, (10, 24), dtype=torch.int8)
    scales = torch.rand(10)
    tensors = {"weight": values, "weight_scale": scales[:, None], "bias": torch.randn(10)}
    layer = fill(read(written_scheme([])), nn.Linear(24, 10), tensors)
    assert torch.equal(layer.dequantized(torch.float32), values * scales[:, None])


def test_one_scale_for_a_whole_layer_is_each_channels() -> None:
    tensors = {
        "weight": torch.randint(-128, 128, (6, 40), dtype=torch.int8),
        "weight_scale": torch.tensor([0.25]),
    }
    found = configuration("int-quantized", INT8 | {"strategy": "tensor"})
    layer = fill(read(found), nn.Linear(40, 6), tensors)
    assert torch.equal(layer.dequantized(torch.float32), tensors["weight"] * 0.25)


def test_a_layer_of_one_output_has_a_scale_for_each_group() -> None:
    """As the gate of a shared expert."""
    scales = torch.tensor([[0.5, 0.25]])
    tensors = {"weight": torch.randint(-8, 8, (1, 64), dtype=torch.int8), "weight_scale": scales}
    found = configuration("int-quantized", INT8 | {"strategy": "group", "group_size": 32})
    layer = fill(read(found), nn.Linear(64, 1), tensors)
    expected = tensors["weight"] * scales.repeat_interleave(32, 1)
    assert torch.equal(layer.dequantized(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_do_not_fill_their_last_word_are_read(bits: int) -> None:
    codes = draw(7, 45, bits, 32)  # the last group is short, too
    found = configuration("pack-quantized", INT4 | {"num_bits": bits})
    layer = fill(read(found), nn.Linear(45, 7), packed(codes))
    assert torch.equal(layer.dequantized(torch.float32), codes.weight())
    assert torch.equal(layer.part(3, 5).dequantized(), codes.weight()[3:5])


def test_groups_have_schemes_and_layouts_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = configuration("mixed-precision", INT4, ignore=["re:.*lm_head"])
    found["config_groups"] = {
        "all": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "mlp": {
            "targets": ["re:.*mlp.*"],
            "weights": FP8,
            "input_activations": FP8 | {"strategy": "token", "dynamic": True},
            "format": "float-quantized",
        },
        "one": {
            "targets": ["model.layers.1.mlp.up_proj"],
            "weights": INT8,
            "format": "naive-quantized",
        },
    }

    def make(name: str, linear: nn.Linear) -> Any:
        if name == "model.layers.1.mlp.up_proj":
            return make_all(signed, bits=8, group=-1, symmetric=True)(name, linear)
        if "mlp" not in name:
            return make_all(packed)(name, linear)
        floats = (torch.randn(linear.weight.shape) / 4).to(torch.float8_e4m3fn)
        scale = torch.rand(linear.out_features, 1) + 0.5
        return {"weight": floats, "weight_scale": scale}, floats.float() * scale

    expected = write_folder(tmp_path, found, make)
    with caplog.at_level(logging.INFO, "engine.weights.formats"):
        places = checked_places(load(tmp_path), expected)
    assert len(places) == 14
    assert places["model.layers.1.mlp.up_proj"].scheme == "8 bits, a scale per channel"
    assert places["model.layers.0.self_attn.q_proj"].scheme == "4 bits, groups of 32, zero points"
    floats = places["model.layers.1.mlp.down_proj"]
    assert isinstance(floats, Fp8Linear)
    assert floats.scheme == "FP8, a scale per channel"
    assert "ranges" not in caplog.text


@pytest.mark.parametrize(
    ("targets", "name", "takes"),
    [
        (["re:.*mlp.*", "lm_head"], "a.mlp.up_proj", True),
        (["re:.*mlp.*", "lm_head"], "a.mlp.down_proj", False),
        (["re:.*mlp.*", "lm_head"], "a.self_attn.q_proj", False),
        (["re:.*mlp.*", "lm_head"], "lm_head", True),
        (["Linear"], "anything", True),
    ],
)
def test_patterns_say_which_layers_have_few_bits(
    targets: list[str], name: str, takes: bool
) -> None:
    found = configuration("pack-quantized", INT4, ignore=["re:.*down_proj"])
    found["config_groups"]["group_0"]["targets"] = targets
    tensors = {f"{name}.{key}": each for key, each in packed(draw(8, 64)).items()}
    place = read(found)
    index = TensorIndex(described(tensors, Path()))
    assert (place(name, nn.Linear(64, 8), index) is not None) is takes
    assert place(name, nn.Embedding(8, 64), index) is None


def test_a_pattern_that_matches_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patterns, "seconds_left", 0.05)
    place = read(configuration("pack-quantized", INT4, ignore=[r"re:(\w|.)+(\w|.)+(\w|.)+(?=!$)"]))
    with pytest.raises(ValueError, match="timed out"):
        place("model.layers.10.self_attn.q_proj", nn.Linear(64, 8), TensorIndex({}))


def test_experts_in_one_tensor_are_refused_with_what_they_are(tmp_path: Path) -> None:
    found = configuration("pack-quantized", INT4)
    write_folder(tmp_path, found, make_all(packed), "qwen3_moe", experts=())
    expert = "model.layers.0.mlp.experts.3.up_proj"
    with stored_tensors(tmp_path) as tensors:
        tensors |= {f"{expert}.{key}": each for key, each in packed(draw(32, 64)).items()}
    with pytest.raises(UnsupportedModelError, match=f"{expert}.*: experts in few bits are not"):
        load_model(str(tmp_path), CPU)


def test_scales_for_keys_and_values_are_left_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = configuration("pack-quantized", INT4, kv_cache_scheme=FP8)
    write_folder(tmp_path, found, make_all(packed))
    with stored_tensors(tmp_path) as tensors:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    with caplog.at_level(logging.INFO, "engine.weights.formats"):
        assert len(stored(load(tmp_path))) == 14
    assert "scales for keys and values are left aside" in caplog.text


def test_files_without_headers_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, configuration("pack-quantized", INT4), make_all(packed))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="not from pytorch_model.bin"):
        load_model(str(tmp_path), CPU)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
