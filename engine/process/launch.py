"""Launches an engine in a process of its own, watches it, and brings it back where that is asked for."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import EngineConfig
from engine.logs import LogOptions
from engine.process.link import Link, PeerGoneError
from engine.process.pulse import Pulse, shared_handle
from engine.request.errors import EngineError
from engine.request.info import AdapterInfo, EngineInfo

logger = logging.getLogger(__name__)

# Pauses between attempts to bring an engine back; one that ran for the longest begins anew.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# A step that is under way at the end is let finish.
_STOP_SECONDS = 30.0
# How often the engine's progress is looked at.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Build an engine. ``build`` names the function, as in ``engine.build:build_engine``, so that the
    sender need not load what it needs. ``logs``: how the process logs. ``follow``: the function that the
    other ranks run where the model is shared, named like ``build``."""

    build: str
    config: EngineConfig
    logs: LogOptions
    follow: str


class Child(NamedTuple):
    """A process that this one has launched, and the pipe to it."""

    process: subprocess.Popen[bytes]
    link: Link

    def end(self, seconds: float) -> None:
        """Tell the process to stop, and wait; kill it where it takes longer than ``seconds``."""
        self.link.call("stop")
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.link.close()


def launch_child(
    module: str, first: Any, *handles: int, environment: Mapping[str, str] | None = None
) -> Child:
    """Run a module of ours as ``python -m MODULE PIPE HANDLES``, and send it ``first``, which has
    ``logs``. It inherits the handles, and this process's environment but for what ``environment``
    adds."""
    ours, theirs = Pipe()
    given = [theirs.fileno(), *handles]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, given)],
            pass_fds=given,
            stdin=subprocess.DEVNULL,
            env=child_environment() | dict(environment or {}),
        )
    link = Link(ours)
    link.send(first)
    return Child(process, link)


def begin_child() -> tuple[Link, Any]:
    """In a process that ``launch_child`` has launched: the pipe from there and the first message, by
    which the process logs from here on."""
    link = Link(Connection(int(sys.argv[1])))
    first = link.receive()
    first.logs.begin()
    return link, first


