"""Speculation of requests that do not say otherwise, and its caps, changed while the server serves.

A change is checked as the settings are at start, by making the ``SpeculativeResolver`` that they would
have made; requests that are read from then on go through that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from drafters.options import SpeculativeParams
from server.errors import refused
from server.request.body import Body
from server.request.large_bodies import BodyReader
from server.request.speculative import (
    SpeculativeCaps,
    SpeculativeField,
    SpeculativeResolver,
    UnfitSpeculationError,
)

_GROUPS = {"speculative": "defaults", "speculative_caps": "caps"}


class SpeculativeChange(Body):
    """What the operator wishes from now on."""

    defaults: SpeculativeField | None = None
    caps: SpeculativeCaps | None = None


def changed(
    resolver: SpeculativeResolver, change: SpeculativeChange, *, from_built_in: bool
) -> SpeculativeResolver:
    """Returns what serves with the fields given in place of the present wishes.

    ``from_built_in``: in place of the built-in values, all wishes till now forgotten. Raises ApiError
    400 naming the field at fault.
    """
    defaults = {} if from_built_in else resolver.wished
    caps = {} if from_built_in else resolver.caps.given()
    if change.defaults is not None:
        defaults = defaults | change.defaults.given()
    if change.caps is not None:
        caps = caps | change.caps.given()
    try:
        return SpeculativeResolver(
            resolver.info, SpeculativeField(**defaults), SpeculativeCaps(**caps)
        )
    except UnfitSpeculationError as error:
        name = f"{_GROUPS[error.group]}.{error.name}"
        raise refused(name, error.reason) from error


class ChangeSpeculation(Protocol):
    """Changes speculation for all requests that are read once it has returned."""

    async def __call__(
        self, change: SpeculativeChange, *, from_built_in: bool
    ) -> SpeculativeResolver:
        """Arguments and errors are those of ``changed``."""


class OwnSpeculation:
    """Of the only application in front of an engine. ``show`` is told what requests get now."""

    def __init__(self, bodies: BodyReader, show: Callable[[SpeculativeParams, bool], None]) -> None:
        self._bodies = bodies
        self._show = show

    async def __call__(
        self, change: SpeculativeChange, *, from_built_in: bool
    ) -> SpeculativeResolver:
        found = changed(self._bodies.resolver, change, from_built_in=from_built_in)
        self._bodies.resolver = found
        self._show(found.defaults, True)
        return found
