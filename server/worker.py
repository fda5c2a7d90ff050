"""One of several processes that speak HTTP on one port; ``server.workers`` launches them.

python -m server.worker HANDLE
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import FrameType

from engine.errors import EngineError
from engine.events import FinishInfo
from engine.process.client import RemoteEngine
from engine.process.link import Outbox
from engine.pulse import Pulse
from engine.tokenizer import load_tokenizer, model_path
from server.app import build_app
from server.connections.draining import Drain, DrainingServer
from server.connections.protocol import HttpConfig
from server.serve import exit_at_sigterm, http_config
from server.settings import Settings
from server.workers import Count, Expose, Exposition, Failed, NewEngine, Serve, Started


class RemoteMetrics:
    """The metrics of all workers, which the process that launched them keeps."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[tuple[bytes, str]]] = {}

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
        number = next(self._numbers)
        found: asyncio.Future[tuple[bytes, str]] = asyncio.get_running_loop().create_future()
        self._asked[number] = found
        self._outbox.put(Expose(number, accept))
        try:
            return await found
        finally:
            del self._asked[number]

    def answer(self, found: Exposition) -> None:
        """From any thread."""
        waiting = self._asked.get(found.number)
        if waiting is not None:
            value = (found.content, found.content_type)
            waiting.get_loop().call_soon_threadsafe(_set, waiting, value)


def _set(waiting: asyncio.Future[tuple[bytes, str]], value: tuple[bytes, str]) -> None:
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


def _obey(control: Connection, engine: RemoteEngine, metrics: RemoteMetrics) -> None:
    try:
        while True:
            message = control.recv()
            if isinstance(message, NewEngine):
                engine.replace(message.info, Connection(recv_handle(control)))
            elif isinstance(message, Exposition):
                metrics.answer(message)
    except (EOFError, OSError):
        # Whoever launched this is gone, by whatever end.
        os._exit(1)


def main() -> int:
    control = Connection(int(sys.argv[1]))
    launch: Serve = control.recv()
    listener = socket.socket(fileno=recv_handle(control))
    to_engine = Connection(recv_handle(control))
    engine = RemoteEngine(launch.info, to_engine, Pulse(recv_handle(control)))
    logging.basicConfig(**launch.logging)
    outbox = Outbox(control)
    metrics = RemoteMetrics(outbox)
    threading.Thread(target=_obey, args=(control, engine, metrics), daemon=True).start()
    settings = Settings.model_construct(**launch.settings)
    config = launch.config
    try:
        tokenizer = load_tokenizer(model_path(config), config.revision, config.trust_remote_code)
        app = build_app(engine, tokenizer, settings, metrics)
    except (EngineError, ValueError, OSError) as error:
        outbox.put(Failed(str(error)))
        return 2
    app.state.services.bodies.warm()
    with suppress(KeyboardInterrupt), exit_at_sigterm():
        http = http_config(app, settings)
        _Server(http, app.state.services.drain, outbox).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
