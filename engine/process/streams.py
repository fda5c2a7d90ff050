"""The asyncio side of an engine, wherever it runs: a stream of events for every open request.

Every admitted request's queue receives events until one that finishes it; if the engine dies, every
open request gets an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from engine.process.pulse import Pulse
from engine.request.errors import (
    AdapterError,
    DeadlineExceededError,
    EngineDeadError,
    RequestError,
    ShuttingDownError,
    UnknownAdapterError,
    panics_as_errors,
)
from engine.request.events import ErrorEvent, TokenEvent
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import GenerationRequest, Tenant
from engine.request.stats import StepStats

logger = logging.getLogger(__name__)

StepListener = Callable[[StepStats], None]
AdapterListener = Callable[[tuple[AdapterInfo, ...]], None]
# After a request's deadline, for which the engine has to be between steps.
_GRACE_SECONDS = 1.0


Take = Callable[[TokenEvent], Coroutine[Any, Any, None] | None]
"""Takes a request's next event. It returns what the one after that has to wait for, if anything."""
_Turn = asyncio.Future[Coroutine[Any, Any, None] | None]


class _Stream:
    """The events of a request on their way to its one reader. ``has_ended``: the last one is here."""

    __slots__ = ("_events", "_take", "_turn", "has_ended", "num_tokens")

    def __init__(self) -> None:
        self.has_ended = False
        self.num_tokens = 0
        # Those that the reader has had no time for.
        self._events: deque[TokenEvent | ErrorEvent] = deque()
        # Who takes events as they come, and what wakes the reader's task where it has something to do.
        self._take: Take | None = None
        self._turn: _Turn | None = None

    def put(self, event: TokenEvent | ErrorEvent) -> None:
        """The next event. What comes after the last is dropped."""
        if self.has_ended:
            return
        self.has_ended = isinstance(event, ErrorEvent) or event.finish is not None
        if not isinstance(event, ErrorEvent):
            self.num_tokens += len(event.token_ids)
        turn = self._turn
        if turn is None or turn.done():  # it may have been cancelled just now
            self._events.append(event)
        elif self._take is None or isinstance(event, ErrorEvent):
            self._events.append(event)
            turn.set_result(None)
        else:
            self._hand_over(event, self._take, turn)

    def _hand_over(self, event: TokenEvent, take: Take, turn: _Turn) -> None:
        try:
            with panics_as_errors():
                wait = take(event)
        except Exception as error:
            turn.set_exception(error)
        else:
            if wait is not None or self.has_ended:
                turn.set_result(wait)

    async def get(self) -> TokenEvent:
        """Raises the error that ends the request."""
        while not self._events:
            await self._wait(None)
        event = self._events.popleft()
        if isinstance(event, ErrorEvent):
            raise event.error
        return event

    async def hand_to(self, take: Take) -> None:
        """Passes on all events up to the last. An event that arrives while ``take`` is idle is handled
        at once, by the caller that puts it, without waking a task. Raises what ``take`` raises, and the
        error that ends the request."""
        while self._events or not self.has_ended:
            wait = take(await self.get()) if self._events else await self._wait(take)
            if wait is not None:
                await wait

    async def _wait(self, take: Take | None) -> Coroutine[Any, Any, None] | None:
        """Until there is an event, or one was taken that others wait for, or that is the last."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._turn = turn
        self._take = take
        try:
            return await turn
        except asyncio.CancelledError:
            # Settled a moment before that: nobody will wait any more.
            if not turn.cancelled() and turn.exception() is None and (wait := turn.result()):
                wait.close()
            raise
        finally:
            self._turn = self._take = None


class EventStreams(ABC):
    """An engine as the server sees it: it knows nothing else of what runs below. All calls come from the
    event loop that ``start`` ran on, and none of them blocks it."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.pulse = Pulse()
        self._streams: dict[str, _Stream] = {}
        self._listeners: list[StepListener] = []
        self._adapter_listeners: list[AdapterListener] = []
        self._idle_listeners: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: str | None = "the engine has not been started"
        self._stopping = False
        self._drained = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        """False before the start, once the engine has died, and once it was stopped."""
        return self._dead is None

    @property
    def stalled_seconds(self) -> float:
        """How long the engine has made no progress; 0 while it does, or has nothing to do."""
        return self.pulse.stalled_seconds

    @property
    def num_open(self) -> int:
        """Requests whose events are still read."""
        return len(self._streams)

    def add_step_listener(self, callback: StepListener) -> None:
        """Call back on the event loop with every step, or several as one, by the time that a request of
        theirs has ended; and when aborts have left nothing to run: then with gauges only, and
        ``num_rows`` 0."""
        self._listeners.append(callback)

    def add_adapter_listener(self, callback: AdapterListener) -> None:
        """Call back on the event loop with all adapters whenever one has come or gone."""
        self._adapter_listeners.append(callback)

    def add_idle_listener(self, callback: Callable[[], None]) -> None:
        """Call back on the event loop whenever the last open request has ended."""
        self._idle_listeners.append(callback)

    async def load_adapter(self, name: str, path: str, may_replace: bool = False) -> AdapterInfo:
        """Load an adapter; requests from any process may name it once this returns. ``may_replace``: it
        may replace one of the same name, which running requests keep. Raises AdapterError,
        EngineDeadError, ShuttingDownError."""
        del name, path, may_replace
        raise AdapterError("this engine serves no adapters")

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Let an adapter go: requests that run with it go on, no other finds it. Raises
        UnknownAdapterError, EngineDeadError, ShuttingDownError."""
        raise UnknownAdapterError(name)

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
        with self._open(request) as stream:
            finish = None
            while finish is None:
                event = await stream.get()
                finish = event.finish
                yield event

    async def stream(self, request: GenerationRequest, take: Take) -> None:
        """Hand a request's events to ``take``, each as soon as it is there and nothing has to be waited
        for; returns after the last. Cancelling this aborts the request in the engine. Raises what
        ``generate`` raises, and what ``take`` raises."""
        with self._open(request) as stream:
            await stream.hand_to(take)

    @contextmanager
    def _open(self, request: GenerationRequest) -> Iterator[_Stream]:
        """A request that is aborted where its last event has not come by the end of the block."""
        request_id = request.request_id
        self._refuse_when_ended()
        if request_id in self._streams:
            raise RequestError("request_id", f"request id {request_id!r} is in use")
        stream = _Stream()
        self._submit(request)
        self._streams[request_id] = stream
        timer = self._expire_later(request)
        try:
            yield stream
        finally:
            del self._streams[request_id]
            if timer is not None:
                timer.cancel()
            self._release(request_id)
            if not stream.has_ended:
                self.abort(request_id)
            if not self._streams:
                self._drained.set()
                for listener in self._idle_listeners:
                    listener()

    def _expire_later(self, request: GenerationRequest) -> asyncio.TimerHandle | None:
        """The engine ends late requests between steps; this ends one where it does not come to that."""
        if request.deadline is None:
            return None
        seconds = request.deadline - time.perf_counter() + _GRACE_SECONDS
        expire = partial(self._expire, request.request_id)
        return asyncio.get_running_loop().call_later(max(0.0, seconds), expire)

    def _expire(self, request_id: str) -> None:
        stream = self._streams[request_id]
        if not stream.has_ended:
            self.abort(request_id)
            stream.put(ErrorEvent(request_id, DeadlineExceededError(stream.num_tokens)))

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

    def _adopt_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        self.info = replace(self.info, adapters=adapters)
        for listener in self._adapter_listeners:
            listener(adapters)

    async def _wait_until_drained(self, seconds: float) -> bool:
        """Whether the last stream has been read to its end within so many seconds."""
        if self._streams:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), seconds)
            except TimeoutError:
                return False
        return True

    def _deliver(
        self, events: Sequence[TokenEvent | ErrorEvent], steps: Sequence[StepStats] = ()
    ) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else the client has gone
                stream.put(event)
        for step in steps:
            for listener in self._listeners:
                listener(step)

    def _fail_open(self, message: str) -> None:
        kind = ShuttingDownError if self._stopping else EngineDeadError
        for request_id, stream in self._streams.items():
            stream.put(ErrorEvent(request_id, kind(message)))
