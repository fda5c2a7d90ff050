"""The engine's process: builds an engine, runs it on the main thread, and serves clients over pipes.

    python -m engine.process.child HANDLE PULSE

HANDLE is the pipe from the process that launched it, PULSE the memory in which that process sees whether
it makes progress. When that pipe closes, the server is gone, by whatever end, and so is this.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pkgutil import resolve_name
from typing import Any, Literal

from engine.kernels.ahead import compiling_ahead
from engine.logs import log_through_root
from engine.process.admissions import SlowAdmissions
from engine.process.follower import Followers
from engine.process.launch import Launch, begin_child, ignore_signals
from engine.process.light_imports import light_imports
from engine.process.link import Acts, Link
from engine.process.memory import settle_memory
from engine.process.pulse import Pulse
from engine.process.runtime import EngineRuntime
from engine.process.tally import StepTally
from engine.ranks.rank import rank_here
from engine.request.errors import (
    EngineError,
    QueueFullError,
    RequestFailedError,
    ShuttingDownError,
)
from engine.request.events import ErrorEvent, StepResult, TokenEvent
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import GenerationRequest
from engine.request.stats import StepStats

logger = logging.getLogger(__name__)

# Clients hear of an adapter at once, unless one of them is stopped or starved.
_ADOPT_SECONDS = 10.0


@dataclass(eq=False, frozen=True, slots=True)
class _Client:
    """A process in front of the engine. ``wants_steps``: it receives the statistics of all steps."""

    link: Link
    wants_steps: bool


class EngineHost:
    """Runs an engine for its clients, who may come before it is built. A thread per client reads what it
    asks, so that a refusal need not wait for the step; steps and their events are the main thread's."""

    def __init__(self) -> None:
        self._built: Future[EngineRuntime] = Future()
        self._lock = threading.Lock()
        self._clients: list[_Client] = []
        self._owners: dict[str, _Client] = {}
        self._slow = SlowAdmissions(
            self._admit, lambda name: self._built.result().abort(name), self._leave_out
        )
        self._tally = StepTally()
        # Adapters come and go one after another, while clients are read from.
        self._changes = ThreadPoolExecutor(1, "adapters")
        self._changed_adapters: tuple[AdapterInfo, ...] | None = None

    @property
    def is_built(self) -> bool:
        return self._built.done()

    def run(self, runtime: EngineRuntime) -> None:
        """Run to the end of the engine. Raises what broke it, after all clients were told."""
        self._built.set_result(runtime)
        try:
            runtime.run(self._post)
        except BaseException as error:
            message = f"the engine died: {type(error).__name__}: {error}"
            for client in self._clients:
                client.link.call("died", message)
            raise

    def stop(self) -> None:
        """Ends the engine, or the process where none is built yet."""
        if not self.is_built:
            os._exit(1)
        self._built.result().stop()

    def show_life(self) -> None:
        self._built.result().show_life()

    def attach(self, wants_steps: bool, handle: int) -> None:
        """Serves a new client at the end of a pipe. What it asks waits until the engine is built."""
        client = _Client(Link(Connection(handle)), wants_steps)
        with self._lock:
            self._clients = [*self._clients, client]
            changed = self._changed_adapters
        if changed is not None:
            client.link.call("adopt_adapters", changed)
        acts: Acts = {
            "submit": partial(self._submit, client),
            "abort": self._abort,
            "charge": lambda tenant: self._built.result().charge(tenant),
            "load_adapter": partial(self._change_adapters, "load"),
            "unload_adapter": partial(self._change_adapters, "unload"),
        }
        client.link.listen_in_thread(acts, partial(self._leave, client))

    def _leave(self, client: _Client) -> None:
        with self._lock:
            self._clients = [each for each in self._clients if each is not client]
            self._slow.forget(client)
            left = [name for name, owner in self._owners.items() if owner is client]
        for request_id in left:
            self._built.result().abort(request_id)

    def _abort(self, request_id: str) -> None:
        if not self._slow.forget_one(request_id):
            self._built.result().abort(request_id)

    def _leave_out(self, client: _Client, request_id: str) -> None:
        """Its last event: who reads it by now does so at the server's end."""
        self._refuse(client, request_id, ShuttingDownError("the server is shutting down"))

    def _refuse(self, client: _Client, request_id: str, error: EngineError) -> None:
        client.link.call("deliver", [ErrorEvent(request_id, error)])

    def _change_adapters(
        self, change: Literal["load", "unload"], *arguments: Any
    ) -> Future[AdapterInfo]:
        """Returns what a change of the adapters returns or raises, once all clients know of it."""

        def work() -> AdapterInfo:
            adapters = self._built.result().adapters
            found: AdapterInfo = getattr(adapters, change)(*arguments)
            with self._lock:
                self._changed_adapters = infos = adapters.infos
                clients = self._clients
            asked = [client.link.ask("adopt_adapters", infos) for client in clients]
            if wait(asked, _ADOPT_SECONDS).not_done:
                logger.warning("not all processes of the server know of the adapters yet")
            return found

        return self._changes.submit(work)

    def _submit(self, client: _Client, request: GenerationRequest) -> None:
        if not request.sampling.grammar:
            self._admit(client, request)
            return
        try:
            self._built.result().check_room(len(self._slow))
        except QueueFullError as error:
            self._refuse(client, request.request_id, error)
        else:
            self._slow.put(client, request)

    def _admit(self, client: _Client, request: GenerationRequest) -> None:
        runtime = self._built.result()
        try:
            prepared = runtime.admit(request)
        except BaseException as error:  # whatever it is, the client waits for an event
            if not isinstance(error, EngineError):
                logger.exception("a request could not be prepared")
                error = RequestFailedError(f"{type(error).__name__}: {error}")
            self._refuse(client, request.request_id, error)
            return
        with self._lock:
            self._owners[request.request_id] = client
        runtime.submit(prepared)

    def _post(self, result: StepResult) -> None:
        """One message for each client that has to hear of the step."""
        found: dict[_Client, list[TokenEvent | ErrorEvent]] = {}
        some_end = False
        with self._lock:
            for event in result.events:
                owner = self._owners[event.request_id]
                found.setdefault(owner, []).append(event)
                if isinstance(event, ErrorEvent) or event.finish is not None:
                    some_end = True
                    del self._owners[event.request_id]
                    self._built.result().release(event.request_id)
            clients = self._clients
        steps: list[StepStats] = []
        if result.stats is not None:
            steps = self._tally.add(result.stats, some_end=some_end)
        for client in clients:
            events, told = found.get(client, []), steps if client.wants_steps else []
            if events or told:
                client.link.call("deliver", events, told)


