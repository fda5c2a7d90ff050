"""The asyncio side of an engine, wherever it runs: a stream of events for every open request.

Every admitted request's queue receives events until one that finishes it; if the engine dies, every
open request is told.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable

from engine.process.pulse import Pulse
from engine.request.errors import EngineDeadError, RequestError, ShuttingDownError
from engine.request.events import ErrorEvent, StepResult, TokenEvent
from engine.request.info import EngineInfo
from engine.request.params import GenerationRequest, Tenant
from engine.request.stats import StepStats

logger = logging.getLogger(__name__)

StepListener = Callable[[StepStats], None]
_Stream = asyncio.Queue[TokenEvent | ErrorEvent]


class EventStreams(ABC):
    """An engine as the server sees it: it knows nothing else of what runs below. All calls come from the
    event loop that ``start`` ran on, and none of them blocks it."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.pulse = Pulse()
        self._streams: dict[str, _Stream] = {}
        self._listeners: list[StepListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: str | None = "the engine has not been started"
        self._stopping = False
        self._drained = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        """False before the start, once the engine has died, and once it was stopped."""
        return self._dead is None

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken; 0 while there is none."""
        return self.pulse.step_seconds

    @property
    def num_open(self) -> int:
        """Requests whose events are still read."""
        return len(self._streams)

    def add_step_listener(self, callback: StepListener) -> None:
        """Call back on the event loop after every step, and when aborts have left nothing to run:
        then with gauges only, and ``num_rows`` 0."""
        self._listeners.append(callback)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._dead = None

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give open ones ``drain_seconds`` to finish, abort the rest, end the
        engine. Every open request gets its last event."""
        self._stopping = True
        if (
            drain_seconds > 0
            and self.is_alive
            and not await self._wait_until_drained(drain_seconds)
        ):
            logger.warning("aborting %d requests after the drain time", len(self._streams))
        await self._end()
        self._dead = self._dead or "the engine was stopped"
        self._fail_open("the server is shutting down")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Stream one request. Closing the iterator early aborts the request in the engine.

        Raises RequestError, QueueFullError, EngineDeadError before the first event; RequestFailedError
        or EngineDeadError later; ShuttingDownError, which is one, once ``stop`` was called.
        """
        request_id = request.request_id
        self._refuse_when_ended()
        if request_id in self._streams:
            raise RequestError("request_id", f"request id {request_id!r} is in use")
        stream: _Stream = asyncio.Queue()
        self._submit(request)
        self._streams[request_id] = stream
        finished = False
        try:
            while not finished:
                event = await stream.get()
                if isinstance(event, ErrorEvent):
                    finished = True
                    raise event.error
                finished = event.finish is not None
                yield event
        finally:
            del self._streams[request_id]
            self._release(request_id)
            if not self._streams:
                self._drained.set()
            if not finished:
                self.abort(request_id)

    def _refuse_when_ended(self) -> None:
        """Raises EngineDeadError, ShuttingDownError."""
        if self._stopping:
            raise ShuttingDownError("the server is shutting down")
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    @abstractmethod
    async def charge(self, tenant: Tenant) -> None:
        """Count a request of the tenant in which the engine has no other part. Raises TenantLimitError,
        EngineDeadError, ShuttingDownError."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request before the next step. A stream that is still read gets a last event, whose
        ``finish.reason`` is "abort" and which accounts for the work done: so a stop string, which only
        the server can see, ends a request without losing its statistics."""

    @abstractmethod
    def _submit(self, request: GenerationRequest) -> None:
        """Hand a request to the engine; what refuses it is raised here or comes as its first event."""

    def _release(self, request_id: str) -> None:  # noqa: B027  (nothing, unless an engine counts)
        """The request's events are read no more."""

    @abstractmethod
    async def _end(self) -> None:
        """Abort what is open, deliver the last events, and let the engine go."""

    async def _wait_until_drained(self, seconds: float) -> bool:
        """Whether the last stream has been read to its end within so many seconds."""
        if self._streams:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), seconds)
            except TimeoutError:
                return False
        return True

    def _deliver(self, result: StepResult) -> None:
        for event in result.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else the client has gone
                stream.put_nowait(event)
        if result.stats is not None:
            for listener in self._listeners:
                listener(result.stats)

    def _fail_open(self, message: str) -> None:
        kind = ShuttingDownError if self._stopping else EngineDeadError
        for request_id, stream in self._streams.items():
            stream.put_nowait(ErrorEvent(request_id, kind(message)))
