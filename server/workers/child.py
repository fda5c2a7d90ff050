"""One of several processes that speak HTTP on one port; ``server.workers.parent`` launches them.

    python -m server.workers.child PIPE LISTENER ENGINE PULSE

All are handles: of the pipe from the process that launched this one, of the listening socket, of a pipe
to the engine, and of the memory that shows how long the engine's step takes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from engine.process.client import RemoteEngine
from engine.process.link import Link
from engine.process.pulse import Pulse
from engine.request.errors import EngineError
from engine.tokenizer import load_tokenizer
from server.app import Shared, build_app, http_config
from server.endpoints import Services
from server.errors import ApiError
from server.http.draining import Drain, DrainingServer, exit_at_sigterm
from server.http.protocol import HttpConfig
from server.request.speculative import SpeculativeChange, SpeculativeResolver
from server.settings import Settings
from server.workers.parent import (
    Adopt,
    Change,
    Count,
    Drained,
    Expose,
    Failed,
    NewEngine,
    Serve,
    Started,
)

# Processes take a change at once, unless one of them is stopped or starved.
_ADOPT_SECONDS = 10.0


def _count(name: str) -> Any:
    def count(self: RemoteMetrics, *arguments: Any) -> None:
        self.link.send(Count(name, arguments))

    return count


class RemoteMetrics:
    """The metrics of all workers, which the process that launched them keeps."""

    def __init__(self, link: Link) -> None:
        self.link = link

    observe_request = _count("observe_request")
    count_request = _count("count_request")
    count_turned_away = _count("count_turned_away")
    count_rejection = _count("count_rejection")
    count_http = _count("count_http")
    count_cut_off = _count("count_cut_off")

    async def expose(self, accept: str) -> tuple[bytes, str]:
        found: tuple[bytes, str] = await asyncio.wrap_future(self.link.ask(Expose(accept)))
        return found


class RemoteSpeculation:
    """Speculation of all workers, which the process that launched them decides on."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def __call__(
        self, change: SpeculativeChange, *, from_built_in: bool
    ) -> SpeculativeResolver:
        try:
            async with asyncio.timeout(_ADOPT_SECONDS):
                asked = self._link.ask(Change(change, from_built_in))
                found: SpeculativeResolver = await asyncio.wrap_future(asked)
        except TimeoutError as error:
            message = "Not all processes of the server go by the change yet."
            raise ApiError(503, message, code="not_adopted") from error
        return found


class _Server(DrainingServer):
    """Tells when it takes connections, and goes on taking them until the requests of all workers have
    ended. A signal may reach the whole group and come from the first process as well, so further ones say
    nothing new: that process kills a worker that it wants to end at once."""

    def __init__(self, config: HttpConfig, drain: Drain, link: Link) -> None:
        super().__init__(config, drain)
        self._link = link

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._link.send(Started())

    async def drain(self) -> None:
        await super().drain()
        await asyncio.wrap_future(self._link.ask(Drained()))


def main() -> int:
    pipe, listening, to_engine, pulse = map(int, sys.argv[1:])
    link = Link(Connection(pipe))
    launch: Serve = link.receive()
    launch.logs.begin()
    engine = RemoteEngine(launch.info, Connection(to_engine), Pulse(pulse))
    settings = Settings.model_construct(**launch.settings)
    config = launch.config
    try:
        tokenizer = load_tokenizer(config.served_model, config.revision, config.trust_remote_code)
        shared = Shared(RemoteMetrics(link), RemoteSpeculation(link))
        app = build_app(engine, tokenizer, settings, shared)
    except (EngineError, ValueError, OSError) as error:
        link.send(Failed(str(error)))
        return 2
    services: Services = app.state.services

    def act(message: NewEngine | Adopt) -> None:
        if isinstance(message, NewEngine):
            engine.replace(message.info, Connection(message.handle))
        else:
            services.bodies.translator.resolver = message.resolver

    # Without the process that launched it, this one ends.
    link.listen_in_thread(act, lambda: os._exit(1))
    services.bodies.warm()
    with suppress(KeyboardInterrupt), exit_at_sigterm():
        server = _Server(http_config(app, settings), services.drain, link)
        server.run([socket.socket(fileno=listening)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
