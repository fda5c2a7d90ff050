"""Several processes that speak HTTP on one port, in front of one engine.

The process that was started launches the engine and the workers, hands them pipes to the engine, and
keeps the one set of metrics: workers tell it what they count and ask it for what ``/metrics`` shows, so
that it is the same whichever of them answers. A worker that dies is replaced; all end with the first
process.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from types import FrameType
from typing import Any

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.events import StepResult
from engine.info import EngineInfo
from engine.logs import LogOptions
from engine.process.launch import EngineProcess, child_environment, describe
from engine.stats import idle_stats
from server.metrics import Metrics
from server.request.speculative import SpeculativeField
from server.speculation_changes import Adopted, Change, SpeculationChanges

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
# Beside the time to drain: last events, and bodies that are being read.
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Serve:
    """To a worker: serve this. The handles of the listening socket, of a pipe to the engine and of its
    pulse follow.
    ``settings``: fields of ``Settings``."""

    settings: Mapping[str, Any]
    config: EngineConfig
    info: EngineInfo
    logs: LogOptions


@dataclass(frozen=True, slots=True)
class NewEngine:
    """To a worker: another engine runs; the handle of a pipe to it follows."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Exposition:
    """To a worker: what question ``number`` asked for."""

    number: int
    content: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class Started:
    """From a worker: it takes connections."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker: it cannot serve this."""

    reason: str


@dataclass(frozen=True, slots=True)
class Count:
    """From a worker: a method of ``Metrics`` to call."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Expose:
    """From a worker: what would the metrics look like to a client with this Accept header?"""

    number: int
    accept: str


@dataclass(frozen=True, slots=True)
class Drained:
    """From a worker: no request of its own goes on. It answers on the port until question ``number`` is
    answered."""

    number: int


@dataclass(frozen=True, slots=True)
class AllDrained:
    """To a worker: no request of any worker goes on."""

    number: int


class _Worker:
    def __init__(self, process: subprocess.Popen[bytes], control: Connection) -> None:
        self.process = process
        self.control = control
        self.lock = threading.Lock()
        self.started = threading.Event()
        self.drained: Drained | None = None
        self.failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self.drained is not None or self.process.poll() is not None

    def send(self, message: Any, *handles: int) -> None:
        """A worker that has gone is found so by its process."""
        with self.lock, suppress(OSError):
            self.control.send(message)
            for handle in handles:
                send_handle(self.control, handle, self.process.pid)


class Workers:
    """``serve``'s fields are the same for all workers, but for the engine's own facts."""

    def __init__(
        self, num_workers: int, serve: Serve, listener: socket.socket, engine: EngineProcess,
        metrics: Metrics, speculation: SpeculationChanges,
    ) -> None:  # fmt: skip
        self._num_workers = num_workers
        self._serve = serve
        self._listener = listener
        self._engine = engine
        self._metrics = metrics
        self._speculation = speculation
        self._info = serve.info
        self._workers: list[_Worker] = []
        self._num_signals = 0

    @property
    def is_draining(self) -> bool:
        return self._num_signals > 0

    def run(self, drain_seconds: float, restart_engine: bool, step_timeout: float) -> None:
        """Serve until SIGTERM or SIGINT, and then let requests finish; a second signal ends them. Raises
        EngineError where the workers cannot start."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._count_steps()
            self._engine.watch(self._on_new_engine if restart_engine else None, step_timeout)
            with self._speculation.lock:
                self._workers = [self._launch() for _ in range(self._num_workers)]
            self._keep_up()
        finally:
            self._end(drain_seconds)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._num_signals += 1

    def _keep_up(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            if self._num_signals:
                return
            for place, worker in enumerate(self._workers):
                if worker.process.poll() is None:
                    continue
                if not worker.started.is_set():
                    raise EngineError(worker.failure or "a server's process ended while it started")
                if worker.failure is None:
                    worker.failure = (
                        f"a server's process ended: {describe(worker.process.returncode)}"
                    )
                    logger.error(worker.failure)
                # Where the engine has died too, there is one to connect to a little later.
                with suppress(OSError), self._speculation.lock:
                    self._workers[place] = self._launch()
                    worker.control.close()

    def _end(self, drain_seconds: float) -> None:
        # The port is open for as long as a worker answers on it, and not a moment longer.
        self._listener.close()
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + drain_seconds + _END_SECONDS
        while not all(worker.is_done for worker in self._workers):
            self._kill_after(deadline)
            time.sleep(_LOOK_SECONDS)
        # Not before: whoever ends may have accepted a connection that another would have answered.
        for worker in self._workers:
            if worker.drained is not None:
                worker.send(AllDrained(worker.drained.number))
        while any(worker.process.poll() is None for worker in self._workers):
            self._kill_after(deadline)
            time.sleep(_LOOK_SECONDS)
        for worker in self._workers:
            worker.control.close()

    def _kill_after(self, deadline: float) -> None:
        if self._num_signals > 1 or time.monotonic() > deadline:
            for worker in self._workers:
                worker.process.kill()

    def _launch(self) -> _Worker:
        to_engine = self._engine.connect(wants_steps=False)
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "server.worker", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        worker = _Worker(process, ours)
        with to_engine:
            speculation = self._speculation.resolver
            wished = {
                "speculative": SpeculativeField(**speculation.wished),
                "speculative_caps": speculation.caps,
            }
            settings = {**self._serve.settings, **wished}
            serve = replace(self._serve, info=self._info, settings=settings)
            handles = (self._listener.fileno(), to_engine.fileno(), self._engine.pulse_handle)
            worker.send(serve, *handles)
        threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        return worker

    def _read(self, worker: _Worker) -> None:
        try:
            while True:
                message = worker.control.recv()
                if isinstance(message, Count):
                    getattr(self._metrics, message.name)(*message.arguments)
                elif isinstance(message, Expose):
                    found = self._metrics.exposition(message.accept)
                    worker.send(Exposition(message.number, *found))
                elif isinstance(message, Change):
                    self._speculation.change(worker, message, list(self._workers))
                elif isinstance(message, Adopted):
                    self._speculation.adopted(worker, message.version)
                elif isinstance(message, Drained):
                    worker.drained = message
                elif isinstance(message, Started):
                    worker.started.set()
                elif isinstance(message, Failed):
                    worker.failure = message.reason
        except (EOFError, OSError):
            self._speculation.gone(worker)

    def _on_new_engine(self, info: EngineInfo) -> None:
        self._info = info
        self._metrics.observe_step(idle_stats(info.num_blocks))
        self._count_steps()
        for worker in self._workers:
            with self._engine.connect(wants_steps=False) as to_engine:
                worker.send(NewEngine(info), to_engine.fileno())

    def _count_steps(self) -> None:
        connection = self._engine.connect(wants_steps=True)
        threading.Thread(target=self._read_steps, args=(connection,), daemon=True).start()

    def _read_steps(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            while isinstance(result := connection.recv(), StepResult):
                if result.stats is not None:
                    self._metrics.observe_step(result.stats)
