"""The drafters there are, by name. A new drafter is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from drafters.base import Drafter
from drafters.nasd import NasdDrafter, NasdOneLevelDrafter
from drafters.ngram import NgramDrafter
from drafters.none import NoneDrafter

_FACTORIES: dict[str, Callable[[], Drafter]] = {
    "none": NoneDrafter,
    "ngram": NgramDrafter,
    "nasd_one_level": NasdOneLevelDrafter,
    "nasd": NasdDrafter,
}


def drafter_names() -> tuple[str, ...]:
    """The names ``build_drafters`` knows."""
    return tuple(_FACTORIES)


def build_drafters(names: Iterable[str] | None = None) -> dict[str, Drafter]:
    """A fresh drafter per name; all of them when ``names`` is None.

    Raises ValueError for an unknown name, listing the known ones.
    """
    drafters: dict[str, Drafter] = {}
    for name in _FACTORIES if names is None else names:
        if name not in _FACTORIES:
            raise ValueError(f"unknown drafter {name!r}; known: {', '.join(_FACTORIES)}")
        drafters[name] = _FACTORIES[name]()
    return drafters
