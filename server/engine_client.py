"""The engine as the server sees it. ``engine.async_engine.AsyncEngine`` is one, the tests' scripted
engine another; the server knows nothing else of what runs below it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from engine.events import TokenEvent
from engine.info import EngineInfo
from engine.params import GenerationRequest, Tenant
from engine.stats import StepStats


class EngineClient(Protocol):
    """All calls come from the event loop; none of them blocks it."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_alive(self) -> bool:
        """False once the engine thread has died or was stopped."""

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken; 0 while there is none."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """The request's events; the last one carries ``finish``.

        Closing or cancelling it aborts the request. Raises RequestError, QueueFullError,
        RequestFailedError, EngineDeadError.
        """

    async def charge(self, tenant: Tenant) -> None:
        """Counts a request of the tenant in which the engine has no other part.

        Raises TenantLimitError, EngineDeadError.
        """

    def abort(self, request_id: str) -> None:
        """Ends the request at the next step while its events are still read.

        Its last event then says ``finish.reason == "abort"`` and accounts for the work done: this
        is how a stop string, which only the server can see, ends a request without losing its
        statistics.
        """

    def add_step_listener(self, callback: Callable[[StepStats], None]) -> None:
        """``callback`` runs on the event loop after each step."""

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float) -> None:
        """Lets running requests finish for so long, aborts the rest, ends the thread."""
