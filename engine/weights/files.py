"""Safetensors files and those that torch writes, from anywhere: headers, and tensors read from them.

Nothing is unpickled but tensors. All that reads raises UnsupportedModelError, which names the file and
its fault in one line.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.request.errors import UnsupportedModelError
from engine.weights.index import TORCH_TYPES, StoredTensor

_SAFETENSORS = ".safetensors"
_MOST_INDEX_BYTES = 1 << 28
_MOST_ERROR_CHARACTERS = 200
_KINDS = {name: kind for kind, name in TORCH_TYPES.items()}


def weight_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Returns the files that hold a folder's tensors: the first of ``names`` that is there, or those that
    the first one's index names; none where there is neither."""
    for name in names:
        if (folder / name).exists():
            return [folder / name]
        if (folder / f"{name}.index.json").exists():
            return _indexed_files(folder / f"{name}.index.json", Path(name).suffix)
    return []


def _indexed_files(index: Path, suffix: str) -> list[Path]:
    places = read_object(index, _MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UnsupportedModelError(f"{index.name} has no weight_map")
    for name in places.values():
        # Files of the folder itself alone: an index comes from elsewhere.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            raise UnsupportedModelError(
                f"{index.name} names {name!r}, not a {suffix} file beside it"
            )
    return [index.with_name(name) for name in sorted(set(places.values()))]


def read_object(file: Path, most_bytes: int) -> dict[str, Any]:
    """Returns the object of a JSON file."""
    try:
        with file.open("rb") as opened:
            text = opened.read(most_bytes + 1)
        content = json.loads(text) if len(text) <= most_bytes else None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error
    if len(text) > most_bytes:
        raise UnsupportedModelError(f"{file.name} has more than {most_bytes} bytes")
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file.name} does not hold an object")
    return content


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name."""
    if file.suffix != _SAFETENSORS:
        return described(_unpickled(file, "meta"), file)
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(name, each.get_dtype(), tuple(each.get_shape()), file)
                for name, each in found.items()
            }
    except (OSError, RuntimeError, SafetensorError) as error:  # larger than what can be mapped
        raise _damaged(file, error) from error


def described(tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, StoredTensor]:
    """Returns what a header of ``file`` would say of these tensors."""
    found = {}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        found[name] = StoredTensor(name, _KINDS.get(kind, kind), tuple(tensor.shape), file)
    return found


def read_tensors(tensors: Iterable[StoredTensor]) -> dict[str, torch.Tensor]:
    """Returns tensors as they are stored, by the names that their files have."""
    by_file: dict[Path, list[str]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor.name)
    found: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        if file.suffix != _SAFETENSORS:
            every = _unpickled(file, "cpu")
            found |= {name: every[name] for name in names}
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names}
        except (OSError, RuntimeError, SafetensorError) as error:
            raise _damaged(file, error) from error
    return found


def _unpickled(file: Path, device: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that torch wrote; on the CPU they stay in the file until they are
    used."""
    try:
        found = torch.load(file, map_location=device, weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(file, error) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise UnsupportedModelError(f"{file.name} does not hold tensors by name")
    return found


def _damaged(file: Path, error: Exception) -> UnsupportedModelError:
    if isinstance(error, FileNotFoundError):
        return UnsupportedModelError(f"there is no {file.name}")
    fault = " ".join(str(error).split())[:_MOST_ERROR_CHARACTERS]
    return UnsupportedModelError(f"{file.name} cannot be read: {fault}")
