"""uvicorn's HTTP protocol, with bounds on what a client may send and on what it may leave undone.

Heads and trailers have limits, which hold before they are parsed. A request has to come whole, and what
is sent has to be read, within their times; who is later is cut off, which the application sees as a
client who left. A request that comes behind another waits unparsed until that one is answered.

A client may shut down its sending side while it waits for an answer: to tell it from one who left, it is
sent the bytes that every answer begins with ahead of the others, which only the former survives.

A connection is seen from both of its sides and not from within uvicorn: as an asyncio protocol, and as an
ASGI application around the one that is served.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade
from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import (
    REQUEST_ID_KEY,
    ApiError,
    bad_request,
    request_timeout,
    shutting_down,
)
from server.http.framing import Framing, HeadLimits

# Unread bytes that the transport holds before it counts as a reader who does not read.
_MAX_UNREAD_BYTES = 16 << 10
# What every answer begins with. Where its bytes are sent ahead, each pause is so many times the one
# before, 164 seconds in all. A client that has gone answers a byte with a reset, which the next meets.
_BEGINNING = b"HTTP/1.1 "
_FIRST_PAUSE_SECONDS, _PAUSE_GROWTH = 0.05, 3
# Pieces of requests that are parsed in one go; then come other connections.
_PIECES_PER_TURN = 256
# Who is refused in the middle of a request is read for so long and so far on: to close on bytes that
# nobody has read resets the connection, and the refusal may be lost. The rest of a body whose request
# has its answer is read so far, too.
_LAST_WORD_SECONDS, _MAX_IGNORED_BYTES = 1.0, 1 << 20
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
    ``count`` is told the counter and its label for each client that took longer or was refused."""

    read: float = 0.0
    write: float = 0.0
    keep_alive: int = 5
    count: Callable[[str, str], None] = lambda *_: None


class HttpConfig(Config):
    """How all processes that speak HTTP do so."""

    def __init__(
        self, app: ASGIApp, patience: Patience, head_limits: HeadLimits | None = None
    ) -> None:
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
        self.head_limits = head_limits or HeadLimits()