def ignore_signals() -> None:
    """A terminal's Ctrl-C or end and a service manager's SIGTERM reach the whole group: the server drains
    its requests first and then says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class EngineProcess:
    """One engine at a time. ``environment`` is added to this process's own; ``build``, ``follow`` and
    ``logs`` as in ``Launch``. ``pulse`` shows whether it makes progress, and ``pulse_handle`` lets other
    processes see it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        build: str = "engine.build:build_engine",
        follow: str = "engine.build:follow_engine",
        logs: LogOptions | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._launch = Launch(build, config, logs or LogOptions(), follow)
        self._environment = environment
        self._adapters: tuple[AdapterInfo, ...] | None = None
        self._child: Child | None = None
        self._stopping = threading.Event()
        # Held where a process is launched, so that none is once it is stopped.
        self._launching = threading.Lock()
        self._built = False
        self.pulse_handle = shared_handle()
        self.pulse = Pulse(self.pulse_handle)

    @property
    def is_alive(self) -> bool:
        """Whether it was built and has not ended since."""
        return self._built and self._child is not None and self._child.process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    def start(self) -> EngineInfo:
        """Launch it and wait until it is built. Raises EngineError with the reason where it cannot be."""
        self.begin()
        return self.ready()

    def begin(self) -> None:
        """Launch it; it is being built meanwhile. Raises EngineError where it was stopped."""
        with self._launching:
            if self._stopping.is_set():
                raise EngineError("the engine was stopped")
            self._built = False
            self.pulse.rest()
            if self._child is not None:
                self._child.link.close()
            handle, environment = self.pulse_handle, self._environment
            self._child = launch_child(
                "engine.process.child", self._launch, handle, environment=environment
            )

    def ready(self) -> EngineInfo:
        """Wait until it is built. Raises as ``start``."""
        assert self._child is not None
        try:
            answer: EngineInfo | EngineError = self._child.link.receive()
        except PeerGoneError:
            status = describe(self._child.process.wait())
            raise EngineError(f"the engine's process ended while it loaded: {status}") from None
        if isinstance(answer, EngineError):
            self._child.process.wait()
            raise answer
        self._built = True
        return answer

    def connect(self, wants_steps: bool = True) -> Connection:
        """One more client's end of a pipe. Where the engine has gone in the meantime, it is found so by
        who reads from the pipe."""
        assert self._child is not None
        ours, theirs = Pipe()
        with theirs:
            self._child.link.call("attach", wants_steps, handle=theirs.fileno())
        return ours

    def keep_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        """Have an engine that is launched anew load these, as far as their folders are there then."""
        self._adapters = adapters

    def _relaunch(self) -> EngineInfo:
        if self._adapters is not None:
            config = with_adapters(self._launch.config, self._adapters)
            self._launch = replace(self._launch, config=config)
        return self.start()

    def watch(
        self,
        restarted: Callable[[EngineInfo], None] | None,
        step_timeout: float = math.inf,
        *,
        ends_hung: bool = False,
    ) -> None:
        """Say in the log when the engine ends by itself. With ``restarted`` it is launched anew, as often
        as it takes, and ``restarted`` is called from a thread each time it is back; then, or with
        ``ends_hung``, one that stalls for longer than ``step_timeout`` seconds, in a step or at rest, is
        ended for that."""
        threading.Thread(target=self._watch, args=(restarted,), daemon=True).start()
        if step_timeout < math.inf:
            arguments = (step_timeout, ends_hung or restarted is not None)
            threading.Thread(target=self._look, args=arguments, daemon=True).start()

    def stop(self) -> None:
        """End it, after the step under way; harmless where it is not there."""
        with self._launching:
            self._stopping.set()
        if self._child is not None:
            self._child.end(_STOP_SECONDS)
        self.pulse.close()
        if self.pulse_handle >= 0:
            os.close(self.pulse_handle)
            self.pulse_handle = -1

    def _look(self, step_timeout: float, may_end: bool) -> None:
        pause, last, was_hung = min(_LOOK_SECONDS, step_timeout), time.monotonic(), False
        while not self._stopping.wait(pause):
            now = time.monotonic()
            if now - last > pause + step_timeout / 4:
                self.pulse.resume()  # this process, and probably the engine's, stood still
            last, child = now, self._child
            if not self.is_alive or child is None:
                continue
            seconds = self.pulse.stalled_seconds
            is_hung = seconds > step_timeout
            if is_hung and not was_hung:
                what = "the engine's process is ended" if may_end else "it hangs"
                logger.error("the engine has made no progress for %.0f s: %s", seconds, what)
            was_hung = is_hung
            if is_hung and may_end:
                child.process.kill()
            elif self.pulse.ask():
                child.link.call("show_life")

    def _watch(self, restarted: Callable[[EngineInfo], None] | None) -> None:
        pause = _FIRST_PAUSE
        while True:
            start = time.monotonic()
            assert self._child is not None
            status = self._child.process.wait()
            if self._stopping.is_set():
                return
            logger.error("the engine's process ended: %s", describe(status))
            if restarted is None:
                return
            if time.monotonic() - start > _LONGEST_PAUSE:
                pause = _FIRST_PAUSE
            while not self._stopping.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE)
                try:
                    restarted(self._relaunch())
                    logger.warning("the engine is back")
                    break
                except (EngineError, OSError) as error:
                    if not self._stopping.is_set():
                        logger.error("the engine does not come back: %s", error)
            else:
                return


def with_adapters(config: EngineConfig, adapters: Iterable[AdapterInfo]) -> EngineConfig:
    """Returns the settings of an engine that loads these, as far as their folders are there."""
    found = []
    for each in adapters:
        if Path(each.path).expanduser().is_dir():
            found.append(f"{each.name}={each.path}")
        else:
            logger.error("adapter %s is lost: its folder is gone", each.name)
    return replace(config, lora=tuple(found))


def child_environment() -> dict[str, str]:
    """Variables with which ``python -P`` finds modules where this process does."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": paths}


def describe(status: int) -> str:
    """How a process ended, in words."""
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
