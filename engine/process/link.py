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
import pickle
import select
import socket
import struct
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from copyreg import add_extension
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

from engine.request.errors import EngineError

logger = logging.getLogger(__name__)

# A pipe that is writable at all takes this much without waiting: the kernel calls one writable while a
# quarter of its buffer, 208 KiB as Linux comes, is in use at most.
_AT_ONCE = 32 << 10
_READ = 64 << 10
# What multiprocessing puts before a message of less than 2 GiB.
_LENGTH = struct.Struct("!i")

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


# What names a class in a pickle takes longer to read than all the rest of a short message.
add_extension(__name__, _Call.__name__, 240)
add_extension(__name__, _Answer.__name__, 241)


class _Pieces:
    """Messages out of what is read of a pipe, wherever it is cut."""

    def __init__(self) -> None:
        self._left = bytearray()
        self._num_needed = 0

    def take(self, data: bytes) -> Iterable[Any]:
        """Returns the messages that the next piece completes. Raises EOFError where it is empty, as at a
        pipe's end, and whatever a message that cannot be read raises, once it is its turn."""
        if not data:
            raise EOFError
        if self._left:
            self._left += data
            if len(self._left) < self._num_needed:
                return ()
        elif len(data) >= _LENGTH.size and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            # One message and no more, as it mostly is.
            return (pickle.loads(memoryview(data)[_LENGTH.size :]),)
        else:
            self._left += data
        return self._split()

    def _split(self) -> Iterator[Any]:
        found, self._left = self._left, bytearray()
        at = self._num_needed = 0
        while len(found) >= (begin := at + _LENGTH.size):
            end = begin + _LENGTH.unpack_from(found, at)[0]
            if end > len(found):
                self._num_needed = end - at
                break
            yield pickle.loads(memoryview(found)[begin:end])
            at = end
        self._left += found[at:]


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
        """Have the peer call a function, after everything sent before. ``handle``: a file handle of
        this process; the function gets a duplicate as its last argument, and must close it."""
        self.send(_Call(name, arguments, has_handle=handle is not None), handle)

    def send(self, message: Any, handle: int | None = None) -> None:
        """Send what ``receive`` is to return at the other end. What the pipe has no room for goes out
        from a thread, which lives as long as there is something left."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
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
        while True:
            # What is being sent stays in the queue, so that nothing overtakes it.
            self._write(*self._waiting[0])
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    self._sender = None
                    return

    def _write(self, data: bytes, handle: int | None) -> None:
        """Writes, or drops the data if the peer has gone."""
        with suppress(OSError):
            left = memoryview(_LENGTH.pack(len(data)) + data)
            while left:
                left = left[os.write(self._connection.fileno(), left) :]
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
            with suppress(PeerGoneError):
                while True:
                    self._act(self.receive(), acts)
            self.close()
            lost()

        threading.Thread(target=listen, daemon=True).start()

    def listen_on(
        self, loop: asyncio.AbstractEventLoop, acts: Acts, lost: Callable[[], None]
    ) -> None:
        """The same from an event loop, which waits for nothing. To be called, and closed, in the loop's
        thread. No handles can come here."""
        pieces, handle = _Pieces(), self._connection.fileno()

        def read() -> None:
            try:
                for message in pieces.take(os.read(handle, _READ)):
                    self._act(message, acts)
                    if not self._is_open:  # by what it has asked for
                        return
            except Exception as error:
                if not isinstance(error, (EOFError, OSError)):
                    logger.exception("a message of another process cannot be read")
                self.close()
                lost()

        loop.add_reader(handle, read)
        self._loop = loop
        # uvloop has made it non-blocking: then one for which the pipe has no room would look like a
        # reader that has gone.
        os.set_blocking(handle, True)

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

    def _act(self, message: _Call | _Answer, acts: Acts) -> None:
        """Do what a message says. A call that fails is lost, and those after it are not."""
        if isinstance(message, _Answer):
            self._settle(message)
        elif message.number is not None:
            self._answer(message.number, lambda: acts[message.name](*message.arguments))
        else:
            try:
                acts[message.name](*message.arguments)
            except Exception:
                logger.exception("failed to act on a message of another process")

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
