"""A real server with the bundled model, whose steps can be held, and a line to it that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from engine.batch import ForwardOutput, InputBatch
from engine.config import EngineConfig
from engine.core import Runner
from engine.process.threaded import AsyncEngine
from worlds.client_servers import WAIT_SECONDS, wait_for
from worlds.engine_servers import engine_served

HANG = WAIT_SECONDS


class HeldRunner:
    """An engine's runner that waits before a step for which it has no permit."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_allowed = math.inf
        self._changed = threading.Condition()
        self.move = runner.move

    def allow(self, num_steps: float) -> None:
        """So many from now on."""
        with self._changed:
            self._num_allowed = num_steps
            self._changed.notify_all()

    def forward(self, batch: InputBatch) -> ForwardOutput:
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_allowed > 0, HANG)
            self._num_allowed -= 1
        return self._runner.forward(batch)


class LiveServer:
    """``port``: on the loopback interface."""

    def __init__(self, engine: AsyncEngine, port: int) -> None:
        self.port = port
        self._engine = engine
        self._runner = engine.core.runner = HeldRunner(engine.core.runner)
        # Steps that are held say nothing of what steps and drafts cost.
        for learn in ("observe", "observe_overhead", "observe_draft"):
            setattr(engine.core.cost, learn, lambda *_, **__: None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No steps meanwhile but those that are allowed: however fast the engine is, a reply that needs
        more of them does not end. Begins when earlier requests have ended."""
        wait_for(lambda: self._engine.num_open == 0)
        self._runner.allow(0)
        try:
            yield
        finally:
            self._runner.allow(math.inf)

    def step_both(self, num_steps: int) -> None:
        """Allow so many steps of two requests, once there are two; the first one may have a step to
        itself."""
        wait_for(lambda: self._engine.num_open == 2)
        self._runner.allow(num_steps)

    def step_one(self, num_steps: int) -> None:
        """Allow so many steps of a request, once there is one and no other."""
        wait_for(lambda: self._engine.num_open == 1)
        self._runner.allow(num_steps)


@contextmanager
def live_server(api_key: str | None = None) -> Iterator[LiveServer]:
    # In 8 bits on every CPU: by itself the bundled model is held so where these are the fastest.
    config = EngineConfig(max_num_seqs=4, quantization="int8")
    with engine_served(config, api_key=api_key) as found:
        yield LiveServer(found.engine, int(found.url.rpartition(":")[2]))


class Line:
    """Passes bytes to and from a server until it is cut; then it breaks what is open and refuses."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.mend()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def mend(self) -> None:
        self._do(self._listen())

    def cut(self) -> None:
        self._do(self._cut())

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG)
        self._loop.close()

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._open:
            writer.transport.abort()
        while self._open:
            await asyncio.sleep(0.005)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        ends = {writer, far_writer}
        self._open |= ends
        try:
            await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))
        finally:
            self._open -= ends


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
