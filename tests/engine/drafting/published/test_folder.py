"""Folders of published drafts: what lies where, and each fault in one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import (
    DraftFolder,
    DraftRefusedError,
    Field,
    flag,
    layer_ids,
    of_target,
    only,
    size,
    token_id,
)
from engine.weights.index import TensorIndex

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.long)}
FACTS = TargetFacts(8, 16, 4, "f" * 32)
Write = Callable[[Path], object]


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
def test_tensors_are_known_before_they_are_read(write: Write, tmp_path: Path) -> None:
    write_config(tmp_path, {"hidden_size": 8})
    write(tmp_path)
    folder = DraftFolder.open(tmp_path)
    shapes = {name: each.shape for name, each in folder.tensors.items()}
    assert shapes == {name: tuple(each.shape) for name, each in TENSORS.items()}
    assert folder.config == {"hidden_size": 8}
    found = folder.read(["b.weight"])
    assert list(found) == ["b.weight"]
    for name, tensor in folder.read(TENSORS).items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name])


# --- faults of files ---


class Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was run",))


def said(text: str) -> Write:
    return lambda path: (path / "config.json").write_text(text, encoding="utf-8")


def bytes_in(name: str, content: bytes) -> Write:
    return lambda path: (path / name).write_bytes(content)


def pickled(content: object) -> Write:
    return lambda path: torch.save(content, path / "pytorch_model.bin")


def indexed(places: object, name: str = "model.safetensors") -> Write:
    return lambda path: write_index(path, name, places)


def cut(write: Write) -> Write:
    def cutting(path: Path) -> None:
        write(path)
        (file,) = (each for each in path.iterdir() if each.name != "config.json")
        file.write_bytes(file.read_bytes()[:-10])

    return cutting


def write_twice(path: Path) -> None:
    for file in ("m1.safetensors", "m2.safetensors"):
        save_file(TENSORS, path / file)
    write_index(
        path, "model.safetensors", {"a.weight": "m1.safetensors", "b.weight": "m2.safetensors"}
    )


def write_no_numbers(path: Path) -> None:
    save_file(TENSORS | {"a.weight": torch.tensor([1.0, float("nan")])}, path / "model.safetensors")


# What is said ends with a space where more follows.
FAULTS: list[tuple[Write, str]] = [
    (lambda path: (path / "config.json").unlink(), "there is no config.json"),
    (said("{"), "config.json cannot be read: "),
    (said("[" * 100_000), "config.json cannot be read: "),
    (said("[1]"), "config.json does not hold an object"),
    (said(f'{{"x": "{"y" * (1 << 20)}"}}'), "config.json has more than 1048576 bytes"),
    (lambda _: None, "there is neither model.safetensors nor pytorch_model.bin nor "),
    *(
        (bytes_in(name, content), f"{name} cannot be read: ")
        for name in ("model.safetensors", "pytorch_model.bin")
        for content in (b"", b"no weights", b"\xff" * 64)
    ),
    (cut(write_safetensors), "model.safetensors cannot be read: "),
    (cut(write_bin), "pytorch_model.bin cannot be read: "),
    # What is pickled beside tensors is not run.
    (pickled({"a.weight": Intruder()}), "pytorch_model.bin cannot be read: "),
    (bytes_in("pytorch_model.bin", pickle.dumps(Intruder())), "pytorch_model.bin cannot be read: "),
    *(
        (pickled(content), "pytorch_model.bin does not hold tensors by name")
        for content in ([torch.ones(1)], {"a": 1}, {1: torch.ones(1)})
    ),
    *(
        (indexed(places), "model.safetensors.index.json has no weight_map")
        for places in (None, {}, [1])
    ),
    *(
        (
            indexed({"a.weight": file}),
            f"model.safetensors.index.json names {file!r}, not a .safetensors file beside it",
        )
        for file in ("../model.safetensors", "/tmp/model.safetensors", "x.bin", 3)
    ),
    (indexed({"a.weight": "model-1.safetensors"}), "there is no model-1.safetensors"),
    (indexed({"a.weight": "model-1.bin"}, "pytorch_model.bin"), "there is no model-1.bin"),
    (write_twice, "two files hold a.weight, b.weight"),
    (write_no_numbers, "weights that are not finite: a.weight"),
]


@pytest.mark.parametrize(("write", "says"), FAULTS)
def test_a_folder_that_cannot_be_read_is_refused(write: Write, says: str, tmp_path: Path) -> None:
    write_config(tmp_path, {})
    write(tmp_path)
    message = refusal(tmp_path)
    assert message.startswith(says) if says.endswith(" ") else message == says


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


def test_tensors_are_read_under_the_names_that_a_format_gives_them(tmp_path: Path) -> None:
    opened = DraftFolder.open(written(tmp_path))
    tensors = {name.swapcase(): tensor for name, tensor in opened.tensors.items()}
    folder = DraftFolder(opened.path, {}, TensorIndex(tensors))
    assert torch.equal(folder.tensor("A.WEIGHT", (2, 3)), TENSORS["a.weight"])
    folder.fill(module := Module(), {name: name.swapcase() for name in tensors})
    assert torch.equal(module.b.weight, TENSORS["b.weight"])


MORE = {f"c{index}": torch.ones(1) for index in range(5)}


@pytest.mark.parametrize(
    ("names", "tensors", "says"),
    [
        (NAMES | {name: name for name in MORE}, MORE, "unknown tensors: c0, c1, c2 and 2 more"),
        ({"b.weight": "b.weight"}, {}, "tensors are missing: a.weight"),
        (NAMES | {"c": "a.weight"}, {"c": torch.ones(2, 3)}, "a tensor is there under two names"),
        (NAMES, {"a.weight": torch.ones(3, 2)}, "a.weight [3, 2] instead of [2, 3]"),
        (NAMES, {"a.weight": torch.ones(2, 3, dtype=torch.int8)}, "a.weight holds torch.int8"),
    ],
)
def test_tensors_that_a_module_does_not_fit_are_named(
    names: dict[str, str], tensors: dict[str, torch.Tensor], says: str, tmp_path: Path
) -> None:
    write_config(tmp_path, {})
    save_file(TENSORS | tensors, tmp_path / "model.safetensors")
    with pytest.raises(DraftRefusedError) as refused:
        DraftFolder.open(tmp_path).fill(Module(), names)
    assert str(refused.value) == f"{tmp_path}: {says}"


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

FIELDS = {
    "rows": Field((size,), "part.rows rows old_rows"),
    "most": Field((size, only(3, 4, said="known")), default=None),
    "is_on": Field((flag,), default=True),
    "vocab": Field((size, of_target("vocab_size")), "vocab_size", attrgetter("vocab_size")),
    "layers": Field((layer_ids,), default=None),
    "mask": Field((token_id,), "part.mask", 0),
}


def values(path: Path, config: dict[str, Any], closed: str = "") -> dict[str, Any]:
    settings = DraftFolder.open(written(path, config)).settings
    return settings.values(FIELDS, FACTS, closed)


def test_values_are_found_where_they_may_stand(tmp_path: Path) -> None:
    least = {"most": None, "is_on": True, "vocab": 16, "layers": None, "mask": 0}
    assert values(tmp_path, {"rows": 5, "most": None, "old_rows": 6}) == {"rows": 5, **least}
    config = {"part": {"rows": 2, "mask": 15}, "rows": 5, "most": 4, "is_on": False}
    more = {"layers": [1, -1], "vocab_size": 16}
    assert values(tmp_path, config | more, closed="part") == {
        "rows": 2, "most": 4, "is_on": False, "vocab": 16, "layers": [1, -1], "mask": 15,
    }  # fmt: skip


# By what is said of them.
UNFIT: dict[str, dict[str, Any]] = {
    "rows is None, not a positive whole number": {},
    **{
        f"part.rows is {value!r}, not a positive whole number": {"part": {"rows": value}}
        for value in (0, -1, 1.5, True, "8", 1 << 30)
    },
    "old_rows is 0, not a positive whole number": {"old_rows": 0},
    "most is 2, and only 3 is known": {"rows": 1, "most": 2},
    "most is 'x', not a positive whole number": {"rows": 1, "most": "x"},
    "is_on is 1, neither true nor false": {"rows": 1, "is_on": 1},
    "vocab_size is 15, and this model has 16": {"rows": 1, "vocab_size": 15},
    **{
        f"part.mask is {value!r}, not a token of the target's 16": {
            "rows": 1,
            "part": {"mask": value},
        }
        for value in (-1, 16, "3", True)
    },
    "part is not an object": {"part": "x"},
    "config.json has unknown keys: part.new": {"rows": 1, "part": {"new": 1, "mask": 2}},
}


@pytest.mark.parametrize("says", UNFIT)
def test_values_that_do_not_fit_are_named(says: str, tmp_path: Path) -> None:
    with pytest.raises(DraftRefusedError) as refused:
        values(tmp_path, UNFIT[says], closed="part")
    assert str(refused.value) == f"{tmp_path}: {says}"


@pytest.mark.parametrize("value", [[1.5], "x"])
def test_layers_are_whole_numbers(value: object, tmp_path: Path) -> None:
    with pytest.raises(DraftRefusedError, match="layers is not a list of whole numbers"):
        values(tmp_path, {"rows": 1, "layers": value})
