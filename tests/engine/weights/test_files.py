"""Files of weights: their headers and tensors (``published/test_folder.py`` has their faults)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.request.errors import UnsupportedModelError
from engine.weights.files import described, read_header, read_tensors, weight_files

TENSORS = {"a": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "b": torch.ones(4).char()}


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
def test_a_header_describes_what_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if file.suffix == ".bin":
        torch.save(TENSORS, file)
    else:
        save_file(TENSORS, file)
    header = read_header(file)
    assert header == described(TENSORS, file)
    assert {each.name: (each.kind, each.dtype, each.shape) for each in header.values()} == {
        "a": ("BF16", torch.bfloat16, (2, 3)),
        "b": ("I8", torch.int8, (4,)),
    }
    found = read_tensors(header.values())
    assert all(torch.equal(found[key], tensor) for key, tensor in TENSORS.items())
    assert list(read_tensors([header["b"]])) == ["b"]


def test_the_first_file_of_a_folder_counts(tmp_path: Path) -> None:
    names = ("w.safetensors", "w.bin")
    assert weight_files(tmp_path, names) == []
    (tmp_path / "w.bin").touch()
    assert weight_files(tmp_path, names) == [tmp_path / "w.bin"]
    places = '{"a": "w-1.safetensors", "b": "w-1.safetensors", "c": "w-2.safetensors"}'
    index = tmp_path / "w.safetensors.index.json"
    index.write_text(f'{{"weight_map": {places}}}', encoding="utf-8")
    assert weight_files(tmp_path, names) == [tmp_path / f"w-{at}.safetensors" for at in (1, 2)]


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"{}")
    with pytest.raises(UnsupportedModelError, match=r"^w.safetensors cannot be read: "):
        read_header(tmp_path / "w.safetensors")