def main() -> int:
    ignore_signals()
    control, launch = begin_child()
    if launch.logs.format == "json":
        # It speaks while what builds on it is loaded, so its handlers have to go before.
        import_module("torch")
        log_through_root("torch")
    host = EngineHost()
    acts: Acts = {"attach": host.attach, "stop": host.stop, "show_life": host.show_life}
    control.listen_in_thread(acts, lambda: os._exit(1))
    with _followers(launch, control, host):
        try:
            with compiling_ahead(launch.config.device, launch.config.dtype):
                with light_imports(launch.config):
                    build = resolve_name(launch.build)
                engine, _ = build(launch.config)
        except (EngineError, ValueError, OSError) as error:
            control.send(EngineError(str(error)))
            return 2
        settle_memory()
        engine.runtime.pulse = Pulse(int(sys.argv[2]))
        control.send(_sendable(engine.info))
        try:
            host.run(engine.runtime)
        except Exception:
            logger.exception("the engine died")
            return 1
        return 0


@contextmanager
def _followers(launch: Launch, control: Link, host: EngineHost) -> Iterator[None]:
    """Runs the block with the other ranks, launching them if the model is to be shared and they are not
    running yet. If one of them ends, this process ends, since a shared forward needs all ranks."""
    size = launch.config.tensor_parallel_size
    if size == 1 or rank_here(size) is not None:
        yield
        return
    followers = Followers(launch)
    os.environ.update(followers.environment)

    def lost(reason: str) -> None:
        logger.error("the engine ends: %s", reason)
        if not host.is_built:
            control.send(EngineError(reason))
        os._exit(1)

    followers.watch(lost)
    try:
        yield
    finally:
        followers.stop()


def _sendable(info: EngineInfo) -> EngineInfo:
    """The info without those checks of drafters' options that cannot be pickled: the engine makes them
    anyway."""
    drafters = {}
    for name, each in info.drafters.items():
        try:
            ForkingPickler.dumps(each.check)
        except (AttributeError, TypeError, pickle.PicklingError):
            each = replace(each, check=None)
        drafters[name] = each
    return replace(info, drafters=drafters)


if __name__ == "__main__":
    status = main()
    # The rest of the interpreter's end does nothing but list, in dozens of lines, what libraries leak.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)
