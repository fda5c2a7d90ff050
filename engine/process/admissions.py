"""Requests whose admission takes a while, since a grammar has to be compiled first: they are admitted by
threads of their own, so that the pipe that they came by goes on being read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.request.params import GenerationRequest

_NUM_THREADS = 4
"""One new grammar is compiled at a time; requests with known ones pass by it."""

C = TypeVar("C")


class SlowAdmissions(Generic[C]):
    """``admit`` admits a request of a client's and raises nothing; ``abort`` ends an admitted one;
    ``leave_out`` tells a client of one that is not going to be admitted. Callable from any thread."""

    def __init__(
        self,
        admit: Callable[[C, GenerationRequest], None],
        abort: Callable[[str], None],
        leave_out: Callable[[C, str], None],
    ) -> None:
        self._admit = admit
        self._abort = abort
        self._leave_out = leave_out
        self._lock = threading.Lock()
        self._waiting: dict[str, C] = {}
        # Of these and of others, since forgotten, those that are being admitted.
        self._begun: set[str] = set()
        self._queue: queue.SimpleQueue[GenerationRequest] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, client: C, request: GenerationRequest) -> None:
        with self._lock:
            self._waiting[request.request_id] = client
            if not self._threads:
                self._begin()
        self._queue.put(request)

    def forget(self, client: C) -> None:
        """The client has left: none of its requests is admitted any more."""
        with self._lock:
            self._waiting = {
                name: each for name, each in self._waiting.items() if each is not client
            }

    def forget_one(self, request_id: str) -> bool:
        """Returns whether the request was waiting; then it is not admitted, or ended at once."""
        with self._lock:
            client = self._waiting.pop(request_id, None)
            has_begun = request_id in self._begun
        if client is not None and not has_begun:
            self._leave_out(client, request_id)
        return client is not None

    def _begin(self) -> None:
        for _ in range(_NUM_THREADS):
            thread = threading.Thread(target=self._run, name="slipstream-admission", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            request = self._queue.get()
            with self._lock:
                client = self._waiting.get(request.request_id)
                if client is None:
                    continue
                self._begun.add(request.request_id)
            self._admit(client, request)
            is_wanted = self.forget_one(request.request_id)
            with self._lock:
                self._begun.remove(request.request_id)
            if not is_wanted:
                self._abort(request.request_id)
