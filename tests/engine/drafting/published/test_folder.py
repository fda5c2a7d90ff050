"""Folders of published drafts: what lies where, and each fault in one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import DraftFolder, DraftRefusedError

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.long)}
FACTS = TargetFacts(8, 16, 4, "f" * 32)


def write_config(path: Path, config: object) -> None:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def written(path: Path, config: dict[str, Any] | None = None) -> Path:
    write_config(path, config or {})
    save_file(TENSORS, path / "model.safetensors")
    return path


def write_index(path: Path, name: str, places: object) -> None:
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def refusal(path: Path) -> str:
    """Returns the fault without the path that every message begins with."""
    with pytest.raises(DraftRefusedError) as refused:
        DraftFolder.open(path).read(TENSORS)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


# --- where tensors lie ---


def write_safetensors(path: Path) -> None:
    save_file(TENSORS, path / "model.safetensors")


def write_bin(path: Path) -> None:
    torch.save(TENSORS, path / "pytorch_model.bin")


def write_shards(path: Path) -> None:
    places = {name: f"model-{index}.safetensors" for index, name in enumerate(TENSORS)}
    for name, file in places.items():
        save_file({name: TENSORS[name]}, path / file)
    write_index(path, "model.safetensors", places)


def write_bin_shards(path: Path) -> None:
    places = {name: f"pytorch_model-{index}.bin" for index, name in enumerate(TENSORS)}
    for name, file in places.items():
        torch.save({name: TENSORS[name]}, path / file)
    write_index(path, "pytorch_model.bin", places)


@pytest.mark.parametrize("write", [write_safetensors, write_bin, write_shards, write_bin_shards])
def test_tensors_are_known_before_they_are_read(write: Any, tmp_path: Path) -> None:
    write_config(tmp_path, {"hidden_size": 8})
    write(tmp_path)
    folder = DraftFolder.open(tmp_path)
    assert folder.shapes == {name: tuple(each.shape) for name, each in TENSORS.items()}
    assert folder.config == {"hidden_size": 8}
    found = folder.read(["b.weight"])
    assert list(found) == ["b.weight"]
    for name, tensor in folder.read(TENSORS).items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


# --- faults of files ---


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "there is no config.json"


def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert refusal(tmp_path).startswith("config.json cannot be read: ")


def test_a_configuration_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000, encoding="utf-8")
    assert refusal(tmp_path).startswith("config.json cannot be read: ")


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, [1])
    assert refusal(tmp_path) == "config.json does not hold an object"


def test_a_configuration_of_megabytes_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, {"x": "y" * (1 << 20)})
    assert refusal(tmp_path) == "config.json has more than 1048576 bytes"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    told = refusal(tmp_path)
    assert told.startswith("there is neither model.safetensors nor pytorch_model.bin nor ")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("content", [b"", b"no weights", b"\xff" * 64])
def test_damaged_weights_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    write_config(tmp_path, {})
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path).startswith(f"{name} cannot be read: ")


@pytest.mark.parametrize("write", [write_safetensors, write_bin])
def test_weights_that_end_too_soon_are_refused(write: Any, tmp_path: Path) -> None:
    write_config(tmp_path, {})
    write(tmp_path)
    (file,) = (each for each in tmp_path.iterdir() if each.name != "config.json")
    file.write_bytes(file.read_bytes()[:-10])
    assert refusal(tmp_path).startswith(f"{file.name} cannot be read: ")


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was run",))


def test_what_is_pickled_beside_tensors_is_not_run(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    torch.save({"a.weight": Intruder()}, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path).startswith("pytorch_model.bin cannot be read: ")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Intruder()))
    assert refusal(tmp_path).startswith("pytorch_model.bin cannot be read: ")


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {1: torch.ones(1)}])
def test_a_pickle_of_something_else_is_refused(content: object, tmp_path: Path) -> None:
    write_config(tmp_path, {})
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path) == "pytorch_model.bin does not hold tensors by name"


@pytest.mark.parametrize("places", [None, {}, [1]])
def test_an_index_that_names_nothing_is_refused(places: object, tmp_path: Path) -> None:
    write_config(tmp_path, {})
    write_index(tmp_path, "model.safetensors", places)
    assert refusal(tmp_path) == "model.safetensors.index.json has no weight_map"


@pytest.mark.parametrize("file", ["../model.safetensors", "/tmp/model.safetensors", "x.bin", 3])
def test_an_index_names_files_beside_it_alone(file: object, tmp_path: Path) -> None:
    write_config(tmp_path, {})
    write_index(tmp_path, "model.safetensors", {"a.weight": file})
    assert refusal(tmp_path) == (
        f"model.safetensors.index.json names {file!r}, not a .safetensors file beside it"
    )


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    write_index(tmp_path, "model.safetensors", {"a.weight": "model-1.safetensors"})
    assert refusal(tmp_path) == "there is no model-1.safetensors"
    (tmp_path / "model.safetensors.index.json").unlink()
    write_index(tmp_path, "pytorch_model.bin", {"a.weight": "model-1.bin"})
    assert refusal(tmp_path) == "there is no model-1.bin"


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    for file in ("m1.safetensors", "m2.safetensors"):
        save_file(TENSORS, tmp_path / file)
    places = {"a.weight": "m1.safetensors", "b.weight": "m2.safetensors"}
    write_index(tmp_path, "model.safetensors", places)
    assert refusal(tmp_path) == "two files hold a.weight, b.weight"


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, {})
    save_file(
        TENSORS | {"a.weight": torch.tensor([1.0, float("nan")])}, tmp_path / "model.safetensors"
    )
    assert refusal(tmp_path) == "weights that are not finite: a.weight"


# --- faults of what they hold ---


def test_heads_of_other_weights_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    DraftFolder.open(path).check_target(FACTS)
    write_config(path, {"target_fingerprint": FACTS.fingerprint})
    DraftFolder.open(path).check_target(FACTS)
    write_config(path, {"target_fingerprint": "0" * 32})
    with pytest.raises(DraftRefusedError, match=f"{path}: it was trained for other weights"):
        DraftFolder.open(path).check_target(FACTS)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2, bias=False)
        self.b = nn.Module()
        self.b.register_buffer("weight", torch.zeros(4, dtype=torch.long))


NAMES = {name: name for name in TENSORS}


def test_a_module_is_filled_where_it_has_no_memory_yet(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Module()
    folder = DraftFolder.open(written(tmp_path))
    folder.fill(module, NAMES)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, TENSORS[name])


def fill_refusal(path: Path, names: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    write_config(path, {})
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(DraftRefusedError) as refused:
        DraftFolder.open(path).fill(Module(), names)
    return str(refused.value).removeprefix(f"{path}: ")


def test_tensors_that_a_module_does_not_know_are_named(tmp_path: Path) -> None:
    more = {f"c{index}": torch.ones(1) for index in range(5)}
    assert fill_refusal(tmp_path, NAMES | {name: name for name in more}, TENSORS | more) == (
        "unknown tensors: c0, c1, c2 and 2 more"
    )


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    assert fill_refusal(tmp_path, {"b.weight": "b.weight"}, TENSORS) == (
        "tensors are missing: a.weight"
    )


def test_tensors_under_two_names_are_refused(tmp_path: Path) -> None:
    names = NAMES | {"c": "a.weight"}
    assert fill_refusal(tmp_path, names, TENSORS | {"c": torch.ones(2, 3)}) == (
        "a tensor is there under two names"
    )


def test_tensors_of_other_shapes_are_named_with_both(tmp_path: Path) -> None:
    assert fill_refusal(tmp_path, NAMES, TENSORS | {"a.weight": torch.ones(3, 2)}) == (
        "a.weight [3, 2] instead of [2, 3]"
    )


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    wrong = TENSORS | {"a.weight": torch.ones(2, 3, dtype=torch.int8)}
    assert fill_refusal(tmp_path, NAMES, wrong) == "a.weight holds torch.int8"


def test_shapes_are_asked_for_by_name(tmp_path: Path) -> None:
    folder = DraftFolder.open(written(tmp_path))
    assert folder.shape("a.weight", 2) == (2, 3)
    folder.check_shape("a.weight", (2, 3))
    with pytest.raises(DraftRefusedError, match=r"tensors are missing: c$"):
        folder.shape("c", 1)
    with pytest.raises(DraftRefusedError, match=r"b.weight \[4\] does not have 2 dimensions"):
        folder.shape("b.weight", 2)
    with pytest.raises(DraftRefusedError, match=r"a.weight \[2, 3\] instead of \[3, 3\]"):
        folder.check_shape("a.weight", (3, 3))


# --- values of a configuration ---


def test_values_of_sections_are_read_by_their_kind(tmp_path: Path) -> None:
    config = {"size": 3, "flag": True, "none": None, "ids": [1, -1], "part": {"of": 2}, "empty": []}
    settings = DraftFolder.open(written(tmp_path, config)).settings
    assert settings.size("size") == 3
    assert settings.size("none", 5) == settings.size("missing", 5) == 5
    assert settings.flag("flag", False)
    assert settings.flag("none", True)
    assert settings.layer_ids("ids") == (1, -1)
    assert settings.layer_ids("empty") is settings.layer_ids("none") is None
    assert settings.token_id("size", 4) == 3
    assert settings.section("part").size("of") == 2
    assert settings.section("missing").content == {}
    settings.section("part").check_keys(["of"])


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", 1 << 30, None])
def test_sizes_are_positive_whole_numbers(value: object, tmp_path: Path) -> None:
    settings = DraftFolder.open(written(tmp_path, {"part": {"size": value}})).settings
    with pytest.raises(DraftRefusedError) as refused:
        settings.section("part").size("size")
    assert str(refused.value) == (
        f"{tmp_path}: part.size is {value!r}, not a positive whole number"
    )


@pytest.mark.parametrize("value", [-1, 16, "3", None, True])
def test_token_ids_lie_within_the_vocabulary(value: object, tmp_path: Path) -> None:
    settings = DraftFolder.open(written(tmp_path, {"mask": value})).settings
    with pytest.raises(DraftRefusedError, match="mask is .*, not a token of the target's 16"):
        settings.token_id("mask", 16)


def test_flags_layers_and_sections_are_what_they_are_called(tmp_path: Path) -> None:
    settings = DraftFolder.open(written(tmp_path, {"a": 1, "b": [1.5], "c": "x"})).settings
    with pytest.raises(DraftRefusedError, match="a is 1, neither true nor false"):
        settings.flag("a", False)
    for key in ("b", "c"):
        with pytest.raises(DraftRefusedError, match=f"{key} is not a list of whole numbers"):
            settings.layer_ids(key)
    with pytest.raises(DraftRefusedError, match="c is not an object"):
        settings.section("c")


def test_unknown_keys_are_named_with_their_section(tmp_path: Path) -> None:
    settings = DraftFolder.open(written(tmp_path, {"part": {"new": 1, "old": 2}})).settings
    with pytest.raises(DraftRefusedError, match=r"config.json has unknown keys: part\.new$"):
        settings.section("part").check_keys(["old"])
