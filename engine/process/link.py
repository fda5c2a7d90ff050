"""What goes over the pipes between an engine's process and those in front of it.

The pipes are multiprocessing's: pickled messages over Unix socket pairs, whose two ends belong to the
same program on the same machine.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.info import EngineInfo
from engine.logs import LogOptions
from engine.params import GenerationRequest, Tenant

# A pipe that is writable at all takes this much without waiting: the kernel calls one writable while a
# quarter of its buffer, 208 KiB as Linux comes, is in use at most.
_AT_ONCE = 32 << 10


# --- between the process that launches an engine and the engine ---


@dataclass(frozen=True, slots=True)
class Launch:
    """Build an engine. ``build`` names the function, as in ``engine.build:build_engine``: who asks need
    not load what it needs. ``logs``: how it logs. ``follow``: as ``build``, what other ranks run where
    the model is shared."""

    build: str
    config: EngineConfig
    logs: LogOptions
    follow: str


@dataclass(frozen=True, slots=True)
class Ready:
    """It is built."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be built; ``reason`` is for the one who asked for it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attach:
    """The handle that follows is a pipe of a new client. ``wants_steps``: it is told of every step."""

    wants_steps: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort everything and end."""


# --- between a client and the engine: these, and a ``StepResult`` per step back ---


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Charge:
    """Count a request in which the engine has no other part; a ``Charged`` with the number comes back."""

    number: int
    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Charged:
    """``error``: None where it was counted."""

    number: int
    error: EngineError | None


@dataclass(frozen=True, slots=True)
class Died:
    """The engine broke; nothing follows."""

    message: str


class Outbox:
    """Sends messages in order and never makes the caller wait for the reader, however slow: what the pipe
    has no room for goes out from a thread, which lives as long as there is something left."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)
        self._lock = threading.Lock()
        self._backlog: deque[bytes | memoryview] = deque()

    def put(self, message: Any) -> None:
        """A message to a reader that is gone is dropped."""
        data = ForkingPickler.dumps(message)
        with self._lock:
            if self._backlog or len(data) > _AT_ONCE or not self._writable.poll(0):
                self._backlog.append(data)
                if len(self._backlog) == 1:
                    threading.Thread(target=self._send_backlog, daemon=True).start()
                return
            self._send(data)

    def _send_backlog(self) -> None:
        # What is being sent stays in the queue, so that nothing overtakes it.
        while self._send(self._backlog[0]):
            with self._lock:
                self._backlog.popleft()
                if not self._backlog:
                    return

    def _send(self, data: bytes | memoryview) -> bool:
        try:
            self._connection.send_bytes(data)
        except (OSError, ValueError):  # its reader is gone, or it was closed here
            return False
        return True
