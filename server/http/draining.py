"""A server that goes on answering while its requests finish, and ends when they have."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import uvicorn

from server.http.listener import open_to_successors, url
from server.http.protocol import BoundedProtocol, HttpConfig

logger = logging.getLogger("slipstream")

# How long the last bytes may take on their way, once no request goes on.
_LAST_BYTES_SECONDS = 5.0
_LOOK_SECONDS = 0.1

Drain = Callable[[], Awaitable[None]]


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT it awaits ``drain``, after which no request goes on, while its port
    stays open; then it sees the last bytes out and ends. On the second it ends at once, and raises that
    signal anew once it has."""

    def __init__(self, config: HttpConfig, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:
            # Raised again by uvicorn in the end. The first one is not: what it asked for was done.
            self._captured_signals.append(sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            open_to_successors(listener)
        await super().startup(sockets)
        for listener in sockets or ():
            logger.info("running on %s", url(listener))

    async def main_loop(self) -> None:
        await super().main_loop()
        logger.info("draining: no new requests are taken")
        draining = asyncio.ensure_future(self._see_out())
        while not (draining.done() or self.force_exit):
            await asyncio.wait((draining,), timeout=_LOOK_SECONDS)
        if draining.done():
            draining.result()
        else:
            logger.warning("told to end once more: ending at once")
            draining.cancel()

    async def drain(self) -> None:
        """Returns when no request goes on."""
        await self._drain()

    async def _see_out(self) -> None:
        await self.drain()
        for connection in self._connections():
            connection.refuse_unsent()
        if answers := set(self.server_state.tasks):
            await asyncio.wait(answers, timeout=_LAST_BYTES_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("shutting down")
        for connection in self._connections():
            connection.cut_off(at_once=self.force_exit)
        await super().shutdown(sockets)

    def _connections(self) -> list[BoundedProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, BoundedProtocol)]


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Has ``handler`` called at SIGTERM and SIGINT within the block. The first SIGHUP, of a terminal that
    is closed, is a SIGTERM, unless the process was started to ignore it (``nohup``)."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _hang_up)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


def _hang_up(number: int, _frame: FrameType | None) -> None:
    # A shell and the kernel may both say so: two would end at once what is to end in order.
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def exit_at_signals() -> AbstractContextManager[None]:
    """SIGTERM and SIGINT end the block with the status that they have in shells, and clean up on the way.
    A ``DrainingServer`` in it takes them over while it runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    return signals_to(stop)
