"""One of several processes that speak HTTP on one port; ``server.workers.parent`` launches them.

    python -m server.workers.child PIPE LISTENER ENGINE PULSE

All are handles: of the pipe from the process that launched this one, of the listening socket, of a pipe
to the engine, and of the memory that shows whether the engine makes progress.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType

from engine.process.client import RemoteEngine
from engine.process.launch import begin_child
from engine.process.light_imports import without_torch
from engine.process.link import Link
from engine.process.memory import settle_memory
from engine.process.pulse import Pulse
from engine.request.errors import EngineError
from engine.request.events import FinishInfo
from engine.request.info import EngineInfo
from engine.tokenizer import load_tokenizer
from server.app import Shared, build_app, http_config
from server.errors import ApiError
from server.http.draining import Drain, DrainingServer, exit_at_signals
from server.http.protocol import HttpConfig
from server.models.table import Models
from server.request.speculative import SpeculativeChange, SpeculativeResolver
from server.settings import Settings

# Processes take a change at once, unless one of them is stopped or starved.
_ADOPT_SECONDS = 10.0


class RemoteMetrics:
    """The metrics of all workers, which the process that launched them keeps."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def observe_request(self, info: FinishInfo, num_tokens: int, tenant: str) -> None:
        self._link.call("observe_request", info, num_tokens, tenant)

    def count(self, name: str, *labels: str) -> None:
        self._link.call("count", name, *labels)

    async def expose(self, accept: str) -> tuple[bytes, str]:
        found: tuple[bytes, str] = await asyncio.wrap_future(self._link.ask("expose", accept))
        return found


async def change_remotely(
    link: Link, change: SpeculativeChange, *, from_built_in: bool
) -> SpeculativeResolver:
    """Changes the speculation of all workers, which the process that launched them decides on."""
    try:
        async with asyncio.timeout(_ADOPT_SECONDS):
            asked = link.ask("change", change, from_built_in)
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
        self._link.call("started")

    async def drain(self) -> None:
        await super().drain()
        await asyncio.wrap_future(self._link.ask("drained"))


def main() -> int:
    link, launch = begin_child()
    listening, to_engine, pulse = map(int, sys.argv[2:])
    engine = RemoteEngine(launch.info, Connection(to_engine), Pulse(pulse))
    settings = Settings.model_construct(**launch.settings)
    config = launch.config

    def ask_store(act: str, *arguments: bytes | str) -> Awaitable[bytes | None]:
        return asyncio.wrap_future(link.ask(act, *arguments))

    try:
        with without_torch():
            tokenizer = load_tokenizer(
                config.served_model, config.revision, config.trust_remote_code
            )
        shared = Shared(RemoteMetrics(link), partial(change_remotely, link), ask_store)
        app = build_app(engine, tokenizer, settings, shared)
    except (EngineError, ValueError, OSError) as error:
        link.call("failed", str(error))
        return 2
    models: Models = app.state.models

    def replace(info: EngineInfo, handle: int) -> None:
        engine.replace(info, Connection(handle))

    def adopt(resolver: SpeculativeResolver) -> None:
        models.only.bodies.translator.resolver = resolver

    # Without the process that launched it, this one ends.
    link.listen_in_thread({"replace": replace, "adopt": adopt}, lambda: os._exit(1))
    models.only.bodies.warm()
    settle_memory()
    with exit_at_signals():
        server = _Server(http_config(app, settings), models.drain, link)
        server.run([socket.socket(fileno=listening)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
