"""An engine in another process, as the asyncio side sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine.process.link import Acts, Link, PeerGoneError
from engine.process.pulse import Pulse
from engine.process.streams import EventStreams
from engine.request.errors import EngineDeadError
from engine.request.events import ErrorEvent, TokenEvent
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import GenerationRequest, Tenant
from engine.request.stats import StepStats, idle_stats

logger = logging.getLogger(__name__)

# What was aborted at the end ends with the step under way.
_LAST_EVENTS_SECONDS = 30.0
_GONE = "the engine's process is gone"


class RemoteEngine(EventStreams):
    """Streams requests' events from the engine at the other end of a pipe. The event loop reads the
    pipe: one message for each step, with the tokens of all requests. ``pulse``: the engine's; None: its
    progress is not watched."""

    def __init__(
        self, info: EngineInfo, connection: Connection, pulse: Pulse | None = None
    ) -> None:
        super().__init__(info)
        self.pulse = pulse or self.pulse
        self._link = Link(connection)
        self._unfinished: set[str] = set()
        self._all_finished = asyncio.Event()

    async def start(self) -> None:
        await super().start()
        self._listen()

    def replace(self, info: EngineInfo, connection: Connection) -> None:
        """Another engine has taken the place of one that ended. From any thread."""
        if self._loop is None:
            self.info, self._link = info, Link(connection)
        else:
            self._loop.call_soon_threadsafe(self._replace, info, connection)

    async def charge(self, tenant: Tenant) -> None:
        await self._ask("charge", tenant)

    async def load_adapter(self, name: str, path: str, may_replace: bool = False) -> AdapterInfo:
        found: AdapterInfo = await self._ask("load_adapter", name, path, may_replace)
        return found

    async def unload_adapter(self, name: str) -> AdapterInfo:
        found: AdapterInfo = await self._ask("unload_adapter", name)
        return found

    async def _ask(self, name: str, *arguments: Any) -> Any:
        """Raises what the engine raises, and EngineDeadError and ShuttingDownError."""
        self._refuse_when_ended()
        try:
            return await asyncio.wrap_future(self._link.ask(name, *arguments))
        except PeerGoneError:
            raise EngineDeadError(self._dead or _GONE) from None

    def abort(self, request_id: str) -> None:
        if self._dead is None:
            self._link.call("abort", request_id)

    def _submit(self, request: GenerationRequest) -> None:
        self._unfinished.add(request.request_id)
        self._link.call("submit", request)

    async def _end(self) -> None:
        if self._dead is not None:
            return
        for request_id in self._unfinished:
            self.abort(request_id)
        if self._unfinished:
            self._all_finished.clear()
            try:
                await asyncio.wait_for(self._all_finished.wait(), _LAST_EVENTS_SECONDS)
            except TimeoutError:
                logger.warning("%d requests got no last event", len(self._unfinished))
        self._lose("the engine was stopped")

    def _listen(self) -> None:
        assert self._loop is not None
        acts: Acts = {
            "deliver": self._deliver,
            "died": self._lose,
            "adopt_adapters": self._adopt_adapters,
        }
        self._link.listen_on(self._loop, acts, lambda: self._lose(_GONE))

    def _replace(self, info: EngineInfo, connection: Connection) -> None:
        if self._dead is None:
            self._lose("the engine was replaced")
        self.info, self._link = info, Link(connection)
        self._dead = None
        # The gauges told what the last engine had come to.
        self._deliver([], [idle_stats(info.num_blocks)])
        if info.adapters is not None:
            self._adopt_adapters(info.adapters)
        self._listen()

    def _deliver(
        self, events: Sequence[TokenEvent | ErrorEvent], steps: Sequence[StepStats] = ()
    ) -> None:
        super()._deliver(events, steps)
        for event in events:
            if isinstance(event, ErrorEvent) or event.finish is not None:
                self._unfinished.discard(event.request_id)
        if not self._unfinished:
            self._all_finished.set()

    def _lose(self, message: str) -> None:
        """Admits nothing from here on, and tells every open stream."""
        if not self._stopping:
            logger.error("no engine: %s", message)
        self._dead = message
        self._link.close()
        self._unfinished.clear()
        self._all_finished.set()
        self._fail_open(message)
