"""Sends batches of events over ZeroMQ, from a thread of its own: no step waits for a socket.

Each message has three frames: topic, sequence number (8 bytes, big-endian) and batch. Numbers are given
where batches are handed over, so that a gap in them shows what was dropped. Who missed something sends
the first number that it wants to the replay socket, and gets what is kept from there on.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from engine.kv_events.wire import END_OF_REPLAY, Batch, Event, encode, sequence

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Batches handed over and not sent yet; further ones are dropped."""
MAX_KEPT = 4096
"""Batches kept for replays: the latest ones."""
_STOP_SECONDS = 5.0
_BOUND = re.compile(r"ipc://|tcp://(\*|0\.0\.0\.0|\[::\]):")


class Publisher:
    """``num_sent`` and ``num_dropped`` count events, as they are handed over.

    ``endpoint`` is bound where it names no host (``*`` and the like, ``ipc``), and connected to where
    it does. ``replay_endpoint`` is bound. Raises ValueError naming the setting that cannot be."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._waiting: queue.Queue[tuple[int, Batch]] = queue.Queue(MAX_WAITING)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)
        self._next = 0
        self._is_stopping = False
        self.num_sent = self.num_dropped = 0
        try:
            self._events = self._socket(zmq.PUB, "kv_events_endpoint", endpoint)
            self._replays = None
            if replay_endpoint is not None:
                self._replays = self._socket(
                    zmq.ROUTER, "kv_events_replay_endpoint", replay_endpoint
                )
        except ValueError:
            self._context.destroy(linger=0)
            raise
        # Not a socket of ZeroMQ's: one that is full for a moment refuses a call that nobody repeats.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="slipstream-kv-events", daemon=True)

    def _socket(self, kind: int, setting: str, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if kind == zmq.ROUTER:
            # A whole replay: it drops what a slow reader has no room for, and says nothing of it.
            socket.sndhwm = MAX_KEPT + 1
        try:
            if kind == zmq.ROUTER or _BOUND.match(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{setting}: {endpoint}: {error}") from error
        return socket

    def start(self) -> None:
        self._thread.start()

    def send(self, events: list[Event]) -> None:
        """Hand over a batch, and never wait: where too many are waiting already it is dropped. For one
        thread, which ``stop`` has to come from as well."""
        number, self._next = self._next, self._next + 1
        try:
            self._waiting.put_nowait((number, Batch(time.time(), events)))
        except queue.Full:
            self.num_dropped += len(events)
        else:
            self.num_sent += len(events)
        self._rouse()

    def stop(self) -> None:
        """Send what waits, and close. Who reads too slowly loses the rest."""
        self._is_stopping = True
        if self._thread.is_alive():
            self._rouse()
            self._thread.join(_STOP_SECONDS)
        self._context.destroy(linger=0)
        if self._wake >= 0 and not self._thread.is_alive():
            os.close(self._wake)
            self._wake = -1

    def _rouse(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- its own thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        answers: dict[zmq.Socket[bytes] | int, Callable[[], None]] = {self._wake: self._publish}
        if self._replays is not None:
            answers[self._replays] = self._replay
        for socket in answers:
            poller.register(socket, zmq.POLLIN)
        try:
            while not self._is_stopping:
                for socket, _ in poller.poll():
                    answers[socket]()
        except Exception:
            logger.exception("KV events are not sent any more")

    def _publish(self) -> None:
        os.eventfd_read(self._wake)
        while True:
            try:
                number, batch = self._waiting.get_nowait()
            except queue.Empty:
                return
            payload = encode(batch)
            self._events.send_multipart([self._topic, sequence(number), payload])
            if self._replays is not None:
                self._kept.append((number, payload))

    def _replay(self) -> None:
        assert self._replays is not None
        sender, *rest = self._replays.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            logger.warning("a request for a replay is none: it wants an empty frame and 8 bytes")
            return
        first = int.from_bytes(rest[1], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replays.send_multipart([sender, b"", self._topic, sequence(number), payload])
        self._replays.send_multipart([sender, b"", b"", END_OF_REPLAY, b""])
