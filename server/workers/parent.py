"""Several processes that speak HTTP on one port, in front of one engine.

The process that was started launches the engine and the workers, hands them pipes to the engine, and
keeps the one set of metrics: workers tell it what they count and ask it for what ``/metrics`` shows, so
that it is the same whichever of them answers. Speculation is changed there, too: once for all workers. A
worker that dies is replaced; all end with the first process.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from engine.config import EngineConfig
from engine.logs import LogOptions
from engine.process.launch import Child, EngineProcess, describe, launch_child
from engine.process.link import Acts, Link
from engine.request.errors import EngineError
from engine.request.events import TokenEvent
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.stats import StepStats, idle_stats
from server.http.draining import signals_to
from server.metrics.prometheus import Metrics
from server.request.speculative import SpeculativeChange, SpeculativeField, SpeculativeResolver
from server.response_store import ResponseStore

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
# Beside the time to drain: last events, and bodies that are being read.
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Serve:
    """The first message to a worker: serve this. ``settings``: fields of ``Settings``."""

    settings: Mapping[str, Any]
    config: EngineConfig
    info: EngineInfo
    logs: LogOptions


class _Worker:
    """``drained`` is there once no request of the worker goes on, and is settled when that is true of
    all: it answers on the port until then."""

    def __init__(self, child: Child) -> None:
        self.process, self.link = child
        self.started = threading.Event()
        self.drained: Future[None] | None = None
        self.failure: str | None = None

    @property
    def is_done(self) -> bool:
        return self.drained is not None or self.process.poll() is not None

    def drain(self) -> Future[None]:
        self.drained = Future()
        return self.drained

    def fail(self, reason: str) -> None:
        """It cannot serve this."""
        self.failure = reason


class Workers:
    """``serve``'s fields are the same for all workers, but for the engine's own facts."""

    def __init__(
        self,
        num_workers: int,
        serve: Serve,
        listener: socket.socket,
        engine: EngineProcess,
        metrics: Metrics,
        resolver: SpeculativeResolver,
        responses: ResponseStore,
    ) -> None:
        self._responses = responses
        self._num_workers = num_workers
        self._serve = serve
        self._listener = listener
        self._engine = engine
        self._metrics = metrics
        self._resolver = resolver
        # Held where a worker is launched with the resolver and becomes one of those who are told.
        self._lock = threading.RLock()
        self._info = serve.info
        self._workers: list[_Worker] = []
        self._num_signals = 0
        self._status = 0

    @property
    def is_draining(self) -> bool:
        return self._num_signals > 0

    def run(self, drain_seconds: float, restart_engine: bool, step_timeout: float) -> None:
        """Serve until SIGTERM or SIGINT, and then let requests finish. Raises EngineError where the
        workers cannot start, and SystemExit where a second signal ended them, with 128 and its number, or
        where they did not end in time, with 1."""
        with signals_to(self._on_signal):
            try:
                self._count_steps()
                self._engine.watch(self._on_new_engine if restart_engine else None, step_timeout)
                with self._lock:
                    self._workers = [self._launch() for _ in range(self._num_workers)]
                self._keep_up()
            finally:
                self._end(drain_seconds)
        if self._status:
            raise SystemExit(self._status)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._num_signals += 1
        if self._num_signals > 1:
            self._status = 128 + number

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
                # Where the engine has died too, the worker hears of the next one.
                with self._lock:
                    self._workers[place] = self._launch()

    def _end(self, drain_seconds: float) -> None:
        # The port is open for as long as a worker answers on it, and not a moment longer.
        self._listener.close()
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + drain_seconds + _END_SECONDS
        while not all(worker.is_done for worker in self._workers):
            self._kill_after(deadline)
            time.sleep(_LOOK_SECONDS)
        # Not before: one that ends may have accepted a connection that another would have answered.
        for worker in self._workers:
            if worker.drained is not None:
                worker.drained.set_result(None)
        while any(worker.process.poll() is None for worker in self._workers):
            self._kill_after(deadline)
            time.sleep(_LOOK_SECONDS)

    def _kill_after(self, deadline: float) -> None:
        if self._num_signals > 1 or time.monotonic() > deadline:
            if not self._status:
                logger.error("ending the server's processes, which did not end in time")
                self._status = 1
            for worker in self._workers:
                worker.process.kill()

    def _launch(self) -> _Worker:
        settings = {**self._serve.settings, **wished(self._resolver)}
        with self._engine.connect(wants_steps=False) as to_engine:
            handles = (self._listener.fileno(), to_engine.fileno(), self._engine.pulse_handle)
            first = replace(self._serve, info=self._info, settings=settings)
            worker = _Worker(launch_child("server.workers.child", first, *handles))
        # That it has gone is found by its process.
        worker.link.listen_in_thread(self._acts(worker), lambda: None)
        return worker

    def _acts(self, worker: _Worker) -> Acts:
        return {
            "observe_request": self._metrics.observe_request,
            "count": self._metrics.count,
            "expose": self._metrics.exposition,
            "change": self.change,
            **self._responses.acts,
            "drained": worker.drain,
            "started": worker.started.set,
            "failed": worker.fail,
        }

    def change(self, asked: SpeculativeChange, from_built_in: bool) -> Future[SpeculativeResolver]:
        """Speculation of all workers, once they go by the change or have gone: a request that follows
        finds it wherever it arrives. Raises ApiError. From any thread."""
        with self._lock:
            found = self._resolver.changed(asked, from_built_in=from_built_in)
            self._resolver = found
            self._metrics.show_speculation(found.defaults, True)
            waiting = {each.link.ask("adopt", found) for each in self._workers}
        answer: Future[SpeculativeResolver] = Future()

        def adopted(by_one: Future[None]) -> None:
            with self._lock:
                waiting.remove(by_one)
                is_last = not waiting
            if is_last:
                answer.set_result(found)

        for each in list(waiting):
            each.add_done_callback(adopted)
        return answer

    def _on_new_engine(self, info: EngineInfo) -> None:
        self._info = info
        self._metrics.show_adapters(info.adapters or ())
        self._metrics.observe_step(idle_stats(info.num_blocks))
        self._count_steps()
        for worker in self._workers:
            with self._engine.connect(wants_steps=False) as to_engine:
                worker.link.call("replace", info, handle=to_engine.fileno())

    def _count_steps(self) -> None:
        steps = Link(self._engine.connect(wants_steps=True))
        # That it has gone is found by its process.
        acts: Acts = {
            "deliver": self._deliver,
            "died": lambda _: None,
            "adopt_adapters": self._adopt_adapters,
        }
        steps.listen_in_thread(acts, lambda: None)

    def _adopt_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """Those that the engine has now; it tells the workers itself."""
        self._engine.keep_adapters(adapters)
        self._metrics.show_adapters(adapters)
        with self._lock:
            self._info = replace(self._info, adapters=adapters)

    def _deliver(self, events: Sequence[TokenEvent], steps: Sequence[StepStats]) -> None:
        del events
        for step in steps:
            self._metrics.observe_step(step)


def wished(resolver: SpeculativeResolver) -> dict[str, Any]:
    """Returns the settings that make such a resolver."""
    return {
        "speculative": SpeculativeField(**resolver.wished),
        "speculative_caps": resolver.caps,
    }
