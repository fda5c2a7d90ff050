"""A folder of a published draft: its configuration and its tensors, read with distrust.

Folders come from anywhere. A configuration is read up to a size, names and shapes of tensors are known
before any of them is read, and nothing is unpickled but tensors. Whatever does not fit is a
``DraftRefusedError``: one line that begins with the folder's path and names the fault.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.drafting.facts import TargetFacts
from engine.weights.checkpoint import not_finite

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_WEIGHTS = (WEIGHTS, "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""The files that are looked for, each alone or by its index, in this order."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "max_position_embeddings",
    "vocab_size",
)
"""Keys of the layers' configuration that are sizes."""
FAULTS = (
    StrictDataclassError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions that transformers raises for values that it cannot use."""
_MOST_CONFIG_BYTES = 1 << 20
_MOST_INDEX_BYTES = 1 << 26
_LARGEST_SIZE = 1 << 24
_MOST_NAMED = 3
_MOST_ERROR_CHARACTERS = 200


class DraftRefusedError(ValueError):
    """The folder cannot be used with this target; the message is one line that says why."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path}: {' '.join(fault.split())}")


@dataclass(frozen=True, slots=True)
class Section:
    """An object of a folder's configuration. A key whose value is null is taken as missing. ``name``: of
    the section, which messages put before its keys; "" for the whole configuration."""

    path: Path
    name: str
    content: Mapping[str, Any]

    def has(self, key: str) -> bool:
        return self.content.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive whole number. Raises DraftRefusedError where it is none, or missing and
        without a ``default``."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value < _LARGEST_SIZE:
            raise self.refused(key, f"is {value!r}, not a positive whole number")
        return value

    def token_id(self, key: str, vocab_size: int) -> int:
        """Returns a token's id. Raises DraftRefusedError where it is not within the vocabulary."""
        value = self.content.get(key)
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.refused(key, f"is {value!r}, not a token of the target's {vocab_size}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Raises DraftRefusedError where the value is neither true nor false."""
        value = self.content.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refused(key, f"is {value!r}, neither true nor false")
        return value

    def layer_ids(self, key: str) -> tuple[int, ...] | None:
        """Returns numbers of layers as they are written, None where they are missing or none is named.
        Raises DraftRefusedError where they are no list of whole numbers."""
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self.refused(key, "is not a list of whole numbers")
        return tuple(value) or None

    def section(self, key: str) -> Section:
        """Returns an object inside this one, empty where it is missing. Raises DraftRefusedError where it
        is no object."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refused(key, "is not an object")
        return Section(self.path, f"{self.name}{key}.", value or {})

    def check_keys(self, known: Collection[str]) -> None:
        """Raises DraftRefusedError naming the keys that are not among ``known``."""
        unknown = sorted(self.content.keys() - set(known))
        if unknown:
            names = _named([f"{self.name}{key}" for key in unknown])
            raise DraftRefusedError(self.path, f"{CONFIG} has unknown keys: {names}")

    def refused(self, key: str, fault: str) -> DraftRefusedError:
        """Returns an error about one key, to be raised."""
        return DraftRefusedError(self.path, f"{self.name}{key} {fault}")


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A folder whose configuration is read and whose tensors are known by name. ``shapes``: of all
    tensors; ``files``: where each of them lies."""

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]

    @classmethod
    def open(cls, path: Path) -> DraftFolder:
        """Reads ``config.json`` and the headers of ``model.safetensors`` or ``pytorch_model.bin``, of the
        files that the index of either names, or of Medusa's. Raises DraftRefusedError with the reason."""
        config = _read_object(path, CONFIG, _MOST_CONFIG_BYTES)
        shapes: dict[str, tuple[int, ...]] = {}
        files: dict[str, Path] = {}
        for file in _weight_files(path):
            found = _read_shapes(path, file)
            if twice := sorted(shapes.keys() & found.keys()):
                raise DraftRefusedError(path, f"two files hold {_named(twice)}")
            shapes |= found
            files |= dict.fromkeys(found, file)
        return cls(path, config, shapes, files)

    @property
    def settings(self) -> Section:
        """The whole configuration, as a section."""
        return Section(self.path, "", self.config)

    def refused(self, fault: str) -> DraftRefusedError:
        """Returns an error about this folder, to be raised."""
        return DraftRefusedError(self.path, fault)

    def check_target(self, facts: TargetFacts) -> None:
        """Raises DraftRefusedError if the folder states that it was trained for other weights of the
        target. Folders without such a statement pass."""
        found = self.config.get("target_fingerprint")
        if found is not None and found != facts.fingerprint:
            raise self.refused(
                "it was trained for other weights of the target (target_fingerprint is "
                f"{found!r}, this model's is {facts.fingerprint!r})"
            )

    def check_ends(self, facts: TargetFacts, hidden_size: int, draft_vocab_size: int) -> None:
        """Raises DraftRefusedError where the target's embedding or output head would have to stand in for
        a missing one and cannot."""
        missing = [name for name in (EMBEDDING, HEAD) if name not in self.shapes]
        if missing and hidden_size != facts.hidden_size:
            raise self.refused(
                f"tensors are missing: {missing[0]} (the target's is for {facts.hidden_size} "
                f"dimensions, not {hidden_size})"
            )
        if HEAD in missing and draft_vocab_size != facts.vocab_size:
            raise self.refused(
                f"tensors are missing: {HEAD} (the target's is for {facts.vocab_size} tokens, not "
                f"{draft_vocab_size})"
            )

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Returns a tensor's shape. Raises DraftRefusedError where there is no such tensor, or it has not
        so many dimensions."""
        shape = self.shapes.get(name)
        if shape is None:
            raise self.refused(f"tensors are missing: {name}")
        if len(shape) != num_dims:
            raise self.refused(f"{name} {list(shape)} does not have {num_dims} dimensions")
        return shape

    def check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        """Raises DraftRefusedError naming both shapes where a tensor has another, or is missing."""
        if self.shape(name, len(wanted)) != wanted:
            raise self.refused(_other_shape(name, self.shapes[name], wanted))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns tensors as they are stored. Raises DraftRefusedError where a file cannot be read, or
        holds values that are not finite."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            tensors |= _read_tensors(self.path, file, wanted)
        if faults := not_finite(tensors.items()):
            raise self.refused(faults[0])
        return tensors

    def fill(self, module: nn.Module, names: Mapping[str, str]) -> None:
        """Gives a module its parameters and buffers, of the types that they are stored in. ``names``: the
        module's name of each tensor of the folder that is its own. Names and shapes are compared before
        anything is read, so that the module may lie on the device "meta".

        Raises DraftRefusedError naming the tensors that the module does not know, that are missing, of
        another shape, whole numbers instead of floats (or the reverse) or not finite.
        """
        own_tensors = module.state_dict()
        wanted = {name: tuple(tensor.shape) for name, tensor in own_tensors.items()}
        if len(set(names.values())) < len(names):
            raise self.refused("a tensor is there under two names")
        if unknown := sorted(name for name, own in names.items() if own not in wanted):
            raise self.refused(f"unknown tensors: {_named(unknown)}")
        if missing := sorted(wanted.keys() - set(names.values())):
            raise self.refused(f"tensors are missing: {_named(missing)}")
        wrong = [
            _other_shape(name, self.shapes[name], wanted[own])
            for name, own in sorted(names.items())
            if self.shapes[name] != wanted[own]
        ]
        if wrong:
            raise self.refused(_named(wrong))
        tensors = self.read(names)
        for name, own in names.items():
            if tensors[name].is_floating_point() != own_tensors[own].is_floating_point():
                raise self.refused(f"{name} holds {tensors[name].dtype}")
        # Copies: what is read may still lie in the file, which anybody may change.
        copies = {own: tensors[name].clone() for name, own in names.items()}
        module.load_state_dict(copies, assign=True)


def _read_object(path: Path, name: str, most_bytes: int) -> dict[str, Any]:
    """Returns the object of a JSON file."""
    try:
        with (path / name).open("rb") as file:
            text = file.read(most_bytes + 1)
        content = json.loads(text) if len(text) <= most_bytes else None
    except FileNotFoundError as error:
        raise DraftRefusedError(path, f"there is no {name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DraftRefusedError(path, f"{name} cannot be read: {_brief(error)}") from error
    if len(text) > most_bytes:
        raise DraftRefusedError(path, f"{name} has more than {most_bytes} bytes")
    if not isinstance(content, dict):
        raise DraftRefusedError(path, f"{name} does not hold an object")
    return content


def _weight_files(path: Path) -> list[Path]:
    """Returns the files that hold a folder's tensors."""
    for name in _WEIGHTS:
        if (path / name).exists():
            return [path / name]
        if (path / f"{name}.index.json").exists():
            return _indexed_files(path, f"{name}.index.json", Path(name).suffix)
    raise DraftRefusedError(path, f"there is neither {' nor '.join(_WEIGHTS)}")


