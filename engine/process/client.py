"""An engine in another process, as the asyncio side sees it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from multiprocessing.connection import Connection

from engine.errors import EngineDeadError, EngineError
from engine.events import ErrorEvent, StepResult
from engine.info import EngineInfo
from engine.params import GenerationRequest, Tenant
from engine.process.link import Abort, Charge, Charged, Died, Outbox, Submit
from engine.pulse import Pulse
from engine.stats import idle_stats
from engine.streams import EventStreams

logger = logging.getLogger(__name__)

# What was aborted at the end ends with the step under way.
_LAST_EVENTS_SECONDS = 30.0


class RemoteEngine(EventStreams):
    """Streams requests' events from the engine at the other end of a pipe. The event loop reads the pipe:
    one message for each step, whoever's tokens it brings. ``pulse``: the engine's; None: nobody looks
    how long its steps take."""

    def __init__(
        self, info: EngineInfo, connection: Connection, pulse: Pulse | None = None
    ) -> None:
        super().__init__(info)
        self.pulse = pulse or self.pulse
        self._connection = connection
        self._outbox = Outbox(connection)
        self._unfinished: set[str] = set()
        self._all_finished = asyncio.Event()
        self._charges: dict[int, asyncio.Future[EngineError | None]] = {}
        self._charge_numbers = itertools.count()

    async def start(self) -> None:
        await super().start()
        self._listen()

    def replace(self, info: EngineInfo, connection: Connection) -> None:
        """Another engine has taken the place of one that ended. From any thread."""
        if self._loop is None:
            self.info, self._connection, self._outbox = info, connection, Outbox(connection)
        else:
            self._loop.call_soon_threadsafe(self._replace, info, connection)

    async def charge(self, tenant: Tenant) -> None:
        self._refuse_when_ended()
        number = next(self._charge_numbers)
        self._charges[number] = asyncio.get_running_loop().create_future()
        self._outbox.put(Charge(number, tenant))
        try:
            error = await self._charges[number]
        finally:
            del self._charges[number]
        if error is not None:
            raise error

    def abort(self, request_id: str) -> None:
        if self._dead is None:
            self._outbox.put(Abort(request_id))

    def _submit(self, request: GenerationRequest) -> None:
        self._unfinished.add(request.request_id)
        self._outbox.put(Submit(request))

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
        self._loop.add_reader(self._connection.fileno(), self._read)
        # uvloop has made it non-blocking: then a message that is not all there yet would look like an
        # engine that has gone, and one for which the pipe has no room like a reader that has.
        os.set_blocking(self._connection.fileno(), True)

    def _replace(self, info: EngineInfo, connection: Connection) -> None:
        if self._dead is None:
            self._lose("the engine was replaced")
        self.info = info
        self._connection, self._outbox = connection, Outbox(connection)
        self._dead = None
        # The gauges told what the last engine had come to.
        self._deliver(StepResult([], idle_stats(info.num_blocks)))
        self._listen()

    def _read(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            message = Died("the engine's process is gone")
        if isinstance(message, Died):
            self._lose(message.message)
        elif isinstance(message, Charged):
            self._answer(message.number, message.error)
        else:
            self._deliver(message)

    def _answer(self, number: int, error: EngineError | None) -> None:
        answer = self._charges.get(number)
        if answer is not None and not answer.done():  # else who asked has gone
            answer.set_result(error)

    def _deliver(self, result: StepResult) -> None:
        super()._deliver(result)
        for event in result.events:
            if isinstance(event, ErrorEvent) or event.finish is not None:
                self._unfinished.discard(event.request_id)
        if not self._unfinished:
            self._all_finished.set()

    def _lose(self, message: str) -> None:
        """From here on nothing is admitted, and every open stream is told."""
        assert self._loop is not None
        if not self._stopping:
            logger.error("no engine: %s", message)
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        self._dead = message
        self._unfinished.clear()
        self._all_finished.set()
        self._fail_open(message)
        for number in self._charges:
            self._answer(number, EngineDeadError(message))
