"""Folders of weights that are not what their configuration says: refused in one line, never filled up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.drafting.drafts import find_drafts
from engine.drafting.models import prepare_drafts
from engine.model.loader import load_model, load_tokenizer
from engine.request.errors import UnsupportedModelError
from engine.weights.checkpoint import not_finite
from slipstream.cli import main
from slipstream.tools.quantize.written import store_int8
from worlds.changed_folders import WEIGHTS, configure, stored_tensors
from worlds.tiny_models import CPU, tiny_model

LAYER = "model.layers.1"
QUERY = f"{LAYER}.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def cut(folder: Path, num_bytes: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:num_bytes])


def stored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        with stored_tensors(folder) as tensors:
            change(tensors)

    return changed


def spoil(value: float) -> Callable[[Path], None]:
    return stored(lambda tensors: tensors[QUERY][3, 5].fill_(value))


def add(name: str) -> Callable[[Path], None]:
    return stored(lambda tensors: tensors.update({name: torch.ones(4)}))


def drop(name: str) -> Callable[[Path], None]:
    return stored(lambda tensors: tensors.pop(name))


def split_without_a_part(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / WEIGHTS), "model-00001-of-00002.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / WEIGHTS).unlink()


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a_layer_more_than_weights": (
        lambda folder: configure(folder, num_hidden_layers=3),
        "9 tensors that the configuration asks for are missing: model.layers.2.input_layernorm.weight, "
        "model.layers.2.mlp.down_proj.weight, model.layers.2.mlp.gate_proj.weight and 6 more",
    ),
    "a_layer_less_than_weights": (
        lambda folder: configure(folder, num_hidden_layers=1),
        "9 tensors of the decoder are not in the configuration: model.layers.1.input_layernorm.weight",
    ),
    "no_head": (
        drop("lm_head.weight"),
        "1 tensors that the configuration asks for are missing: lm_head",
    ),
    "other_sizes": (
        lambda folder: configure(folder, intermediate_size=128),
        "6 tensors have other shapes than the configuration says: "
        "model.layers.0.mlp.down_proj.weight [64, 96] instead of [64, 128]",
    ),
    "a_bias_that_would_be_dropped": (
        add(f"{LAYER}.self_attn.q_proj.bias"),
        "1 tensors of the decoder are not in the configuration: model.layers.1.self_attn.q_proj.bias",
    ),
    "a_norm_that_would_be_dropped": (
        add(f"{LAYER}.self_attn.q_norm.weight"),
        "of the decoder are not in the configuration: model.layers.1.self_attn.q_norm.weight",
    ),
    "cut_in_the_middle": (lambda folder: cut(folder, 50_000), f"{WEIGHTS} cannot be read"),
    "cut_in_the_header": (lambda folder: cut(folder, 4), f"{WEIGHTS} cannot be read"),
    "empty": (lambda folder: cut(folder, 0), f"{WEIGHTS} cannot be read"),
    "garbage": (
        lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 999),
        f"{WEIGHTS} cannot be read",
    ),
    "a_part_missing": (split_without_a_part, "model-00001-of-00002.safetensors"),
    "an_index_that_is_none": (
        lambda folder: (
            (folder / WEIGHTS).unlink(),
            (folder / f"{WEIGHTS}.index.json").write_text("[]"),
        ),
        "TypeError",
    ),
    "no_number": (spoil(float("nan")), f"weights that are not finite: {QUERY}"),
    "infinite": (spoil(float("inf")), f"weights that are not finite: {QUERY}"),
    "minus_infinite": (spoil(float("-inf")), f"weights that are not finite: {QUERY}"),
    "no_weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
    "no_configuration": (
        lambda folder: (folder / "config.json").unlink(),
        "the folder holds no config.json",
    ),
    "a_configuration_that_is_none": (
        lambda folder: (folder / "config.json").write_text("{"),
        "not a valid JSON file",
    ),
    "sizes_that_are_none": (lambda folder: configure(folder, hidden_size="a"), "hidden_size"),
    "no_heads": (lambda folder: configure(folder, num_attention_heads=0), "ZeroDivisionError"),
    "what_is_not_served": (
        lambda folder: configure(folder, layer_types=["full_attention", "indexed_attention"]),
        "layers of kind indexed_attention",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_server_says_in_one_line_which_folder_and_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil_folder, fault = FAULTS[name]
    spoil_folder(folder)
    assert (
        main(["serve", str(folder), "--no-engine-process", "--log-level", "error", "--port", "0"])
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith(f"slipstream: cannot load '{folder}': ")
    assert said.count("\n") == 1
    assert fault in said


def test_what_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    none = str(tmp_path / "none")
    faults = {
        none: f"cannot load '{none}': .*no such folder",
        __file__: f"cannot load '{__file__}': .*it is a file",
        "a/b": "a/b: it is not in the cache",
    }
    for name, fault in faults.items():
        for load in (lambda name: load_model(name, CPU), load_tokenizer):
            with pytest.raises(OSError, match=fault):
                load(name)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"type": "no such"}}'])
def test_a_broken_tokenizer_is_refused_in_one_line(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises((UnsupportedModelError, OSError)) as refused:
        load_tokenizer(str(folder))
    assert str(refused.value).startswith(f"cannot load '{folder}': ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.self_attn.rotary_emb.inv_freq",
        f"{LAYER}.self_attn.masked_bias",
        f"{LAYER}.self_attn.k_scale",
        f"{LAYER}.self_attn.kv_scale",
        "mtp.layers.0.norm.weight",
        "model.vision_tower.layers.0.norm.weight",
        "value_head.weight",
    ],
)
def test_what_is_no_weight_of_the_decoder_is_no_fault(folder: Path, name: str) -> None:
    add(name)(folder)
    assert name not in load_model(str(folder), CPU).state_dict()


def test_layers_that_predict_further_tokens_are_no_fault_where_the_configuration_names_them(
    folder: Path,
) -> None:
    configure(folder, num_hidden_layers=1, num_nextn_predict_layers=1)
    assert load_model(str(folder), CPU).config.num_hidden_layers == 1
    configure(folder, num_hidden_layers=1, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModelError, match="9 tensors of the decoder"):
        load_model(str(folder), CPU)


def test_a_head_that_is_the_embedding_is_not_missing(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    model = load_model(str(tmp_path), CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_several_faults_are_told_at_once(folder: Path) -> None:
    configure(folder, num_hidden_layers=3, intermediate_size=128)
    with pytest.raises(UnsupportedModelError, match=r"9 tensors.* missing.*; 6 tensors have other"):
        load_model(str(folder), CPU)


@pytest.mark.parametrize("place", [0, 7, 1000, 4098])
def test_one_value_among_many_is_found(place: int) -> None:
    values = torch.linspace(-3, 3, 4099)
    spoilt = values.clone()
    spoilt[place] = float("nan")
    assert not_finite([("empty", values[:0]), ("whole", torch.ones(3, dtype=torch.int8))]) == []
    floats_of_8_bits = (torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, *floats_of_8_bits):
        assert not_finite([("w", values.to(dtype))]) == []
        assert not_finite([("w", spoilt.to(dtype))]) == ["weights that are not finite: w"]
    for dtype in floats_of_8_bits:  # every number that they have, and what is none
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        numbers = [each for each in every if each.float().isfinite()]
        assert not_finite([("w", torch.stack(numbers))]) == []
        assert all(not_finite([("w", each)]) for each in every if not each.float().isfinite())


def test_weights_in_8_bits_are_checked_alike(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.bfloat16)
    store_int8(model)
    model.save_pretrained(tmp_path)
    load_model(str(tmp_path), CPU)
    scale = QUERY.replace(".weight", ".weight_scale")
    with stored_tensors(tmp_path) as tensors:
        tensors[scale] /= 0
    with pytest.raises(UnsupportedModelError, match=f"not finite: {scale}"):
        load_model(str(tmp_path), CPU)
    drop(scale)(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"1 tensors .* are missing: {scale}"):
        load_model(str(tmp_path), CPU)


def test_the_model_that_drafts_is_checked_alike(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)
    config = EngineConfig(model="x", drafters=("small_model",), draft=(str(folder),))
    with pytest.raises(UnsupportedModelError, match=f"'{folder}': 9 tensors"):
        prepare_drafts(tiny_model("llama"), None, config, find_drafts(config))
