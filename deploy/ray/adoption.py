"""Replicas that come later take over what ``/admin`` has changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from server.models.services import Services
from server.request.speculative import SpeculativeChange, SpeculativeResolver


@dataclass(frozen=True, slots=True)
class Speculation:
    """A replica's, after ``num_changes``; the fields that were set. ``settings``: equal for replicas
    that began alike: a change is not carried over to a new version of the application."""

    replica: str
    settings: str
    num_changes: int
    defaults: dict[str, Any]
    caps: dict[str, Any]


class SharedSpeculation:
    """Counts the changes of one replica, which pass through here, on one event loop."""

    def __init__(self, replica: str, settings: str, services: Services) -> None:
        self._replica = replica
        self._settings = settings
        self._services = services
        self._num_changes = 0
        self._change = services.change_speculation
        services.change_speculation = self

    async def __call__(
        self, change: SpeculativeChange, *, from_built_in: bool
    ) -> SpeculativeResolver:
        found = await self._change(change, from_built_in=from_built_in)
        self._num_changes += 1
        return found

    def show(self) -> Speculation:
        resolver = self._services.resolver
        return Speculation(
            self._replica,
            self._settings,
            self._num_changes,
            resolver.wished,
            resolver.caps.given(),
        )

    async def adopt(self, shown: Iterable[Speculation]) -> bool:
        """Go by what was changed most often, if that is more often than here. Returns whether this
        replica is among those that were asked, so that it gets all further changes itself."""
        found = list(shown)
        alike = [each for each in found if each.settings == self._settings]
        newest = max(alike, key=lambda each: each.num_changes, default=None)
        if newest is not None and newest.num_changes > self._num_changes:
            change = SpeculativeChange.model_validate(
                {"defaults": newest.defaults, "caps": newest.caps}
            )
            await self._change(change, from_built_in=True)
            self._num_changes = newest.num_changes
        return self._replica in [each.replica for each in found]
