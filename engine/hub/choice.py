"""Which files of a repository are fetched: those of a GGUF model, or of a checkpoint for transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from engine.hub.name import HubName, bits_of, label_of, num_parts, without_part

_USUAL = "Q4_K_M"
_LEAST_BITS = 4
"""Below this, models generate noticeably different texts, so such files must be requested explicitly."""
_MODEL = re.compile(r"(?!.*(mmproj|imatrix)[^/]*$).*\.gguf", re.IGNORECASE)
"""Other GGUF files hold parts for images, or what was measured while rounding."""
_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_TEMPLATES = "additional_chat_templates"
_DUPLICATE = "consolidated"
"""Begins the names of weights that repositories also hold under transformers' names."""


class HubError(OSError):
    """Why a model cannot be had from the hub, in one line that begins with its name."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """``path``: within the repository; ``size``: in bytes. ``blob``: its name in the cache; ``is_large``:
    the hub knows it by its SHA-256, which ``blob`` is."""

    path: str
    size: int
    blob: str = ""
    is_large: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """``files``: what to fetch, of a split GGUF file in the order of its parts. ``label``: of a GGUF
    file; None: the files make a folder."""

    files: tuple[HubFile, ...]
    label: str | None

    @property
    def num_bytes(self) -> int:
        return sum(each.size for each in self.files)


def choose(name: HubName, files: Sequence[HubFile]) -> Choice:
    """Returns the files of what a name means: of the type that it says; else safetensors; else GGUF in
    Q4_K_M, else in the fewest bits from 4 on. Raises HubError with the types that there are."""
    found = gguf_choices(files)
    if name.quant is not None:
        return _named(name, name.quant, found)
    checkpoint = _checkpoint(files)
    if checkpoint is not None:
        return checkpoint
    if not found:
        raise HubError(f"{name}: there are neither GGUF files nor a transformers checkpoint in it")
    usual = [each for each in found if each.label == _USUAL]
    enough = [each for each in found if bits_of(each.label or "") >= _LEAST_BITS]
    if usual or enough:
        return (usual or sorted(enough, key=lambda each: each.num_bytes))[0]
    if len(found) == 1:
        return found[0]
    raise HubError(f"{name}: name one of {shown(found)}")


def gguf_choices(files: Iterable[HubFile]) -> list[Choice]:
    """Returns the models in GGUF files, by name, if all of their parts are listed; without image parts.
    If two have the same weight type, the second is named after its file."""
    sets: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda each: (each.path.count("/"), each.path)):
        if _MODEL.fullmatch(file.path):
            sets.setdefault(without_part(file.path), []).append(file)
    found: dict[str, Choice] = {}
    for whole, parts in sets.items():
        if len(parts) == num_parts(parts[0].path):
            label = label_of(whole)
            label = PurePosixPath(whole).stem if label in found else label
            found.setdefault(label, Choice(tuple(parts), label))
    return list(found.values())


def shown(found: Iterable[Choice]) -> str:
    """Returns the types that there are with their sizes, the smallest first."""
    ordered = sorted(found, key=lambda each: each.num_bytes)
    return ", ".join(f"{each.label} ({size(each.num_bytes)})" for each in ordered)


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _named(name: HubName, quant: str, found: Sequence[Choice]) -> Choice:
    wanted = quant.lower().removesuffix(".gguf")
    if not found:
        raise HubError(f"{name}: there are no GGUF files in it")
    for each in found:
        if str(each.label).lower() == wanted:
            return each
    for each in found:
        file = PurePosixPath(each.files[0].path).stem
        if wanted in (file.lower(), str(each.label).lower().removeprefix("ud-")):
            return each
    raise HubError(f"{name}: there is no {quant} in it; there are {shown(found)}")


def _checkpoint(files: Sequence[HubFile]) -> Choice | None:
    """Returns the files that transformers reads of a repository, or those of an adapter; None: it holds
    no weights for it."""
    top = [each for each in files if "/" not in each.path]
    weights = [
        each
        for each in top
        if each.path.endswith(".safetensors") and not each.path.startswith(_DUPLICATE)
    ] or [
        each for each in top if each.path.startswith("pytorch_model") and each.path.endswith(".bin")
    ]
    if not weights:
        return None
    beside = [each for each in top if each.path.endswith(_BESIDE)]
    templates = [each for each in files if PurePosixPath(each.path).parent.name == _TEMPLATES]
    return Choice((*weights, *beside, *templates), None)
