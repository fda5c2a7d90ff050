"""Drafters that other distributions bring, found by their entry points.

A distribution registers one with::

    [project.entry-points."slipstream.drafters"]
    my_drafter = "my_package:make_drafter"

The entry point's name is the drafter's. The object is a factory, as in ``drafters.registry``: it is
called once per engine with a ``DrafterContext`` and returns a ``Drafter``, or raises
``DrafterUnavailableError`` where it cannot work with this model. Anything else that goes wrong is
refused at start with the distribution and the entry point at fault: a plugin that was installed and
does not load should not go unnoticed until a request names it.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from drafters.base import Drafter, DrafterInfo, HiddenDrafter, ReferenceDrafter
from drafters.registry import DrafterContext, DrafterUnavailableError, Factory, drafter_names

logger = logging.getLogger(__name__)

GROUP = "slipstream.drafters"

# Names go into requests, flags and labels of metrics; requests take 64 characters.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NUM_ARGUMENTS = {"open": 4, "propose": 1, "observe": 1, "num_top_tokens": 1, "close": 1}


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
        assert isinstance(drafter, Drafter)
        logger.info("drafter %s comes from %s", self.name, self)
        return drafter

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
    for needed, protocol, method in (
        (info.needs.hidden_rows, HiddenDrafter, "observe_hidden"),
        (info.takes_reference, ReferenceDrafter, "refer"),
    ):
        if needed:
            wanted[method] = 2 if protocol is ReferenceDrafter else 1
    for method, num_arguments in wanted.items():
        if not _takes(getattr(drafter, method, None), num_arguments):
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