class Exchange:
    """A request that the application has, and its answer: how far they are."""

    def __init__(self, scope: Scope, cycle: RequestResponseCycle) -> None:
        self.scope = scope
        lengths = (value for name, value in scope["headers"] if name == b"content-length")
        encoded = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        self.is_whole = not encoded and all(value == b"0" for value in lengths)
        self.is_last = False
        # HTTP/1.0 has no chunks.
        self._ends_with_connection = scope["http_version"] == "1.0"
        self._cycle = cycle
        self._begun: _Begun | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the answer has begun; bytes sent ahead do not count."""
        return self._cycle.response_started

    def prepare(self, message: Message) -> None:
        """Before a part of the answer is sent."""
        cycle, is_head = self._cycle, message["type"] == "http.response.start"
        if is_head and self.is_last:
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        if self._ends_with_connection:
            if is_head:
                cycle.chunked_encoding, cycle.expected_content_length = False, math.inf  # type: ignore
            elif not message.get("more_body"):
                cycle.expected_content_length = len(message.get("body", b""))

    def send_ahead(self) -> bool:
        """Send the next byte of those that every answer begins with. Returns whether there was one."""
        if self._begun is None:
            # The request is here: nobody waits for leave to send it.
            self._cycle.waiting_for_100_continue = False
            self._begun = _Begun(self._cycle)
        return self._begun.send_ahead()


class _Begun:
    """Stands for a connection's transport where an answer's first bytes have been sent ahead: it leaves
    them out of the answer, and goes."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._end = cycle, cycle.transport
        self._num_bytes = 0
        cycle.transport = self  # type: ignore[assignment]

    def send_ahead(self) -> bool:
        byte = _BEGINNING[self._num_bytes : self._num_bytes + 1]
        self._end.write(byte)
        self._num_bytes += len(byte)
        return bool(byte)

    def write(self, data: bytes) -> None:
        self._cycle.transport = self._end
        self._end.write(data[self._num_bytes :])

    def is_closing(self) -> bool:
        return self._end.is_closing()

    def close(self) -> None:
        self._end.close()


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: HttpConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self._served = config.loaded_app
        self.app = self._answer
        self._patience = config.patience
        self._framing = Framing(config.head_limits)
        self._end: asyncio.Transport
        self._call_later = asyncio.get_running_loop().call_later
        self._exchange: Exchange | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        # What waits for its turn, and whether that has been called for.
        self._unparsed = b""
        self._parsing: asyncio.Handle | None = None
        self.url = b""
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._num_unread = self._num_ignored = 0

    # --- how a connection goes ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = transport
        transport.set_write_buffer_limits(_MAX_UNREAD_BYTES)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        timers = (self._reading, self._writing, self._probing, self._closing, self._parsing)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or (self._framing.has_head and not self._is_answering):
            self._num_ignored += len(data)
            if self._num_ignored > _MAX_IGNORED_BYTES:
                self._end.close()
        if self._is_refused or self._end.is_closing():
            return
        self._unparsed += data
        if self._parsing is None:
            self._parse()
        else:
            self.flow.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open for one who has sent a request and waits for its answer. Who has seen
        the answer begin, and then ends the connection, has left."""
        # The application hears of a request that has just come before this is called.
        asyncio.get_running_loop().call_soon(self._after_the_last_byte)
        return True

    def _after_the_last_byte(self) -> None:
        exchange = self._exchange
        is_waiting = exchange is not None and self._framing.is_between and not self._is_refused
        if exchange is None or exchange.is_answered or not is_waiting:
            self._end.close()
            return
        exchange.is_last = True
        self._probe(exchange, _FIRST_PAUSE_SECONDS)

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

    # --- requests are parsed piece by piece ---

    def _parse(self) -> None:
        """As much as has come, up to the end of a request whose answer is not complete."""
        self._parsing = None
        data, self._unparsed = self._unparsed, b""
        if not data or self._is_refused or self._end.is_closing():
            return
        if self._exchange is None:
            self._expect_request()
        self._unset_keepalive_if_required()
        view, begin = memoryview(data), 0
        for _ in range(_PIECES_PER_TURN):
            if begin == len(data):
                self._read_on()
                return
            if self._framing.is_between and self._is_answering:
                # Blank lines between requests are nobody's.
                self._unparsed = data[begin:].lstrip(b"\r\n")
                if self._unparsed:
                    self.flow.pause_reading()
                else:
                    self._read_on()
                return
            end = self._framing.end_of_piece(data, begin)
            if not self._feed(view[begin:end]):
                return
            begin = end
        self._unparsed = data[begin:]
        self._parse_soon()

    def _feed(self, piece: memoryview) -> bool:
        """Give the parser a piece. Returns whether the next one may follow."""
        error: ApiError | None
        try:
            self.parser.feed_data(piece)
        except HttpParserUpgrade:
            pass  # it asks for another protocol, and is answered in this one
        except HttpParserError:
            error = self._refusal or _invalid("Invalid HTTP request received.")
            self._refuse(error)
            return False
        if (error := self._framing.excess(self.url)) is not None:
            self._refuse(error)
            return False
        return True

    def _parse_soon(self) -> None:
        if self._unparsed and self._parsing is None:
            self.flow.pause_reading()
            self._parsing = self.loop.call_soon(self._parse)

    def _read_on(self) -> None:
        """Unless the application has enough to read."""
        if not (self._is_answering and len(self.cycle.body) > HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._framing.has_head:  # nobody looks at trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._refusal = self._fault_of_head()
        if self._refusal is not None:
            raise self._refusal  # which stops the parser
        super().on_headers_complete()
        self._framing.begin_body(self.headers)

    def _fault_of_head(self) -> ApiError | None:
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version == "1.0":
            self.expect_100_continue = False  # it knows no interim responses
        elif version != "1.1":
            return _invalid("This server speaks HTTP/1.1 and HTTP/1.0.")
        elif b"host" not in names:
            return _invalid("A request of HTTP/1.1 has to have a Host header.")
        if names.count(b"host") > 1:
            return _invalid("There is more than one Host header.")
        if self.parser.should_upgrade() and self._announces_body():
            # The parser takes what follows for the other protocol.
            return _invalid("A request with a body cannot ask for an Upgrade here.")
        return None

    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    def on_chunk_header(self) -> None:
        self._framing.begin_chunk()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._framing.end_request()
        self._num_ignored = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Once the application has let go of this request.
        self._parse_soon()

    # --- requests come whole ---

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application as this connection's requests meet it."""
        exchange = self._exchange = Exchange(scope, self.cycle)
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
            exchange.prepare(message)
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
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
        self._patience.count("connections_cut_off", "read")
        self._refuse(request_timeout())

    def _refuse(self, error: ApiError) -> None:
        """End the connection, and say why unless an answer to the request under way has begun."""
        is_served = self._framing.has_head or self._exchange is not None
        if self._end.is_closing() or (is_served and self.cycle.response_started):
            self._end.close()
            return
        self._patience.count("rejections", error.code or str(error.status))
        scope = None if self._exchange is None else self._exchange.scope
        content = to_json(error.body_at(scope))
        request_id = (scope or {}).get(REQUEST_ID_KEY) or uuid.uuid4().hex
        headers = {
            "date": formatdate(usegmt=True),
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
            "x-request-id": request_id,
            "request-id": request_id,
            **error.headers,
        }
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        transport = self.cycle.transport if is_served else self._end
        transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        if is_served:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close_when_read()

    def _close_when_read(self) -> None:
        self._is_refused = True
        self._unparsed = b""
        self._stop_reading_timer()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self._end.write_eof()
        self._closing = self._call_later(_LAST_WORD_SECONDS, self._end.close)

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
            self._patience.count("connections_cut_off", "write")
            self._end.abort()

    # --- a client that sends no more ---

    def _probe(self, exchange: Exchange, pause: float) -> None:
        if exchange.is_answered or self._is_refused or self._end.is_closing():
            return  # from here on the answer itself finds out
        if exchange.send_ahead():
            self._probing = self._call_later(pause, self._probe, exchange, _PAUSE_GROWTH * pause)


def _invalid(message: str) -> ApiError:
    return bad_request(None, message, "invalid_http")
