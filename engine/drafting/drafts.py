"""The drafts of an engine: models and heads that draft for its target, by the names of their drafters.

The setting ``draft`` lists them as ``[NAME=]PATH``. The method of each, which is the drafter of the core
that drafts with it, is found in what lies at its path. What is wrong with a list is found here, before a
model is loaded and without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from drafters.options import NO_DRAFTER
from drafters.registry import NAME, draft_methods, drafter_names, find_plugins
from engine.config import EngineConfig
from engine.names import BUNDLED, BUNDLED_HYBRID, BUNDLED_MODEL, SMOLLM2

SMALL_MODEL = "small_model"
MTP = "mtp"
"""The path that means the target's own checkpoint, and the method of what is read there."""
_BUNDLED_DRAFTS: Mapping[str, Mapping[str, str]] = {
    BUNDLED_MODEL: {SMALL_MODEL: str(BUNDLED / "draft"), "medusa": str(BUNDLED / "medusa")},
    BUNDLED_HYBRID: {MTP: MTP},
    SMOLLM2: {"eagle3": str(BUNDLED / "smollm2_eagle3")},
}
"""Paths of the drafts that come with a model, by the model's name and the drafts' own, which are their
methods."""


@dataclass(frozen=True, slots=True)
class NamedDraft:
    """One entry of the setting. Without a ``name`` it is called as its method."""

    name: str | None
    path: str


@dataclass(frozen=True, slots=True)
class Draft:
    """The source of the drafter ``name``. ``path``: a folder, GGUF file or hub id, or "mtp"."""

    name: str
    path: str
    method: str

    @property
    def is_bundled(self) -> bool:
        return Path(self.path).is_relative_to(BUNDLED)


def parse_draft(text: str) -> NamedDraft:
    """Reads ``[NAME=]PATH``. What stands before an equals sign is a name unless it has a slash, as a path
    would. Raises ValueError for a name that drafters cannot have, and without a path."""
    before, equals, after = text.partition("=")
    name, path = (before, after) if equals and "/" not in before else (None, text)
    if name is not None and not NAME.fullmatch(name):
        raise ValueError(
            f"draft {text!r}: the name {name!r} is not lower-case letters, digits and underscores, "
            "at most 64"
        )
    if not path:
        raise ValueError(f"draft {text!r} names no path")
    return NamedDraft(name, path)


def parse_drafts(texts: Iterable[str]) -> list[NamedDraft]:
    """Reads the whole setting. Raises ValueError as ``parse_draft``, and for a name given twice."""
    parsed = [parse_draft(text) for text in texts]
    _check_unique(each.name for each in parsed if each.name is not None)
    return parsed


def check_names(config: EngineConfig) -> tuple[str, ...]:
    """Returns the names that drafters may have once the model is loaded, as far as that is known before.

    Raises ValueError for a name that no drafter can have, and as ``parse_drafts`` and ``find_plugins``.
    """
    plugins = find_plugins(config.drafter_plugins)
    named = [each.name for each in parse_drafts(config.draft) if each.name is not None]
    for name in named:
        if name in plugins or (name in drafter_names() and name not in draft_methods()):
            raise ValueError(f"draft {name}: a drafter has that name; name it otherwise")
        if not is_wanted(config, name):
            raise ValueError(f"draft {name} is set, but drafters leaves out {_takers(name)}")
    known = tuple(dict.fromkeys((*drafter_names(), *plugins, *named)))
    for name in config.drafters or ():
        check_name("drafters", name, known)
    return (
        known if config.drafters is None else tuple(dict.fromkeys((NO_DRAFTER, *config.drafters)))
    )


def check_name(setting: str, name: str, known: Sequence[str]) -> None:
    """Raises ValueError, with the setting's name, for a drafter that is none of the known."""
    if name not in known:
        near = get_close_matches(name, known, 1)
        meant = f", did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{setting}: there is no drafter {name!r}{meant}; there are: {', '.join(known)}"
        )


def find_drafts(config: EngineConfig) -> dict[str, Draft]:
    """Returns the drafts of the setting by name, as what they are found to be.

    Raises ValueError where a name is taken or given twice, where ``drafters`` leaves one out, and where
    there is no drafter for what was found.
    """
    found = [_find(each) for each in parse_drafts(config.draft)]
    _check_unique(each.name for each in found)
    plugins = find_plugins(config.drafter_plugins)
    for draft in found:
        if draft.method not in draft_methods():
            raise ValueError(
                f"draft {draft.name}: there is no drafter for {draft.method} here, as which "
                f"{draft.path} was recognised; there are: {', '.join(draft_methods())}"
            )
        is_taken = draft.name in drafter_names() and draft.name != draft.method
        if is_taken or draft.name in plugins:
            raise ValueError(
                f"draft {draft.name}: a drafter has that name, and {draft.path} is of the method "
                f"{draft.method}; name it otherwise"
            )
        if not is_wanted(config, draft.name):
            raise ValueError(
                f"draft {draft.name} is set, but drafters leaves out {_takers(draft.name)}"
            )
    return {each.name: each for each in found}


def is_wanted(config: EngineConfig, name: str) -> bool:
    """Returns whether a drafter is to be loaded; the small model also where it is to be copied."""
    if config.drafters is None or name in config.drafters:
        return True
    copies = config.quantized is not None and config.quantized_model == "draft"
    return name == SMALL_MODEL and copies and "quantized" in config.drafters


def with_bundled_drafts(config: EngineConfig) -> EngineConfig:
    """Returns the settings with the drafts that come for the target, but for those whose names the
    setting gives to others. Raises ValueError as ``find_drafts``."""
    given = find_drafts(config)
    own = tuple(
        f"{name}={path}"
        for name, path in _BUNDLED_DRAFTS.get(config.served_model, {}).items()
        if name not in given and is_wanted(config, name) and (path == MTP or Path(path).is_dir())
    )
    return replace(config, draft=(*config.draft, *own))


def find_method(path: str) -> str:
    """Returns the method of what lies at a path; what is no folder of a known method is a model. Raises
    ValueError for a folder that cannot be read."""
    if path == MTP:
        return MTP
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return SMALL_MODEL
    # They need torch, which processes do not have that only read the setting.
    from engine.drafting.published.folder import DraftFolder
    from engine.drafting.published.methods import method_of
    from engine.request.errors import UnsupportedModelError
    from engine.weights.gguf.file import find_gguf

    try:
        if find_gguf(path) is not None:
            return SMALL_MODEL
    except UnsupportedModelError as error:
        raise ValueError(f"draft {path}: {error}") from error
    return method_of(DraftFolder.open(folder)) or SMALL_MODEL


def _find(named: NamedDraft) -> Draft:
    path = str(BUNDLED / "draft") if named.path == BUNDLED_MODEL else named.path
    method = find_method(path)
    return Draft(named.name or method, path, method)


def _takers(name: str) -> str:
    return f"{name} and quantized" if name == SMALL_MODEL else name


def _check_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"draft: two are called {name}; name one of them: NAME=PATH")
        seen.add(name)
