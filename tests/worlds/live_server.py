"""The app behind the HTTP server that ``slipstream serve`` runs, in this process, and raw connections to
it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from server.app import build_app
from server.http.draining import DrainingServer
from server.http.listener import bind
from server.serve import http_config
from server.settings import Settings
from worlds.scripted_engine import byte_tokenizer
from worlds.serving import until

HANG = 300.0
"""Seconds after which a test that waits is taken to hang; a busy machine is no fault."""


@dataclass
class Live:
    """``raised``: signals that the server raised anew once it had ended."""

    server: DrainingServer
    address: tuple[str, int]
    running: asyncio.Future[None]
    raised: list[int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)


@asynccontextmanager
async def live(engine: Any, **settings: Any) -> AsyncIterator[Live]:
    """Serves ``engine`` for a block's length."""
    own = {"drain_seconds": 1, "body_processes": 0, "allowed_hosts": ["x", "test"]}
    chosen = Settings(**(own | settings))
    app = build_app(engine, byte_tokenizer(), chosen)
    with bind("127.0.0.1", 0) as listener:
        server = DrainingServer(http_config(app, chosen), app.state.models.drain)
        address = listener.getsockname()
        # What a second signal ended ends by it in turn, which is not the tests' own end.
        raised: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: raised.append(number))
        running = asyncio.ensure_future(server.serve([listener]))
        await until(lambda: server.started or running.done())
        try:
            yield Live(server, address, running, raised)
        finally:
            server.should_exit = True
            await asyncio.wait_for(running, HANG)
            signal.signal(signal.SIGTERM, before)


class RawConnection:
    """A client that sends and reads what the test says, and nothing else."""

    def __init__(self, live: Live, receive_buffer: int | None = None) -> None:
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.setblocking(False)
        self._address = live.address

    async def __aenter__(self) -> RawConnection:
        await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def post(self, path: str, body: dict[str, Any], *headers: str) -> None:
        await self.send(post(path, body, *headers))

    def send_no_more(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def read(self) -> bytes:
        """The next bytes; none: the server has ended the connection, in whatever way."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.sock_recv(self._socket, 1 << 16), HANG)
        except ConnectionResetError:
            return b""

    async def read_to_end(self) -> bytes:
        found = b""
        while more := await self.read():
            found += more
        return found


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    content = json.dumps(body)
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", *headers]
    lines.append(f"content-length: {len(content)}")
    return "\r\n".join([*lines, "", content]).encode()
