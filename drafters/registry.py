"""All drafters by name: those of the wings of this folder, and those that other distributions bring.

A drafter of the core is a file in one of the wings (``copying``, ``tables``, ``parallel``, ``model``, or
a new one) in which a class is registered with ``drafters.base.drafter``; files are found by looking.

A distribution registers one with::

    [project.entry-points."slipstream.drafters"]
    my_drafter = "my_package:make_drafter"

The entry point's name is the drafter's. The object is a factory: it is called once per engine with a
``DrafterContext`` and returns a ``Drafter``, or raises ``DrafterUnavailableError`` where it cannot work
with this model. Anything else that goes wrong is refused at start with the distribution and the entry
point at fault: a plugin that was installed and does not load should not go unnoticed until a request
names it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import drafters
from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterUnavailableError,
    DraftRequest,
    Factory,
    NewRequest,
    Observation,
    Registered,
    drafter,
)
from drafters.tree import EMPTY, DraftTree

__all__ = [
    "GROUP",
    "DrafterContext",
    "DrafterPlugin",
    "DrafterPluginError",
    "DrafterUnavailableError",
    "PlainContext",
    "build_drafters",
    "draft_models",
    "drafter_names",
    "drafter_settings",
    "find_plugins",
]

logger = logging.getLogger(__name__)

GROUP = "slipstream.drafters"

# Names go into requests, flags and labels of metrics; requests take 64 characters.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NUM_ARGUMENTS = {"open": 4, "propose": 1, "observe": 1, "num_top_tokens": 1, "close": 1}


@drafter("none", "Plain decoding: one token per step, nothing drafted.", trees=False)
class NoneDrafter(Drafter):
    """Proposes nothing."""

    def start(self, request: NewRequest) -> None:
        """There is nothing to know."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        return [EMPTY] * len(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Nothing to learn."""


def _import_all() -> None:
    for module in pkgutil.walk_packages(drafters.__path__, "drafters."):
        importlib.import_module(module.name)


def _place(name: str) -> tuple[bool, int, str]:
    """First ``none``, then wing by wing, then what chooses among them."""
    module = Registered.all[name].kind.__module__
    return name != "none", -module.count("."), module


_import_all()
_NAMES = tuple(sorted(Registered.all, key=_place))


