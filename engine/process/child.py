"""The engine's process: builds an engine, runs it on the main thread, serves the pipes from others.

    python -m engine.process.child HANDLE PULSE

HANDLE is the pipe from the process that launched it, PULSE the memory in which that process sees how long
a step takes. When that pipe closes, whoever served requests is
gone, by whatever end, and so is this.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle
from pkgutil import resolve_name

from engine.errors import EngineError, RequestFailedError
from engine.events import ErrorEvent, StepResult, TokenEvent
from engine.info import EngineInfo
from engine.logs import log_through_root
from engine.params import GenerationRequest, Tenant
from engine.process.followers import Followers
from engine.process.link import (
    Abort,
    Attach,
    Charge,
    Charged,
    Died,
    Launch,
    Outbox,
    Ready,
    Refused,
    Submit,
)
from engine.pulse import Pulse
from engine.rank import rank_here
from engine.runtime import EngineRuntime

logger = logging.getLogger(__name__)


class _Client:
    """A process in front of the engine."""

    def __init__(self, connection: Connection, wants_steps: bool) -> None:
        self.connection = connection
        self.wants_steps = wants_steps
        self.outbox = Outbox(connection)


class EngineHost:
    """Runs an engine for clients at the ends of pipes. A thread per client reads what it asks, so that a
    refusal need not wait for the step; steps and their events are the main thread's."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._clients: list[_Client] = []
        self._owners: dict[str, _Client] = {}

    def run(self) -> None:
        """To the end of the engine; raises what broke it, after everybody was told."""
        try:
            self._runtime.run(self._post)
        except BaseException as error:
            message = f"the engine died: {type(error).__name__}: {error}"
            for client in self._clients:
                client.outbox.put(Died(message))
            raise

    def obey(self, control: Connection) -> None:
        """Take new clients and the word to stop; ends the process when the pipe closes."""
        try:
            while isinstance(message := control.recv(), Attach):
                client = _Client(Connection(recv_handle(control)), message.wants_steps)
                with self._lock:
                    self._clients = [*self._clients, client]
                threading.Thread(target=self._read, args=(client,), daemon=True).start()
            self._runtime.stop()
            control.recv()
        except (EOFError, OSError):
            os._exit(1)

    def _read(self, client: _Client) -> None:
        try:
            while True:
                message = client.connection.recv()
                if isinstance(message, Submit):
                    self._submit(client, message.request)
                elif isinstance(message, Abort):
                    self._runtime.abort(message.request_id)
                elif isinstance(message, Charge):
                    client.outbox.put(Charged(message.number, self._charge(message.tenant)))
        except (EOFError, OSError):
            with self._lock:
                self._clients = [each for each in self._clients if each is not client]
                left = [name for name, owner in self._owners.items() if owner is client]
            for request_id in left:
                self._runtime.abort(request_id)

    def _charge(self, tenant: Tenant) -> EngineError | None:
        try:
            self._runtime.charge(tenant)
        except EngineError as error:
            return error
        return None

    def _submit(self, client: _Client, request: GenerationRequest) -> None:
        try:
            prepared = self._runtime.admit(request)
        except BaseException as error:  # whatever it is, the thread has other requests to read
            if not isinstance(error, EngineError):
                logger.exception("a request could not be prepared")
                error = RequestFailedError(f"{type(error).__name__}: {error}")
            client.outbox.put(StepResult([ErrorEvent(request.request_id, error)]))
            return
        with self._lock:
            self._owners[request.request_id] = client
        self._runtime.submit(prepared)

    def _post(self, result: StepResult) -> None:
        """One message for each client that has to hear of the step."""
        found: dict[_Client, list[TokenEvent | ErrorEvent]] = {}
        with self._lock:
            for event in result.events:
                owner = self._owners[event.request_id]
                found.setdefault(owner, []).append(event)
                if isinstance(event, ErrorEvent) or event.finish is not None:
                    del self._owners[event.request_id]
                    self._runtime.release(event.request_id)
            clients = self._clients
        for client in clients:
            events = found.get(client, [])
            stats = result.stats if client.wants_steps else None
            if events or stats is not None:
                client.outbox.put(StepResult(events, stats))


def main() -> int:
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the server drains its
    # requests first and then says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    launch: Launch = control.recv()
    launch.logs.begin()
    if launch.logs.format == "json":
        # It speaks while what builds on it is loaded, so its handlers have to go before.
        import_module("torch")
        log_through_root("torch")
    host: list[EngineHost] = []
    waiting = threading.Thread(target=_obey_when_built, args=(control, host), daemon=True)
    waiting.start()
    with _followers(launch, control, host):
        try:
            engine, _ = resolve_name(launch.build)(launch.config)
        except (EngineError, ValueError, OSError) as error:
            control.send(Refused(str(error)))
            return 2
        # What was loaded stays: a full collection over it stops all requests for some 0.2 s.
        gc.collect()
        gc.freeze()
        engine.runtime.pulse = Pulse(int(sys.argv[2]))
        host.append(EngineHost(engine.runtime))
        control.send(Ready(_sendable(engine.info)))
        try:
            host[0].run()
        except Exception:
            logger.exception("the engine died")
            return 1
        return 0


@contextmanager
def _followers(launch: Launch, control: Connection, host: list[EngineHost]) -> Iterator[None]:
    """With the other ranks, where the model is to be shared and nobody has launched them yet. One that
    goes takes this process with it: what is computed together cannot be computed without it."""
    size = launch.config.tensor_parallel_size
    if size == 1 or rank_here(size) is not None:
        yield
        return
    followers = Followers(launch)
    os.environ.update(followers.environment)

    def lost(reason: str) -> None:
        logger.error("the engine ends: %s", reason)
        if not host:
            control.send(Refused(reason))
        os._exit(1)

    followers.watch(lost)
    try:
        yield
    finally:
        followers.stop()


def _sendable(info: EngineInfo) -> EngineInfo:
    """Without those checks of drafters' options that cannot be pickled: they are made here anyway."""
    drafters = {}
    for name, each in info.drafters.items():
        try:
            ForkingPickler.dumps(each.check)
        except (AttributeError, TypeError, pickle.PicklingError):
            each = replace(each, check=None)
        drafters[name] = each
    return replace(info, drafters=drafters)


def _obey_when_built(control: Connection, host: list[EngineHost]) -> None:
    """Nothing is said before the engine is there, but the pipe may close."""
    try:
        control.poll(None)
        if not host:
            os._exit(1)
    except (EOFError, OSError):
        os._exit(1)
    host[0].obey(control)


if __name__ == "__main__":
    sys.exit(main())
