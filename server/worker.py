"""One of several processes that speak HTTP on one port; ``server.workers`` launches them.

python -m server.worker HANDLE
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import FrameType
from typing import Any

from engine.errors import EngineError
from engine.events import FinishInfo
from engine.process.client import RemoteEngine
from engine.process.link import Outbox
from engine.pulse import Pulse
from engine.tokenizer import load_tokenizer
from server.app import Shared, build_app
from server.connections.draining import Drain, DrainingServer
from server.connections.protocol import HttpConfig
from server.errors import ApiError
from server.request.large_bodies import BodyReader
from server.request.live_speculation import SpeculativeChange
from server.request.speculative import SpeculativeResolver
from server.serve import exit_at_sigterm, http_config
from server.settings import Settings
from server.speculation_changes import Adopted, Change, Changed, NewSpeculation
from server.workers import (
    AllDrained,
    Count,
    Drained,
    Expose,
    Exposition,
    Failed,
    NewEngine,
    Serve,
    Started,
)

# Processes take a change at once, unless one of them is stopped or starved.
_ADOPT_SECONDS = 10.0


class Questions:
    """What this process asks the one that launched it, and waits for."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, question: Callable[[int], Any]) -> Any:
        """The answer to ``question``, given its number."""
        number = next(self._numbers)
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = found
        self._outbox.put(question(number))
        try:
            return await found
        finally:
            del self._asked[number]

    def answer(self, number: int, value: Any) -> None:
        """From any thread."""
        waiting = self._asked.get(number)
        if waiting is not None:
            waiting.get_loop().call_soon_threadsafe(_set, waiting, value)


class RemoteMetrics:
    """The metrics of all workers, which the process that launched them keeps."""

    def __init__(self, outbox: Outbox, questions: Questions) -> None:
        self._outbox = outbox
        self._questions = questions

    def observe_request(self, info: FinishInfo, num_tokens: int, tenant: str) -> None:
        self._outbox.put(Count("observe_request", (info, num_tokens, tenant)))

    def count_request(self, outcome: str, tenant: str) -> None:
        self._outbox.put(Count("count_request", (outcome, tenant)))

    def count_turned_away(self, reason: str, tenant: str) -> None:
        self._outbox.put(Count("count_turned_away", (reason, tenant)))

    def count_rejection(self, reason: str) -> None:
        self._outbox.put(Count("count_rejection", (reason,)))

    def count_http(self, method: str, path: str, status: int) -> None:
        self._outbox.put(Count("count_http", (method, path, status)))

    def count_cut_off(self, waiting_for: str) -> None:
        self._outbox.put(Count("count_cut_off", (waiting_for,)))

    async def expose(self, accept: str) -> tuple[bytes, str]:
        found: Exposition = await self._questions.ask(partial(Expose, accept=accept))
        return found.content, found.content_type


class RemoteSpeculation:
    """Speculation of all workers, which the process that launched them decides on."""

    def __init__(self, outbox: Outbox, questions: Questions) -> None:
        self._outbox = outbox
        self._questions = questions
        self._lock = threading.Lock()
        self._bodies: BodyReader | None = None
        self._latest: SpeculativeResolver | None = None

    async def __call__(
        self, change: SpeculativeChange, *, from_built_in: bool
    ) -> SpeculativeResolver:
        question = partial(Change, change=change, from_built_in=from_built_in)
        try:
            async with asyncio.timeout(_ADOPT_SECONDS):
                answer: Changed = await self._questions.ask(question)
        except TimeoutError as error:
            message = "Not all processes of the server go by the change yet."
            raise ApiError(503, message, code="not_adopted") from error
        if isinstance(answer.outcome, ApiError):
            raise answer.outcome
        return answer.outcome

    def attach(self, bodies: BodyReader) -> None:
        """From here on ``bodies`` goes by what is decided."""
        with self._lock:
            self._bodies = bodies
            if self._latest is not None:
                bodies.resolver = self._latest

    def adopt(self, decided: NewSpeculation) -> None:
        """From any thread."""
        with self._lock:
            self._latest = decided.resolver
            if self._bodies is not None:
                self._bodies.resolver = decided.resolver
        self._outbox.put(Adopted(decided.version))


def _together(drain: Drain, questions: Questions) -> Drain:
    """The port answers until the requests of all workers have ended."""

    async def drain_all() -> None:
        await drain()
        await questions.ask(Drained)

    return drain_all


def _set(waiting: asyncio.Future[Any], value: Any) -> None:
    if not waiting.done():
        waiting.set_result(value)


class _Server(DrainingServer):
    """Tells when it takes connections. A signal may reach the whole group and come from the first process
    as well, so further ones say nothing new: that process kills whom it wants to end at once."""

    def __init__(self, config: HttpConfig, drain: Drain, outbox: Outbox) -> None:
        super().__init__(config, drain)
        self._outbox = outbox

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._outbox.put(Started())


def _obey(
    control: Connection, engine: RemoteEngine, questions: Questions, speculation: RemoteSpeculation
) -> None:
    try:
        while True:
            message = control.recv()
            if isinstance(message, NewEngine):
                engine.replace(message.info, Connection(recv_handle(control)))
            elif isinstance(message, Exposition | Changed | AllDrained):
                questions.answer(message.number, message)
            elif isinstance(message, NewSpeculation):
                speculation.adopt(message)
    except (EOFError, OSError):
        # Whoever launched this is gone, by whatever end.
        os._exit(1)


def main() -> int:
    control = Connection(int(sys.argv[1]))
    launch: Serve = control.recv()
    listener = socket.socket(fileno=recv_handle(control))
    to_engine = Connection(recv_handle(control))
    engine = RemoteEngine(launch.info, to_engine, Pulse(recv_handle(control)))
    launch.logs.begin()
    outbox = Outbox(control)
    questions = Questions(outbox)
    metrics = RemoteMetrics(outbox, questions)
    speculation = RemoteSpeculation(outbox, questions)
    told = (control, engine, questions, speculation)
    threading.Thread(target=_obey, args=told, daemon=True).start()
    settings = Settings.model_construct(**launch.settings)
    config = launch.config
    try:
        tokenizer = load_tokenizer(config.served_model, config.revision, config.trust_remote_code)
        app = build_app(engine, tokenizer, settings, Shared(metrics, speculation))
    except (EngineError, ValueError, OSError) as error:
        outbox.put(Failed(str(error)))
        return 2
    speculation.attach(app.state.services.bodies)
    app.state.services.bodies.warm()
    with suppress(KeyboardInterrupt), exit_at_sigterm():
        http = http_config(app, settings)
        drain = _together(app.state.services.drain, questions)
        _Server(http, drain, outbox).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
