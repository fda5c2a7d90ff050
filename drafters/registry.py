"""All drafters by name: those of the folders here, and those that other distributions bring.

A drafter of the core is a file in one of the folders (``copying``, ``tables``, ``parallel``, ``model``,
or a new one) in which a class is registered with ``drafters.base.drafter``; files are found by looking.
An operator names further ones, each a drafter of the core over a draft of its own
(``build_drafters``). A distribution registers one with::

    [project.entry-points."slipstream.drafters"]
    my_drafter = "my_package:make_drafter"

The entry point's name is the drafter's. The object is a factory: it is called once per engine with a
``DrafterContext`` and returns a ``Drafter``, or raises ``DrafterUnavailableError`` where it cannot work
with this model. Anything else that goes wrong is refused at start with the distribution and the entry
point at fault.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, TypeAlias

import drafters
from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterUnavailableError,
    drafter,
)

logger = logging.getLogger(__name__)

GROUP = "slipstream.drafters"

# Names go into requests, flags and labels of metrics; requests take 64 characters.
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DECORATED = re.compile(r"^@(?:[\w.]+\.)?drafter\b", re.MULTILINE)
Factory: TypeAlias = Callable[[DrafterContext], Drafter]


@drafter
class NoneDrafter(Drafter):
    """Proposes nothing."""

    info = DrafterInfo("none", "Plain decoding: one token per step, nothing drafted.", False)


def _place(name: str) -> tuple[bool, int, str]:
    """The place in the list: first ``none``, then folder by folder, then what chooses among them."""
    module = REGISTERED[name].__module__
    return name != "none", -module.count("."), module


def _registers(module: str) -> bool:
    """Whether a file here registers a drafter: what these compile loops with takes a while to load."""
    loader: Any = getattr(find_spec(module), "loader", None)
    return _DECORATED.search(loader.get_source(module) or "") is not None


for _module in filter(
    _registers, (each.name for each in pkgutil.walk_packages(drafters.__path__, "drafters."))
):
    importlib.import_module(_module)
_NAMES = tuple(sorted(REGISTERED, key=_place))


def drafter_names() -> tuple[str, ...]:
    """Returns the names of the core's drafters."""
    return _NAMES


def drafter_settings() -> Mapping[str, type]:
    """Returns the ``Drafter.settings`` of core drafters by name, if they have any."""
    declared = {name: REGISTERED[name].settings for name in _NAMES}
    return {name: kind for name, kind in declared.items() if kind is not None}


def draft_models() -> Mapping[str, str]:
    """Returns the kind of draft model that each drafter of the core with a model asks for."""
    kinds = {name: REGISTERED[name].info.needs.draft_model for name in _NAMES}
    return {name: kind for name, kind in kinds.items() if kind}


def draft_methods() -> tuple[str, ...]:
    """Returns the names of the core's drafters that draft with what the setting draft names."""
    return tuple(name for name, kind in draft_models().items() if kind == "draft")


def build_drafters(
    names: Iterable[str] | None = None,
    context: DrafterContext | None = None,
    plugins: Mapping[str, Factory] | None = None,
    drafts: Mapping[str, str] | None = None,
) -> dict[str, Drafter]:
    """Returns a fresh drafter per name, of the core or of ``plugins``; all that can work in ``context``
    when ``names`` is None. ``drafts``: by name, the drafters that are a drafter of the core over a
    draft of their own, and which one of ``draft_methods`` that is.

    Raises ValueError for an unknown name, listing the known ones, and DrafterUnavailableError for a
    name whose drafter cannot work here.
    """
    context = context or DrafterContext()
    factories: dict[str, Factory] = {name: REGISTERED[name].build for name in _NAMES}
    factories |= plugins or {}
    for name, method in (drafts or {}).items():
        factories[name] = _renamed(REGISTERED[method], name).build
    built: dict[str, Drafter] = {}
    left_out: list[str] = []
    for name in factories if names is None else names:
        if name not in factories:
            raise ValueError(f"unknown drafter {name!r}; known: {', '.join(factories)}")
        try:
            built[name] = factories[name](context)
        except DrafterUnavailableError as error:
            if names is not None:
                raise DrafterUnavailableError(
                    f"drafter {name!r} cannot be used: {error}"
                ) from error
            left_out.append(f"{name} ({error})")
    if left_out:
        logger.info("drafters left out: %s", "; ".join(left_out))
    for each in built.values():
        each.meet(built)
    return built


