"""uvicorn's HTTP protocol, with bounds on what a client may leave undone.

A request has to come whole, and what is sent has to be read, within their times; who is later is cut
off, which the application sees as a client who left. A client may shut down its sending side while it
waits for an answer: to tell it from one who left, it is sent interim responses, which only the former
survives.

A connection is seen from both of its sides and not from within uvicorn: as an asyncio protocol, and as an
ASGI application around the one that is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError, bad_request, request_timeout, shutting_down

# Unread bytes that the transport holds before it counts as a reader who does not read.
_MAX_UNREAD_BYTES = 16 << 10
# Pauses between interim responses. A client that has gone answers the first with a reset, which the
# second runs into.
_FIRST_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 0.05, 5.0
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
SEND_BODY = "slipstream.send_body"
"""In a request's scope: a ``SendBody``, for a body in many pieces. They need not go through all that
looks at heads and ends only, nor each wake a task."""
SendBody = Callable[[bytes], Coroutine[Any, Any, None] | None]
"""Sends a piece of an answer's body that is not its last, after the head. Where the client reads too
slowly it returns what sends the piece once there is room."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a client may take: ``read`` to send a request, from its first byte or the connection's
    start; ``write`` to take what waits for it; 0 is for ever. ``keep_alive``: to begin another request.
    ``cut_off`` hears "read" or "write" of each client that took longer."""

    read: float = 0.0
    write: float = 0.0
    keep_alive: int = 5
    cut_off: Callable[[str], None] = lambda _: None


class HttpConfig(Config):
    """How all processes that speak HTTP do so."""

    def __init__(self, app: ASGIApp, patience: Patience) -> None:
        super().__init__(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=patience.keep_alive,
            # What is still open then has been cut off, and only has to notice.
            timeout_graceful_shutdown=5,
        )
        self.patience = patience


class Exchange:
    """A request that the application has, and its answer: how far they are."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        lengths = (value for name, value in scope["headers"] if name == b"content-length")
        encoded = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        self.is_whole = not encoded and all(value == b"0" for value in lengths)
        self.knows_interim_responses = scope["http_version"] != "1.0"
        self.is_answered = False
        self.is_last = False


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: HttpConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self._served = config.loaded_app
        self.app = self._answer
        self._patience = config.patience
        self._end: asyncio.Transport
        self._call_later = asyncio.get_running_loop().call_later
        self._exchange: Exchange | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._num_unread = 0

    # --- how a connection goes ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = transport
        transport.set_write_buffer_limits(_MAX_UNREAD_BYTES)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self._expect_request()
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open for one who has sent a request and waits for its answer. Who has seen
        the answer begin, and then ends the connection, has left."""
        # The application hears of a request that has just come before this is called.
        asyncio.get_running_loop().call_soon(self._after_the_last_byte)
        return True

    def _after_the_last_byte(self) -> None:
        exchange = self._exchange
        if exchange is None or exchange.is_answered or not exchange.knows_interim_responses:
            self._end.close()
            return
        exchange.is_last = True
        self._probe(exchange, _FIRST_PROBE_SECONDS)

    def refuse_unsent(self) -> None:
        """The server ends: nobody waits for the rest of a request."""
        exchange = self._exchange
        if exchange is not None and not (exchange.is_whole or exchange.is_answered):
            self._refuse(shutting_down())

    def cut_off(self, at_once: bool) -> None:
        """The server has ended: so does the connection. Unless that is ``at_once``, what has been written
        may still be read."""
        if self._exchange is None and not at_once:
            self._end.close()
        else:
            self._end.abort()

    # --- requests come whole ---

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application as this connection's requests meet it."""
        exchange = self._exchange = Exchange(scope)
        scope[SEND_BODY] = partial(self._send_body, send)
        if exchange.is_whole:
            self._stop_reading_timer()
        else:
            self._expect_request()

        async def receive_and_note() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                exchange.is_whole = True
                self._stop_reading_timer()
            return message

        async def send_and_note(message: Message) -> None:
            is_head = message["type"] == "http.response.start"
            if is_head:
                exchange.is_answered = True
                if exchange.is_last:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)
            if not (is_head or message.get("more_body")):
                self._end_of(exchange)

        try:
            await self._served(scope, receive_and_note, send_and_note)
        finally:
            self._end_of(exchange)

    def _send_body(self, send: Send, content: bytes) -> Coroutine[Any, Any, None] | None:
        sending = cast(
            Coroutine[Any, Any, None],
            send({"type": "http.response.body", "body": content, "more_body": True}),
        )
        if self.flow.write_paused:
            return sending
        try:
            sending.send(None)
        except StopIteration:
            return None
        raise RuntimeError("uvicorn waits for something besides a client who reads too slowly")

    def _end_of(self, exchange: Exchange) -> None:
        """The request has been answered; harmless when repeated."""
        if self._exchange is exchange:
            self._exchange = None
            self._stop_reading_timer()

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _expect_request(self) -> None:
        if self._reading is None and self._patience.read > 0 and not self._end.is_closing():
            self._reading = self._call_later(self._patience.read, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        self._reading = None
        self._patience.cut_off("read")
        self._refuse(request_timeout())

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, or could be read in two ways."""
        self._refuse(bad_request(None, msg, "invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """End the connection, and say why unless an answer is under way."""
        exchange = self._exchange
        if exchange is None or not exchange.is_answered:
            content = to_json(error.body_at(None if exchange is None else exchange.scope))
            headers = {
                "date": formatdate(usegmt=True),
                "content-type": "application/json",
                "content-length": str(len(content)),
                "connection": "close",
                **error.headers,
            }
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self._end.write("\r\n".join([*lines, "", ""]).encode() + content)
        self._end.close()

    # --- answers are read ---

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._patience.write > 0:
            self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _watch_reader(self) -> None:
        self._num_unread = self._end.get_write_buffer_size()
        self._writing = self._call_later(self._patience.write, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        # A long answer may take several turns; byte by byte it would never end.
        if self._num_unread - self._end.get_write_buffer_size() >= _MAX_UNREAD_BYTES:
            self._watch_reader()
        else:
            self._writing = None
            self._patience.cut_off("write")
            self._end.abort()

    # --- a client that sends no more ---

    def _probe(self, exchange: Exchange, pause: float) -> None:
        if exchange.is_answered or self._end.is_closing():
            return  # from here on the answer itself finds out
        self._end.write(_PROBE)
        longer = min(2 * pause, _LONGEST_PROBE_SECONDS)
        self._probing = self._call_later(pause, self._probe, exchange, longer)