class PlainContext:
    """An engine that has no models to lend: enough for drafters that need none."""

    def __init__(
        self, vocab_size: int = 0, drafter_settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.drafter_settings = drafter_settings or {}

    def __getattr__(self, name: str) -> Any:
        raise DrafterUnavailableError(f"needs {name.replace('_', ' ')}, and there is none here")


def drafter_names() -> tuple[str, ...]:
    """The names of the core."""
    return _NAMES


def drafter_settings() -> Mapping[str, type]:
    """What operators may set of drafters of the core: by name, frozen dataclasses whose fields have
    defaults and a ``description`` in their metadata."""
    declared = {name: Registered.all[name].settings for name in _NAMES}
    return {name: kind for name, kind in declared.items() if kind is not None}


def draft_models() -> Mapping[str, str]:
    """The kind of draft model that each drafter of the core with a model asks for."""
    kinds = {name: Registered.all[name].kind.info.needs.draft_model for name in _NAMES}
    return {name: kind for name, kind in kinds.items() if kind}


def build_drafters(
    names: Iterable[str] | None = None,
    context: DrafterContext | None = None,
    plugins: Mapping[str, Factory] | None = None,
) -> dict[str, Drafter]:
    """A fresh drafter per name, of the core or of ``plugins``; all that can work in ``context`` when
    ``names`` is None.

    Raises ValueError for an unknown name, listing the known ones, and DrafterUnavailableError for a
    name whose drafter cannot work here.
    """
    context = context or PlainContext()
    factories: dict[str, Factory] = {name: Registered.all[name] for name in _NAMES}
    factories |= plugins or {}
    built: dict[str, Drafter] = {}
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
    for each in built.values():
        each.meet(built)
    return built


_DEFAULTS = {"observe_hidden": Drafter.observe_hidden, "predict": Drafter.predict}
"""These do nothing: who needs them has its own."""


class _Foreign(Drafter):
    """A drafter that was not derived from ``Drafter``: its own methods, the base's where it has none."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.info = drafter.info
        own: Mapping[str, Callable[..., Any]] = {
            name: getattr(drafter, name)
            for name in (*_NUM_ARGUMENTS, *_DEFAULTS, "refer")
            if hasattr(drafter, name)
        }
        vars(self).update(own)


class DrafterPluginError(ValueError):
    """A plugin cannot be used; the message names its distribution and entry point."""


@dataclass(frozen=True, slots=True)
class DrafterPlugin:
    """An installed plugin, not imported yet. Calling it imports it and builds its drafter."""

    entry_point: EntryPoint

    @property
    def name(self) -> str:
        return self.entry_point.name

    def __str__(self) -> str:
        dist = self.entry_point.dist
        # A distribution is unknown only to entry points made by hand.
        owner = "unknown distribution" if dist is None else f"{dist.name} {dist.version}"
        return f"{owner} (entry point {self.name} = {self.entry_point.value})"

    def __call__(self, context: DrafterContext) -> Drafter:
        """A fresh drafter, checked against the protocol.

        Raises DrafterPluginError, and lets the plugin's own DrafterUnavailableError through.
        """
        try:
            factory = self.entry_point.load()
        except Exception as error:
            raise self._refusal(f"cannot be imported: {_describe(error)}") from error
        if not callable(factory):
            raise self._refusal(f"is not a factory but of type {type(factory).__name__}")
        try:
            drafter = factory(context)
        except DrafterUnavailableError as error:
            logger.warning("drafter plugin %s is not available: %s", self, error)
            raise
        except Exception as error:
            raise self._refusal(f"cannot build its drafter: {_describe(error)}") from error
        fault = protocol_fault(drafter, self.name)
        if fault:
            raise self._refusal(fault)
        logger.info("drafter %s comes from %s", self.name, self)
        return drafter if isinstance(drafter, Drafter) else _Foreign(drafter)

    def _refusal(self, fault: str) -> DrafterPluginError:
        return DrafterPluginError(f"drafter plugin of {self} {fault}")


def find_plugins(chosen: Collection[str] | None = None) -> Mapping[str, Factory]:
    """The installed plugins by name, sorted; of these only the ``chosen``, if that is not None.

    Imports nothing. Raises DrafterPluginError for a chosen name that no distribution registers, and
    for a name that is unusable, a core drafter's, or registered twice.
    """
    return _by_name([DrafterPlugin(each) for each in entry_points(group=GROUP)], chosen)


def _by_name(
    plugins: Iterable[DrafterPlugin], chosen: Collection[str] | None
) -> dict[str, Factory]:
    installed = sorted(plugins, key=lambda plugin: (plugin.name, str(plugin)))
    names = [plugin.name for plugin in installed]
    for name in chosen or ():
        if name not in names:
            have = ", ".join(names) or "none"
            raise DrafterPluginError(
                f"drafter_plugins names {name!r}, which no installed distribution registers; "
                f"registered: {have}"
            )
    found: dict[str, DrafterPlugin] = {}
    for plugin in installed:
        name = plugin.name
        if chosen is not None and name not in chosen:
            continue
        if not _NAME.fullmatch(name):
            fault = "has a name that is not lower-case letters, digits and underscores, at most 64"
        elif name in drafter_names():
            fault = "has the name of a drafter of the core"
        elif name in found:
            fault = f"has the name of one of {found[name]}"
        else:
            found[name] = plugin
            continue
        raise DrafterPluginError(
            f"drafter plugin of {plugin} {fault}; uninstall it, or leave it out of drafter_plugins"
        )
    return dict(found)


def protocol_fault(drafter: object, name: str) -> str:
    """What keeps an object from being the ``Drafter`` of this name; empty if nothing does."""
    kind = type(drafter).__name__
    info = getattr(drafter, "info", None)
    if not isinstance(info, DrafterInfo):
        return f"returns {kind}, which has no DrafterInfo as its info"
    if info.name != name:
        return f"returns a drafter that is named {info.name!r} in its info"
    wanted = dict(_NUM_ARGUMENTS)
    if info.needs.hidden_rows:
        wanted["observe_hidden"] = 1
    if info.takes_prediction:
        wanted["refer" if hasattr(drafter, "refer") else "predict"] = 2
    for method, num_arguments in wanted.items():
        inherited = getattr(type(drafter), method, None) is _DEFAULTS.get(method, drafter)
        if inherited or not _takes(getattr(drafter, method, None), num_arguments):
            return f"returns {kind}, which has no method {method} of {num_arguments} arguments"
    return _option_fault(info)


def _option_fault(info: DrafterInfo) -> str:
    names = [option.name for option in info.options]
    if len(set(names)) < len(names):
        return "lists an option twice"
    try:
        info.resolve(info.defaults())
    except ValueError as error:
        return f"has an option whose default does not fit: {error}"
    return ""


def _takes(method: Any, num_arguments: int) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:  # Compiled, and silent about its arguments.
        return True
    return True


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