def _renamed(kind: type[Drafter], name: str) -> type[Drafter]:
    """Returns the class under another name, by which it asks for its own model."""
    renamed: type[Drafter] = type(kind.__name__, (kind,), {"info": replace(kind.info, name=name)})
    return renamed


class DrafterPluginError(ValueError):
    """A plugin cannot be used; the message names its distribution and entry point."""


def _named(plugin: EntryPoint) -> str:
    # A distribution is unknown only to entry points made by hand.
    owner = "unknown distribution" if plugin.dist is None else plugin.dist.name
    version = "" if plugin.dist is None else f" {plugin.dist.version}"
    return f"{owner}{version} (entry point {plugin.name} = {plugin.value})"


def _build_plugin(plugin: EntryPoint, context: DrafterContext) -> Drafter:
    """Imports a plugin and returns a fresh drafter of it. Raises DrafterPluginError, and lets the
    plugin's own DrafterUnavailableError through."""

    def refusal(fault: str) -> DrafterPluginError:
        return DrafterPluginError(f"drafter plugin of {_named(plugin)} {fault}")

    try:
        factory = plugin.load()
    except Exception as error:
        raise refusal(f"cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise refusal(f"is not a factory but of type {type(factory).__name__}")
    try:
        made = factory(context)
    except DrafterUnavailableError as error:
        logger.warning("drafter plugin %s is not available: %s", _named(plugin), error)
        raise
    except Exception as error:
        raise refusal(f"cannot build its drafter: {type(error).__name__}: {error}") from error
    if not isinstance(made, Drafter):
        raise refusal(f"returns {type(made).__name__}, which is no drafters.base.Drafter")
    if fault := _info_fault(made, plugin.name):
        raise refusal(fault)
    logger.info("drafter %s comes from %s", plugin.name, _named(plugin))
    return made


def find_plugins(chosen: Collection[str] | None = None) -> Mapping[str, Factory]:
    """Returns the installed plugins by name, sorted; of these only the ``chosen``, if that is not None.

    Imports nothing. Raises DrafterPluginError for a chosen name that no distribution registers, and
    for a name that is unusable, a core drafter's, or registered twice.
    """
    installed = sorted(entry_points(group=GROUP), key=lambda each: (each.name, _named(each)))
    names = [plugin.name for plugin in installed]
    for name in chosen or ():
        if name not in names:
            raise DrafterPluginError(
                f"drafter_plugins names {name!r}, which no installed distribution registers; "
                f"registered: {', '.join(names) or 'none'}"
            )
    found: dict[str, EntryPoint] = {}
    for plugin in installed:
        name = plugin.name
        if chosen is not None and name not in chosen:
            continue
        if not NAME.fullmatch(name):
            fault = "has a name that is not lower-case letters, digits and underscores, at most 64"
        elif name in drafter_names():
            fault = "has the name of a drafter of the core"
        elif name in found:
            fault = f"has the name of one of {_named(found[name])}"
        else:
            found[name] = plugin
            continue
        raise DrafterPluginError(
            f"drafter plugin of {_named(plugin)} {fault}; uninstall it, or leave it out of "
            "drafter_plugins"
        )
    return {name: partial(_build_plugin, plugin) for name, plugin in found.items()}


def _info_fault(made: Drafter, name: str) -> str:
    """Returns what is wrong with a drafter's ``info``; "" if nothing is."""
    info = getattr(made, "info", None)
    if not isinstance(info, DrafterInfo):
        return f"returns {type(made).__name__}, which has no DrafterInfo as its info"
    if info.name != name:
        return f"returns a drafter that is named {info.name!r} in its info"
    names = [option.name for option in info.options]
    if len(set(names)) < len(names):
        return "lists an option twice"
    try:
        info.resolve(info.defaults())
    except ValueError as error:
        return f"has an option whose default does not fit: {error}"
    return ""
