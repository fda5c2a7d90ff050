"""The formats of a folder, one file each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, TypeVar


class Format(Protocol):
    """``writes``: whether a model with this chat template writes so."""

    @property
    def name(self) -> str: ...
    @property
    def writes(self) -> Callable[[str], bool]: ...


F = TypeVar("F", bound=Format)


def formats_in(package: str, path: Iterable[str], kind: type[F]) -> dict[str, F]:
    """Returns by name, in that order, what the modules of a package have as their ``FORMAT``."""
    modules = [import_module(f"{package}.{module.name}") for module in iter_modules(path)]
    found = [getattr(module, "FORMAT", None) for module in modules]
    formats = [each for each in found if isinstance(each, kind)]
    return {each.name: each for each in sorted(formats, key=lambda each: each.name)}


def format_of(formats: dict[str, F], template: str) -> str:
    """Returns the name of the first format that a model with this chat template writes; "" where none is
    known."""
    return next((each.name for each in formats.values() if each.writes(template)), "")
