"""The asyncio edge: one engine thread, an inbox towards it, one cross-thread call per step back.

Only this module knows of event loops. Every admitted request's queue receives events until one that
finishes it; if the engine thread dies, every open and every future request is told.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable

from engine.core import EngineCore, StepResult
from engine.errors import EngineDeadError, QueueFullError, RequestError, RequestFailedError
from engine.events import ErrorEvent, TokenEvent
from engine.info import EngineInfo
from engine.params import GenerationRequest
from engine.speculation.gamma import gamma_policy_names
from engine.stats import StepStats

logger = logging.getLogger(__name__)

StepListener = Callable[[StepStats], None]
_Stream = asyncio.Queue[TokenEvent | ErrorEvent]

# An overloaded client is told to come back after the queue ahead of it has drained, within these.
_RETRY_SECONDS = (1.0, 60.0)


class AsyncEngine:
    """Starts and stops the engine thread and streams requests' events.

    ``core`` belongs to that thread; where it is never started, any one thread may step the core.
    """

    def __init__(self, core: EngineCore, info: EngineInfo, max_num_open: int) -> None:
        self.info = info
        self.core = core
        self._max_num_open = max_num_open
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._listeners: list[StepListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._dead: str | None = None
        self._stopping = False
        self._drained = asyncio.Event()
        self._seconds_per_request = 0.0

    @property
    def is_alive(self) -> bool:
        return self._dead is None and self._thread is not None and self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests admitted and not yet finished."""
        return len(self._streams)

    def add_step_listener(self, callback: StepListener) -> None:
        """Call back on the event loop after every step, and when aborts have left nothing to run:
        then with gauges only, and ``num_rows`` 0."""
        self._listeners.append(callback)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give open ones ``drain_seconds`` to finish, abort the rest, end the
        thread. Every open request gets its last event."""
        self._stopping = True
        if self._streams and drain_seconds > 0 and self.is_alive:
            self._drained.clear()
            try:
                await asyncio.wait_for(self._drained.wait(), drain_seconds)
            except TimeoutError:
                logger.warning("aborting %d requests after the drain time", len(self._streams))
        if self._thread is not None:
            self._inbox.put(self.core.abort_all)
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # lets the thread's last delivery run
        self._fail_open("the server is shutting down", dead=False)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Stream one request. Closing the iterator early aborts the request in the engine.

        Raises RequestError, QueueFullError, EngineDeadError before the first event; RequestFailedError
        or EngineDeadError later.
        """
        stream = self._admit(request)
        start = time.perf_counter()
        finished = False
        try:
            while not finished:
                event = await stream.get()
                if isinstance(event, ErrorEvent):
                    finished = True
                    kind = EngineDeadError if event.engine_dead else RequestFailedError
                    raise kind(event.message)
                finished = event.finish is not None
                yield event
        finally:
            self._release(request.request_id, time.perf_counter() - start)
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request before the next step. A stream that is still read gets a last event, whose
        ``finish.reason`` is "abort" and which accounts for the work done."""
        self._inbox.put(lambda: self.core.abort(request_id))

    def _admit(self, request: GenerationRequest) -> _Stream:
        if self._dead is not None or self._thread is None:
            raise EngineDeadError(self._dead or "the engine has not been started")
        if self._stopping:
            raise EngineDeadError("the server is shutting down")
        self.check(request)
        prepared = self.core.prepare(request)
        if len(self._streams) >= self._max_num_open:
            wait = self._seconds_per_request * len(self._streams) / self.core.max_num_seqs
            low, high = _RETRY_SECONDS
            raise QueueFullError(float(math.ceil(min(high, max(low, wait)))))
        stream: _Stream = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._inbox.put(lambda: self.core.submit(prepared))
        return stream

    def check(self, request: GenerationRequest) -> None:
        """The engine's own conditions on a request. Raises RequestError."""
        prompt, limit = request.prompt_token_ids, self.info.max_model_len
        if request.request_id in self._streams:
            raise RequestError("request_id", f"request id {request.request_id!r} is in use")
        if not prompt:
            raise RequestError("prompt", "the prompt has no tokens")
        if len(prompt) >= limit:
            raise RequestError(
                "prompt",
                f"the prompt has {len(prompt)} tokens; with at least one token of output it must "
                f"fit into {limit}",
            )
        if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
            raise RequestError("prompt", f"token ids must lie in 0..{self.info.vocab_size - 1}")
        if request.sampling.max_tokens < 1:
            raise RequestError("max_tokens", "max_tokens must be at least 1")
        if request.speculative.drafter not in self.info.drafters:
            known = ", ".join(sorted(self.info.drafters))
            raise RequestError(
                "speculative.draft_strategy",
                f"no drafter {request.speculative.drafter!r}; loaded: {known}",
            )
        if request.speculative.policy not in gamma_policy_names():
            raise RequestError(
                "speculative.adaptive_depth",
                f"no gamma policy {request.speculative.policy!r}; "
                f"there are: {', '.join(gamma_policy_names())}",
            )

    def _release(self, request_id: str, seconds: float) -> None:
        self._streams.pop(request_id, None)
        weight = 0.1 if self._seconds_per_request else 1.0
        self._seconds_per_request += weight * (seconds - self._seconds_per_request)
        if not self._streams:
            self._drained.set()

    # --- engine thread ---

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while self._drain():
                result = self.core.step()
                if result.stats is None and result.events:
                    # Aborts left nothing to run: no step follows that would tell the gauges.
                    result.stats = self.core.gauges()
                self._post(result)
        except BaseException as error:
            logger.exception("the engine died")
            message = f"the engine died: {type(error).__name__}: {error}"
            # From here on nothing is admitted; then every open stream is told on the loop.
            self._dead = message
            self._loop.call_soon_threadsafe(self._fail_open, message, True)

    def _drain(self) -> bool:
        """Run the commands that have come in, waiting for one if there is nothing else to do.
        False: stop."""
        block = not self.core.has_work
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                self._post(self.core.take_result())
                return False
            command()
            block = False

    def _post(self, result: StepResult) -> None:
        if self._loop is not None and (result.events or result.stats is not None):
            self._loop.call_soon_threadsafe(self._deliver, result)

    # --- event loop ---

    def _deliver(self, result: StepResult) -> None:
        for event in result.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:  # else the client has gone
                stream.put_nowait(event)
        if result.stats is not None:
            for listener in self._listeners:
                listener(result.stats)

    def _fail_open(self, message: str, dead: bool) -> None:
        for request_id, stream in self._streams.items():
            stream.put_nowait(ErrorEvent(request_id, message, engine_dead=dead))
