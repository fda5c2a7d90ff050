"""A folder of a published draft: its configuration and its tensors, read with distrust.

Folders come from anywhere. A configuration is read up to a size, names and shapes of tensors are known
before any of them is read, and nothing is unpickled but tensors. Whatever does not fit is a
``DraftRefusedError``: one line that begins with the folder's path and names the fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from engine.drafting.facts import TargetFacts
from engine.request.errors import UnsupportedModelError
from engine.weights.checkpoint import not_finite
from engine.weights.files import read_header, read_object, read_tensors, weight_files
from engine.weights.index import StoredTensor, TensorIndex, named

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
_LARGEST_SIZE = 1 << 24


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
            names = named([f"{self.name}{key}" for key in unknown])
            raise DraftRefusedError(self.path, f"{CONFIG} has unknown keys: {names}")

    def refused(self, key: str, fault: str) -> DraftRefusedError:
        """Returns an error about one key, to be raised."""
        return DraftRefusedError(self.path, f"{self.name}{key} {fault}")


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A folder whose configuration is read and whose tensors are known by name."""

    path: Path
    config: Mapping[str, Any]
    tensors: TensorIndex

    @classmethod
    def open(cls, path: Path) -> DraftFolder:
        """Reads ``config.json`` and the headers of ``model.safetensors`` or ``pytorch_model.bin``, of the
        files that the index of either names, or of Medusa's. Raises DraftRefusedError with the reason."""
        tensors: dict[str, StoredTensor] = {}
        with _refusing(path):
            config = read_object(path / CONFIG, _MOST_CONFIG_BYTES)
            for file in (files := weight_files(path, _WEIGHTS)):
                found = read_header(file)
                if twice := sorted(tensors.keys() & found.keys()):
                    raise DraftRefusedError(path, f"two files hold {named(twice)}")
                tensors |= found
        if not files:
            raise DraftRefusedError(path, f"there is neither {' nor '.join(_WEIGHTS)}")
        return cls(path, config, TensorIndex(tensors))

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
        missing = [name for name in (EMBEDDING, HEAD) if name not in self.tensors]
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
        found = self.tensors.get(name)
        if found is None:
            raise self.refused(f"tensors are missing: {name}")
        if len(found.shape) != num_dims:
            raise self.refused(f"{name} {list(found.shape)} does not have {num_dims} dimensions")
        return found.shape

    def check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        """Raises DraftRefusedError naming both shapes where a tensor has another, or is missing."""
        if self.shape(name, len(wanted)) != wanted:
            raise self.refused(_other_shape(self.tensors[name], wanted))

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns tensors as they are stored. Raises DraftRefusedError where a file cannot be read, or
        holds values that are not finite."""
        with _refusing(self.path):
            tensors = read_tensors(self.tensors[name] for name in names)
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
            raise self.refused(f"unknown tensors: {named(unknown)}")
        if missing := sorted(wanted.keys() - set(names.values())):
            raise self.refused(f"tensors are missing: {named(missing)}")
        wrong = [
            _other_shape(self.tensors[name], wanted[own])
            for name, own in sorted(names.items())
            if self.tensors[name].shape != wanted[own]
        ]
        if wrong:
            raise self.refused(named(wrong))
        tensors = self.read(names)
        for name, own in names.items():
            if tensors[name].is_floating_point() != own_tensors[own].is_floating_point():
                raise self.refused(f"{name} holds {tensors[name].dtype}")
        # Copies: what is read may still lie in the file, which anybody may change.
        copies = {own: tensors[name].clone() for name, own in names.items()}
        module.load_state_dict(copies, assign=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns faults of files into those of the folder."""
    try:
        yield
    except UnsupportedModelError as error:
        raise DraftRefusedError(path, str(error)) from error


def _other_shape(found: StoredTensor, wanted: tuple[int, ...]) -> str:
    return f"{found.name} {list(found.shape)} instead of {list(wanted)}"
