"""A folder of a published draft: its configuration and its tensors, read with distrust.

Folders come from anywhere. A configuration is read up to a size, names and shapes of tensors are known
before any of them is read, and nothing is unpickled but tensors. Whatever does not fit is a
``DraftRefusedError``: one line that begins with the folder's path and names the fault.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from engine.attention.backend import IMPLEMENTATION
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
_LAYER_NAME = re.compile(r"layers\.(\d+)\.")
_MOST_CONFIG_BYTES = 1 << 20
_LARGEST_SIZE = 1 << 24


class DraftRefusedError(ValueError):
    """The folder cannot be used with this target; the message is one line that says why."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path}: {' '.join(fault.split())}")


Fault = Callable[[Any, TargetFacts], str | None]
"""Returns what is wrong with a value of a configuration, or None."""
_NEEDED = object()


class Field(NamedTuple):
    """A field of a format's configuration. ``keys``: where it may stand, the most binding first, within
    sections as "section.key"; "": its name. ``default``: of one that is missing, or a function of the
    target's facts."""

    faults: tuple[Fault, ...]
    keys: str = ""
    default: Any = _NEEDED


def size(value: Any, _: TargetFacts) -> str | None:
    is_one = type(value) is int and 1 <= value < _LARGEST_SIZE
    return None if is_one else f"is {value!r}, not a positive whole number"


def token_id(value: Any, facts: TargetFacts) -> str | None:
    is_one = type(value) is int and 0 <= value < facts.vocab_size
    return None if is_one else f"is {value!r}, not a token of the target's {facts.vocab_size}"


def flag(value: Any, _: TargetFacts) -> str | None:
    return None if type(value) is bool else f"is {value!r}, neither true nor false"


def layer_ids(value: Any, _: TargetFacts) -> str | None:
    are_ids = isinstance(value, list) and all(type(each) is int for each in value)
    return None if are_ids else "is not a list of whole numbers"


def only(*known: Any, said: str = "read") -> Fault:
    """Returns the fault of values that change what is computed to what is not computed here."""
    return lambda value, _: (
        None if value in known else f"is {value!r}, and only {known[0]!r} is {said}"
    )


def of_target(fact: str, said: str = "this model has") -> Fault:
    """Returns the fault of a size that is not the target's."""
    own = attrgetter(fact)
    return lambda value, facts: (
        None if value == own(facts) else f"is {value}, and {said} {own(facts)}"
    )


@dataclass(frozen=True, slots=True)
class Section:
    """An object of a folder's configuration. A key whose value is null is taken as missing. ``name``: of
    the section, which messages put before its keys; "" for the whole configuration."""

    path: Path
    name: str
    content: Mapping[str, Any]

    def has(self, key: str) -> bool:
        return self.content.get(key) is not None

    def section(self, key: str) -> Section:
        """Returns an object inside this one, empty where it is missing. Raises DraftRefusedError where it
        is no object."""
        value = self.content.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refused(key, "is not an object")
        return Section(self.path, f"{self.name}{key}.", value or {})

    def holder(self, keys: str) -> tuple[Section, str]:
        """Returns the section and the key of the first of a field's ``keys`` that says something, of none
        the one that stands highest."""
        places = []
        for key in keys.split():
            *names, own = key.split(".")
            places.append((reduce(Section.section, names, self), own))
        usual = min(places, key=lambda place: place[0].name.count("."))
        return next((place for place in places if place[0].has(place[1])), usual)

    def values(
        self, fields: Mapping[str, Field], facts: TargetFacts, closed: str = ""
    ) -> dict[str, Any]:
        """Returns the values of a format's fields by their names. ``closed``: a section that may have no
        other keys. Raises DraftRefusedError, which names the key and its fault."""
        found = {}
        if closed:
            start = f"{closed}."
            known = " ".join(field.keys for field in fields.values()).split()
            inside = [key.removeprefix(start) for key in known if key.startswith(start)]
            self.section(closed).check_keys(inside)
        for name, (faults, keys, default) in fields.items():
            section, key = self.holder(keys or name)
            found[name] = value = section.content.get(key)
            if value is None and default is not _NEEDED:
                found[name] = default(facts) if callable(default) else default
            elif fault := next(filter(None, (each(value, facts) for each in faults)), None):
                raise section.refused(key, fault)
        return found

    def check_keys(self, known: Collection[str]) -> None:
        """Raises DraftRefusedError naming the keys that are not among ``known``."""
        unknown = sorted(self.content.keys() - set(known))
        if unknown:
            names = named([f"{self.name}{key}" for key in unknown])
            raise DraftRefusedError(self.path, f"{CONFIG} has unknown keys: {names}")

    def refused(self, key: str, fault: str) -> DraftRefusedError:
        """Returns an error about one key, to be raised."""
        return DraftRefusedError(self.path, f"{self.name}{key} {fault}")


class LayerForm(NamedTuple):
    """How a format describes layers. ``families``: classes and the keys that are theirs beside ``SIZES``,
    by model types; ``usual``: the type where none is said. The rest ends the messages of faults: of a
    family, of heads, of the number of layers, of the vocabulary."""

    families: Mapping[str, tuple[Any, Collection[str]]]
    usual: str
    family: str
    heads: str
    layers: str
    target: str


def read_layers(section: Section, form: LayerForm, names: Iterable[str], facts: TargetFacts) -> Any:
    """Returns transformers' configuration of a head's layers, with its defaults for what is missing:
    formats leave out what equals them. ``names``: of tensors.

    Raises DraftRefusedError for sizes that are none, or not the tensors' and the target's, and where
    transformers makes nothing of the values.
    """
    family = section.content.get("model_type") or form.usual
    if not isinstance(family, str) or family not in form.families:
        raise section.refused("model_type", f"is {family!r}, {form.family}")
    kind, keys = form.families[family]
    # A copy: transformers writes into what it is given.
    given = {key: section.content[key] for key in (*SIZES, *keys) if section.has(key)}
    try:
        config = kind(attn_implementation=IMPLEMENTATION, **copy.deepcopy(given))
    except FAULTS as error:
        raise DraftRefusedError(
            section.path, f"the layers of {CONFIG} cannot be read: {error}"
        ) from error
    made = Section(section.path, section.name, {key: getattr(config, key) for key in SIZES})
    sizes = made.values(dict.fromkeys(SIZES, Field((size,))), facts)
    if fault := of_target("vocab_size", form.target)(sizes["vocab_size"], facts):
        raise DraftRefusedError(section.path, f"vocab_size {fault}")
    num_heads, num_kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if num_heads % num_kv_heads:
        fault = f"is {num_kv_heads}, {form.heads.format(num_heads)}"
        raise section.refused("num_key_value_heads", fault)
    num_layers = sizes["num_hidden_layers"]
    found = {int(match[1]) for match in map(_LAYER_NAME.match, names) if match}
    if found != set(range(num_layers)):
        fault = f"is {num_layers}, {form.layers.format(len(found))}"
        raise section.refused("num_hidden_layers", fault)
    return config


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
        """Returns tensors as they are stored, by their names in ``tensors``. Raises DraftRefusedError
        where a file cannot be read, or holds values that are not finite."""
        wanted = {name: self.tensors[name] for name in names}
        with _refusing(self.path):
            found = read_tensors(wanted.values())
        if faults := not_finite(found.items()):
            raise self.refused(faults[0])
        return {name: found[stored.name] for name, stored in wanted.items()}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of this shape. Raises DraftRefusedError as ``check_shape`` and ``read``."""
        self.check_shape(name, shape)
        # A copy: what is read may still lie in the file, which anybody may change.
        return self.read([name])[name].clone()

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