def _indexed_files(path: Path, index: str, suffix: str) -> list[Path]:
    places = _read_object(path, index, _MOST_INDEX_BYTES).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise DraftRefusedError(path, f"{index} has no weight_map")
    for name in places.values():
        # Files of the folder itself alone: an index comes from elsewhere.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(suffix):
            raise DraftRefusedError(path, f"{index} names {name!r}, not a {suffix} file beside it")
    return [path / name for name in sorted(set(places.values()))]


def _read_shapes(path: Path, file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix != ".safetensors":
        found = _unpickled(path, file, "meta")
        return {name: tuple(tensor.shape) for name, tensor in found.items()}
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise _damaged(path, file, error) from error


def _read_tensors(path: Path, file: Path, names: list[str]) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        found = _unpickled(path, file, "cpu")
        return {name: found[name] for name in names}
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise _damaged(path, file, error) from error


def _unpickled(path: Path, file: Path, device: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file that torch wrote; on the CPU they stay in the file until they are
    used."""
    try:
        found = torch.load(file, map_location=device, weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(path, file, error) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in found.items()
    ):
        raise DraftRefusedError(path, f"{file.name} does not hold tensors by name")
    return found


def _damaged(path: Path, file: Path, error: Exception) -> DraftRefusedError:
    if isinstance(error, FileNotFoundError):
        return DraftRefusedError(path, f"there is no {file.name}")
    return DraftRefusedError(path, f"{file.name} cannot be read: {_brief(error)}")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_ERROR_CHARACTERS]


def _other_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{name} {list(found)} instead of {list(wanted)}"


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    listed = ", ".join(names[:_MOST_NAMED])
    return f"{listed} and {more} more" if more > 0 else listed
