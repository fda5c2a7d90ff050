"""uvicorn's HTTP protocol, with bounds on what a client may leave undone.

A request has to come whole, and what is sent has to be read, within their times; who is later is cut
off, which the application sees as a client who left. A client may shut down its sending side while it
waits for an answer: to tell it from one who left, it is sent interim responses, which only the former
survives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError, bad_request, request_timeout, shutting_down

logger = logging.getLogger(__name__)

# Unread bytes that the transport holds before it counts as a reader who does not read.
_MAX_UNREAD_BYTES = 16 << 10
# Pauses between interim responses. A client that has gone answers the first with a reset, which the
# second runs into.
_FIRST_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 0.05, 5.0
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


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

    def __init__(self, app: Any, patience: Patience) -> None:
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


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, config: HttpConfig, *arguments: Any, **more: Any) -> None:
        super().__init__(config, *arguments, **more)
        self._patience = config.patience
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._num_unread = 0

    # --- how a connection goes ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_MAX_UNREAD_BYTES)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._awaits_request and not self.transport.is_closing():
            self._expect_request()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: for one who has sent a request and waits for its answer.
        Who has seen the answer begin, and then ends the connection, has left."""
        cycle = self.cycle
        waits = self._may_answer and not self._awaits_request
        # Older clients know no interim responses.
        if not waits or cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._probe(_FIRST_PROBE_SECONDS)
        return True

    def refuse_unsent(self) -> None:
        """The server ends: nobody waits for the rest of a request."""
        if self._awaits_request and self._may_answer and not self._is_idle:
            self._refuse(shutting_down())

    def cut_off(self, at_once: bool) -> None:
        """The server has ended: so does the connection. Unless that is ``at_once``, what has been written
        may still be read."""
        if self._is_idle and not at_once:
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _awaits_request(self) -> bool:
        """Whether the next bytes are for the client to send."""
        return not self.pipeline and (self._is_idle or self.cycle.more_body)

    @property
    def _may_answer(self) -> bool:
        """Whether no answer is under way, into which another would be written."""
        return not self.pipeline and (self._is_idle or not self.cycle.response_started)

    # --- requests come whole ---

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_reading_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_idle and self._awaits_request:  # half of it was sent behind the last one
            self._expect_request()

    def _expect_request(self) -> None:
        if self._reading is None and self._patience.read > 0:
            self._reading = self.loop.call_later(self._patience.read, self._on_read_timeout)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _on_read_timeout(self) -> None:
        self._reading = None
        self._patience.cut_off("read")
        if self._may_answer:
            self._refuse(request_timeout())
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What comes is no HTTP, or could be read in two ways."""
        if self._may_answer:
            self._refuse(bad_request(None, msg, "invalid_http"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        if not self._is_idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        content = to_json(error.body())
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(content)).encode()))
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        lines = [b"%b: %b\r\n" % header for header in self.server_state.default_headers + headers]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", content)))
        self.transport.close()

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
        self._num_unread = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self._patience.write, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        # A long answer may take several turns; byte by byte it would never end.
        if self._num_unread - self.transport.get_write_buffer_size() >= _MAX_UNREAD_BYTES:
            self._watch_reader()
        else:
            self._writing = None
            self._patience.cut_off("write")
            self.transport.abort()

    # --- a client that sends no more ---

    def _probe(self, pause: float) -> None:
        if self.cycle.response_started or self.transport.is_closing():
            return  # from here on the answer itself finds out
        self.transport.write(_PROBE)
        longer = min(2 * pause, _LONGEST_PROBE_SECONDS)
        self._probing = self.loop.call_later(pause, self._probe, longer)
