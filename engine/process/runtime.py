"""An engine at work: who is admitted, the inbox between steps, and the loop that steps the core.

It knows no event loop and no sockets: ``threaded`` runs it in a thread, ``child`` in the main thread of a
process of its own.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.core import EngineCore
from engine.machine import device_memory
from engine.process.backlog import Backlog
from engine.process.batches import Batches
from engine.process.pulse import Pulse
from engine.request.errors import (
    AdapterError,
    QueueFullError,
    RequestError,
    UnknownAdapterError,
)
from engine.request.events import StepResult
from engine.request.info import EngineInfo
from engine.request.params import GenerationRequest, Tenant
from engine.schedule.limits import TenantLimits
from engine.schedule.request import Request
from engine.speculation.gamma import gamma_policy_names
from kvpool.saving import save_all, save_some

if TYPE_CHECKING:
    # With it comes the model's room, which a process that only begins has no use for.
    from engine.lora.adapters import Adapters

logger = logging.getLogger(__name__)

# A client that is turned away is told to come back when what is ahead of it is done, within these.
_RETRY_SECONDS = (1.0, 60.0)
_NO_ADAPTERS = "this engine serves no adapters: its model is divided among ranks"
# How often a step tells of the device's memory.
_MEMORY_SECONDS = 1.0


class EngineRuntime:
    """``core`` belongs to the thread that calls ``run``; everything else may be called from any.
    ``pulse`` shows whether it makes progress."""

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        max_num_open: int,
        adapters: Adapters | None = None,
    ) -> None:
        self.core = core
        self.info = info
        self._adapters = adapters
        self._max_num_open = max_num_open
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_stopped = False
        core.listen = self._listen
        self._lock = threading.Lock()
        self._open: dict[str, Request] = {}
        self._backlog = Backlog()
        self._limits = TenantLimits()
        self._batches = Batches()
        self.pulse = Pulse()

    # --- requests ---

    def admit(self, request: GenerationRequest) -> Request:
        """A place for the request, until ``release``, and what ``submit`` takes. Raises RequestError,
        QueueFullError and TenantLimitError."""
        self.check(request)
        adapter = None
        if self._adapters is not None:
            request, adapter = self._adapters.applied_to(request)
        elif request.adapter is not None:
            raise UnknownAdapterError(request.adapter)
        batch = request.batch
        if batch and not batch.num_at_once and batch.num_choices > self._max_num_open:
            field = "prompt" if batch.num_prompts > 1 else "n"
            most = f"at most {self._max_num_open} at a time (max_num_seqs and max_num_waiting)"
            raise RequestError(field, f"{batch.num_choices} choices: this server takes {most}")
        prepared = self.core.prepare(request)
        prepared.adapter = adapter
        with self._lock:
            if request.request_id in self._open:
                raise RequestError("request_id", f"request id {request.request_id!r} is in use")
            num_in, num_missing = self._batches.counted(batch)
            self._check_room(num_missing)
            self._limits.admit(prepared, num_missing, num_in > 0)
            self._batches.add(batch)
            self._open[request.request_id] = prepared
        return prepared

    def check_room(self, num_waiting: int) -> None:
        """Raises QueueFullError where so many that wait for admission take all places that are left."""
        with self._lock:
            self._check_room(num_waiting + 1)

    def _check_room(self, num_more: int) -> None:
        if len(self._open) + num_more > self._max_num_open:
            low, high = _RETRY_SECONDS
            wait = self._backlog.seconds(self._open.values())
            raise QueueFullError(float(math.ceil(min(high, max(low, wait)))))

    def submit(self, prepared: Request) -> None:
        self._inbox.put(lambda: self.core.submit(prepared))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its last event says so."""
        self._inbox.put(lambda: self.core.abort(request_id))

    def release(self, request_id: str) -> None:
        """The request's place is free. Unknown ids are ignored."""
        with self._lock:
            request = self._open.pop(request_id, None)
            if request is not None:
                self._backlog.observe_end(request)
                self._limits.release(request)

    def charge(self, tenant: Tenant) -> None:
        """Count a request in which the engine has no other part. Raises TenantLimitError."""
        with self._lock:
            self._limits.charge(tenant)

    def show_life(self) -> None:
        """Have the thread that calls ``run`` move the pulse, also while it waits for requests."""
        self._inbox.put(_nothing)

    # --- adapters ---

    @property
    def adapters(self) -> Adapters:
        """Raises AdapterError where none can be served."""
        if self._adapters is None:
            raise AdapterError(_NO_ADAPTERS)
        return self._adapters

    def check(self, request: GenerationRequest) -> None:
        """The engine's own conditions on a request. Raises RequestError."""
        prompt, limit = request.prompt_token_ids, self.info.max_model_len
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
        if request.pooling not in ("none", self.info.embeddings):
            raise RequestError("pooling", f"states are not pooled to their {request.pooling}")
        if request.speculative.draft_strategy not in self.info.drafters:
            known = ", ".join(sorted(self.info.drafters))
            raise RequestError(
                "speculative.draft_strategy",
                f"no drafter {request.speculative.draft_strategy!r}; loaded: {known}",
            )
        drafter = self.info.drafters[request.speculative.draft_strategy]
        try:
            drafter.resolve(request.speculative.options)
        except ValueError as error:
            raise RequestError("speculative.options", str(error)) from error
        if request.speculative.adaptive_depth not in gamma_policy_names():
            raise RequestError(
                "speculative.adaptive_depth",
                f"no gamma policy {request.speculative.adaptive_depth!r}; "
                f"there are: {', '.join(gamma_policy_names())}",
            )

    # --- the loop ---

    def run(self, post: Callable[[StepResult], None]) -> None:
        """Step until ``stop``, and ``post`` what comes out. Raises what broke the core."""
        events = self.core.kv_events
        if events is not None:
            events.start()
        try:
            self._step_on(post)
            save_all(self.core.pool)
        finally:
            self.core.close()
            if events is not None:
                events.stop()

    def _step_on(self, post: Callable[[StepResult], None]) -> None:
        due = 0.0
        while self._obey(post):
            self.pulse.beat()
            result = self.core.step()
            if result.stats is None and result.events:
                # Aborts left nothing to run: no step follows that would tell the gauges.
                result.stats = self.core.gauges()
            if result.stats is not None:
                self._backlog.observe_step(result.stats)
            if result.stats is not None and time.perf_counter() >= due:
                memory = device_memory(self.info.device)
                result.stats = replace(result.stats, device_memory=memory)
                due = time.perf_counter() + _MEMORY_SECONDS
            if result.events or result.stats is not None:
                post(result)

    def stop(self) -> None:
        """Aborts what is open and ends ``run`` before the next step."""
        self._inbox.put(self.core.abort_all)
        self._inbox.put(None)

    def _obey(self, post: Callable[[StepResult], None]) -> bool:
        """Run the commands that have come in, waiting for one if there is nothing else to do.
        False: stop."""
        block = not self.core.has_work and not self._is_stopped
        if block:
            self.pulse.rest()
        has_tidied = False
        while True:
            wait = save_some(self.core.pool) if block else None
            if block and wait is None and has_tidied:
                post(StepResult(stats=self.core.gauges(num_steps=0)))
            has_tidied = wait is not None
            try:
                command = None
                if not self._is_stopped:
                    command = self._inbox.get(block=block, timeout=wait)
            except queue.Empty:
                if block:
                    continue
                return True
            if block and command is _nothing:
                self.pulse.rest()
                continue
            if block:
                self.pulse.beat()
            if command is None:
                post(self.core.take_result())
                return False
            command()
            block = False

    def _listen(self) -> None:
        """Run the commands that have come in meanwhile."""
        while not self._is_stopped:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            if command is None:
                self._is_stopped = True
            else:
                command()


def _nothing() -> None:
    """The command that only shows that commands are obeyed."""
