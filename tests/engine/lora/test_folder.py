"""Folders that PEFT wrote are served as PEFT computes them; whatever else there is in a folder is refused
in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.lora.folder import CONFIG, WEIGHTS, read_adapter
from engine.model.adapted import AdaptedLayers
from engine.model.layers import LayerShape
from engine.model.runner import ModelRunner
from engine.request.errors import AdapterError
from engine.weights.patterns import Patterns
from worlds.lora_adapters import save_adapter
from worlds.tiny_models import chunk, make_runner, own_logits, random_ids, run_together, tiny_model

TEXT = random_ids(5, 20)
LAYER = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{LAYER}.lora_A.weight"


@cache
def served() -> tuple[ModelRunner, AdaptedLayers]:
    runner = make_runner(tiny_model("llama"), exact=True)
    return runner, runner.serve_adapters()


def shapes() -> Mapping[str, LayerShape]:
    return served()[1].shapes


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "good"
    save_adapter(folder, tiny_model("llama"), seed=1)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    found = tmp_path / "adapter"
    shutil.copytree(good, found)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 8},
        {"rank_pattern": {"q_proj": 6, "layers.1.mlp.up_proj": 2}},
        {"alpha_pattern": {"o_proj": 3.5, r"layers\.0\..*_proj": 16}},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"layers_to_transform": [1]},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_a_folder_is_served_as_peft_merges_it(tmp_path: Path, settings: dict[str, Any]) -> None:
    merged = save_adapter(tmp_path / "it", tiny_model("llama"), seed=2, **settings)
    runner, layers = served()
    rows = chunk(TEXT, 0, 20, range(5))
    rows.adapter = layers.pack(read_adapter(tmp_path / "it", layers.shapes).parts)
    (got,) = run_together(runner, [rows])
    torch.testing.assert_close(got, own_logits(merged, TEXT), rtol=1e-3, atol=1e-3)


def test_a_text_half_finds_the_layers_of_the_whole(folder: Path) -> None:
    rewrite(folder, lambda name: name.replace(".layers.", ".language_model.layers."))
    assert set(read_adapter(folder, shapes()).parts) == set(shapes()) - {"lm_head"}


def test_the_digest_is_of_what_changes_the_model(good: Path, folder: Path) -> None:
    expected = read_adapter(good, shapes()).digest
    configure(folder, lora_dropout=0.3, inference_mode=False)
    assert read_adapter(folder, shapes()).digest == expected
    configure(folder, lora_alpha=9)
    assert read_adapter(folder, shapes()).digest != expected
    configure(folder, lora_alpha=8)
    change(folder, lambda tensors: tensors[KEY][0].add_(1e-3))
    assert read_adapter(folder, shapes()).digest != expected


def rewrite(folder: Path, renamed: Callable[[str], str]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, folder / WEIGHTS)


def change(folder: Path, work: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    work(tensors)
    save_file(tensors, folder / WEIGHTS)


def configure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


Damage = Callable[[Path], object]


def with_tensor(name: str, tensor: torch.Tensor) -> Damage:
    return lambda folder: change(folder, lambda tensors: tensors.update({name: tensor}))


def said(**fields: Any) -> Damage:
    return lambda folder: configure(folder, **fields)


def wrote(text: str) -> Damage:
    return lambda folder: (folder / CONFIG).write_text(text)


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def with_bin(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


ENDLESS = r"(?:(?:\w|[a-z._])+(?:.|[a-z0-9_.])*)+(?=\d$)"
DAMAGES: list[tuple[Damage, str]] = [
    (shutil.rmtree, "there is no such folder"),
    (lambda f: (f / CONFIG).unlink(), f"{CONFIG} cannot be read: No such file"),
    (wrote("{"), f"{CONFIG} is not JSON"),
    (lambda f: (f / CONFIG).write_bytes(b"\xff\xfe{"), f"{CONFIG} is not JSON"),
    (wrote("[" * 100_000), f"{CONFIG} is not JSON"),
    (wrote("[]"), "is not an object"),
    (wrote(" " * (1 << 21)), "has more than 1048576 bytes"),
    (lambda f: (f / WEIGHTS).unlink(), f"it has no {WEIGHTS}"),
    (with_bin, "a .bin is not read, save it anew"),
    (cut, f"{WEIGHTS} cannot be read"),
    (lambda f: save_file({}, f / WEIGHTS), "has no tensors"),
    (said(peft_type="VERA"), "peft_type is 'VERA'"),
    (said(r=0), "r is 0, not a positive number"),
    (said(lora_alpha="8"), "lora_alpha is '8'"),
    (said(lora_alpha=float("inf")), "lora_alpha is inf"),
    (said(r=5), "its rank is 4; adapter_config.json says 5"),
    (said(alpha_pattern={"(": 3}), "alpha_pattern: '(' is no pattern"),
    (said(rank_pattern={ENDLESS: 4}), "regex timed out"),
    (said(rank_pattern={"a" * 2001: 4}), "it has more than 2000 characters"),
    (lambda f: os.truncate(f / WEIGHTS, 50 << 30), f"{WEIGHTS} cannot be read"),
    (said(rank_pattern={"q_proj": "4"}), "rank_pattern does not give positive"),
    (said(use_dora=True), "use_dora is set, which is not served"),
    (said(bias="all"), "bias is 'all'"),
    (said(lora_bias=True), "lora_bias is set"),
    (said(modules_to_save=["lm_head"]), "modules_to_save is"),
    (said(target_parameters=["w"]), "target_parameters is"),
    (said(layer_replication=[[0, 1]]), "layer_replication is set"),
    (said(trainable_token_indices=[3]), "trainable_token_indices is set"),
    (said(init_lora_weights="pissa"), "changes the base model's"),
    (said(use_novelty=True), "use_novelty is set"),
    (lambda f: change(f, lambda tensors: tensors[KEY][1, 2].fill_(torch.nan)), "not finite"),
    (lambda f: change(f, lambda tensors: tensors[KEY][0, 0].fill_(torch.inf)), "not finite"),
    (with_tensor(KEY, torch.ones(4, 64, dtype=torch.int8)), "type torch.int8"),
    (with_tensor(KEY, torch.zeros(4, 65)), "the model's layer takes 64 features and makes 64"),
    (with_tensor(KEY, torch.zeros(4, 64, 1)), "lora_A is (4, 64, 1)"),
    (with_tensor(KEY, torch.zeros(())), "its rank is 0, not 1 to 512"),
    (with_tensor(KEY, torch.zeros(0, 64)), "its rank is 0, not 1 to 512"),
    (with_tensor(KEY, torch.zeros(513, 64)), "its rank is 513, not 1 to 512"),
    (lambda f: change(f, lambda tensors: tensors.pop(KEY)), f"{LAYER}: lora_A is missing"),
    (
        lambda f: rewrite(f, lambda name: name.replace("q_proj", "qkv_proj")),
        "model.layers.0.self_attn.qkv_proj, model.layers.1.self_attn.qkv_proj: not among the layers",
    ),
    (
        with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 97)),
        "is not served: only lora_A and lora_B of linear layers are",
    ),
    (
        with_tensor("base_model.model.lm_head.base_layer.weight", torch.zeros(97, 64)),
        "save with save_embedding_layers=False",
    ),
    (
        with_tensor(f"base_model.model.{LAYER}.lora_magnitude_vector", torch.zeros(64)),
        "is not served",
    ),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGES)
def test_a_damaged_folder_is_one_clear_line(
    folder: Path, damage: Damage, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patterns, "seconds_left", 0.2)
    configure(folder, base_model_name_or_path="some/base")
    damage(folder)
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, shapes())
    message = str(caught.value)
    assert message.startswith(f"{folder}: ")
    assert "\n" not in message
    assert expected in message


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/a" * 2000 + "a" * 300, "File name too long"),
        ("~nobody-here/a", "home directory"),
        ("a\0b", "no such"),
    ],
)
def test_a_path_that_cannot_be_one_is_one_clear_line(path: str, reason: str) -> None:
    with pytest.raises(AdapterError, match=reason) as caught:
        read_adapter(Path(path), shapes())
    assert len(str(caught.value)) < 500


def test_an_adapter_of_another_base_names_it(tmp_path: Path) -> None:
    save_adapter(tmp_path / "it", tiny_model("llama", hidden_size=80), seed=3)
    configure(tmp_path / "it", base_model_name_or_path="other/base")
    with pytest.raises(AdapterError, match="features and makes .*; it was made for other/base"):
        read_adapter(tmp_path / "it", shapes())


def test_one_layer_cannot_have_two_parts(folder: Path) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        for name in (KEY, KEY.replace("lora_A", "lora_B")):
            tensors[name.replace("model.layers", "model.language_model.layers")] = tensors[name] + 0

    change(folder, double)
    with pytest.raises(AdapterError, match="several parts for one layer"):
        read_adapter(folder, shapes())
