"""An engine in the process of its caller, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading

from engine.core import EngineCore
from engine.lora.adapters import Adapters
from engine.process.runtime import EngineRuntime
from engine.process.streams import EventStreams
from engine.request.events import StepResult
from engine.request.info import AdapterInfo, EngineInfo
from engine.request.params import GenerationRequest, Tenant

logger = logging.getLogger(__name__)


class AsyncEngine(EventStreams):
    """An engine in this process: one thread that steps it, and one call into the event loop per step.

    ``core`` belongs to that thread; where it is never started, any one thread may step the core, or run
    ``runtime``.
    """

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        max_num_open: int,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(info)
        self.core = core
        self.runtime = EngineRuntime(core, info, max_num_open, adapters)
        self.pulse = self.runtime.pulse
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        await super().start()
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)
        self._thread.start()

    async def charge(self, tenant: Tenant) -> None:
        self._refuse_when_ended()
        self.runtime.charge(tenant)

    async def load_adapter(self, name: str, path: str, may_replace: bool = False) -> AdapterInfo:
        self._refuse_when_ended()
        load = self.runtime.adapters.load
        found = await asyncio.to_thread(load, name, path, may_replace)
        self._adopt_adapters(self.runtime.adapters.infos)
        return found

    async def unload_adapter(self, name: str) -> AdapterInfo:
        self._refuse_when_ended()
        found = self.runtime.adapters.unload(name)
        self._adopt_adapters(self.runtime.adapters.infos)
        return found

    def abort(self, request_id: str) -> None:
        self.runtime.abort(request_id)

    def _submit(self, request: GenerationRequest) -> None:
        self.runtime.submit(self.runtime.admit(request))

    def _release(self, request_id: str) -> None:
        self.runtime.release(request_id)

    async def _end(self) -> None:
        if self._thread is not None:
            self.runtime.stop()
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # lets the thread's last delivery run

    # --- engine thread ---

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self.runtime.run(self._post)
        except BaseException as error:
            logger.exception("the engine died")
            message = f"the engine died: {type(error).__name__}: {error}"
            # From here on nothing is admitted; then every open stream is told on the loop.
            self._dead = message
            self._loop.call_soon_threadsafe(self._fail_open, message)

    def _post(self, result: StepResult) -> None:
        assert self._loop is not None
        if result.events or result.stats is not None:
            steps = [] if result.stats is None else [result.stats]
            self._loop.call_soon_threadsafe(self._deliver, result.events, steps)
