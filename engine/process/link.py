"""How our processes speak with each other: calls by name over pipes, and questions with answers.

The pipes are multiprocessing's: pickled messages over Unix socket pairs, whose two ends belong to the
same program on the same machine. A process has one reader per link. The reader alone notices that the
peer has gone, by the end of what can be read; what is sent to a peer that has gone is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, NamedTuple

from engine.request.errors import EngineError

logger = logging.getLogger(__name__)

# A pipe that is writable at all takes this much without waiting: the kernel calls one writable while a
# quarter of its buffer, 208 KiB as Linux comes, is in use at most.
_AT_ONCE = 32 << 10

Acts = Mapping[str, Callable[..., Any]]
"""The functions that the peer may call, by name. What one returns or raises for a question is the answer;
of a ``Future`` it is the outcome, whenever that comes."""


class PeerGoneError(Exception):
    """The process at the other end has gone, or what it says cannot be read any more."""


class _Call(NamedTuple):
    """``number``: of a question; None where no answer is wanted. With ``has_handle`` a file handle
    follows, which is the last argument."""

    name: str
    arguments: tuple[Any, ...]
    number: int | None = None
    has_handle: bool = False


class _Answer(NamedTuple):
    """Settles the question with this number: with ``error``, unless that is None."""

    number: int
    value: Any = None
    error: Exception | None = None


class Link:
    """One end of a pipe between two processes. Any thread may send and ask, and never waits for the
    reader at the other end, however slow that is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, int | None]] = deque()
        self._sender: threading.Thread | None = None
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._is_open = True
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- sending ---

    def call(self, name: str, *arguments: Any, handle: int | None = None) -> None:
        """Have the peer call a function, after what was sent before. ``handle``: a file handle of this
        process, of which the function gets a duplicate as its last argument, and has to close it."""
        self.send(_Call(name, arguments, has_handle=handle is not None), handle)

    def send(self, message: Any, handle: int | None = None) -> None:
        """Send what ``receive`` is to return at the other end. What the pipe has no room for goes out
        from a thread, which lives as long as there is something left."""
        data = ForkingPickler.dumps(message)
        with self._lock:
            if not self._is_open:
                return
            own = None if handle is None else os.dup(handle)
            if self._waiting or len(data) > _AT_ONCE or not self._writable.poll(0):
                self._waiting.append((data, own))
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_waiting, daemon=True)
                    self._sender.start()
            else:
                self._write(data, own)

    def ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Returns what the peer's function returns or raises, once it is there. PeerGoneError where the
        peer goes before that."""
        answer: Future[Any] = Future()
        with self._lock:
            if not self._is_open:
                answer.set_exception(PeerGoneError())
                return answer
            number = next(self._numbers)
            self._asked[number] = answer
        self.send(_Call(name, arguments, number))
        return answer

    def _send_waiting(self) -> None:
        while self._sender is not None:
            # What is being sent stays in the queue, so that nothing overtakes it.
            self._write(*self._waiting[0])
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    self._sender = None

    def _write(self, data: Any, handle: int | None) -> None:
        """Drops what nobody is left to read."""
        with suppress(OSError):
            self._connection.send_bytes(data)
            if handle is not None:
                send_handle(self._connection, handle, None)
        if handle is not None:
            os.close(handle)

    # --- reading ---

    def receive(self) -> Any:
        """Wait for the next message. Raises PeerGoneError where there will be none."""
        try:
            message = self._connection.recv()
            if isinstance(message, _Call) and message.has_handle:
                handle = recv_handle(self._connection)
                message = message._replace(arguments=(*message.arguments, handle))
        except (EOFError, OSError) as error:
            raise PeerGoneError from error
        except Exception as error:
            if self._is_open:  # and was not closed meanwhile, by another thread
                logger.exception("a message of another process cannot be read")
            raise PeerGoneError from error
        return message

    def listen_in_thread(self, acts: Acts, lost: Callable[[], None]) -> None:
        """Do what the peer asks, in a thread that keeps no process alive; then close this end, and call
        ``lost``."""

        def listen() -> None:
            while self._hear(acts):
                pass
            self.close()
            lost()

        threading.Thread(target=listen, daemon=True).start()

    def listen_on(
        self, loop: asyncio.AbstractEventLoop, acts: Acts, lost: Callable[[], None]
    ) -> None:
        """The same from an event loop, which waits for nothing but the rest of a message that has begun
        to come. To be called, and closed, in the loop's thread."""

        def read() -> None:
            if not self._hear(acts):
                self.close()
                lost()

        loop.add_reader(self._connection.fileno(), read)
        self._loop = loop
        # uvloop has made it non-blocking: then a message that is not all there yet would look like a
        # peer that has gone, and one for which the pipe has no room like a reader that has.
        os.set_blocking(self._connection.fileno(), True)

    def close(self) -> None:
        """End the link from this side, by the one who listens. Open questions fail."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            sender = self._sender
        if self._loop is not None:
            self._loop.remove_reader(self._connection.fileno())
        _shut(self._connection)
        if sender is not None:
            sender.join()
        self._connection.close()
        for number in list(self._asked):
            self._settle(_Answer(number, error=PeerGoneError()))

    def _hear(self, acts: Acts) -> bool:
        """Wait for the next message, and act. False: there is none any more. A call that fails is lost,
        and those after it are not."""
        try:
            message = self.receive()
        except PeerGoneError:
            return False
        if isinstance(message, _Answer):
            self._settle(message)
        elif message.number is not None:
            self._answer(message.number, lambda: acts[message.name](*message.arguments))
        else:
            try:
                acts[message.name](*message.arguments)
            except Exception:
                logger.exception("failed to act on a message of another process")
        return True

    def _settle(self, answer: _Answer) -> None:
        asked = self._asked.pop(answer.number)
        if not asked.set_running_or_notify_cancel():
            return  # the one who asked has left
        if answer.error is None:
            asked.set_result(answer.value)
        else:
            asked.set_exception(answer.error)

    def _answer(self, number: int, find: Callable[[], Any]) -> None:
        try:
            found = find()
            if isinstance(found, Future):
                found.add_done_callback(lambda done: self._answer(number, done.result))
            else:
                self.send(_Answer(number, found))
        except Exception as error:
            if not isinstance(error, EngineError):
                # Whoever asked logs what has become of it, and the place is lost on the way.
                error.add_note(f"In process {os.getpid()}: {traceback.format_exc()}")
            try:
                self.send(_Answer(number, error=error))
            except Exception:  # it cannot be pickled
                self.send(_Answer(number, error=RuntimeError(repr(error))))


def _shut(connection: Connection) -> None:
    """Let a thread that waits to write to it, or to read from it, go on to find its end."""
    end = socket.socket(fileno=connection.fileno())
    with suppress(OSError):  # the peer may have gone first
        end.shutdown(socket.SHUT_RDWR)
    end.detach()
