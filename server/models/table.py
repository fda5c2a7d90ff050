"""Which models of a server are loaded: who waits for one, when one has rested long enough to be ended,
and which has to go for another. All of it happens on the event loop.

A model without a launcher is there from start to end: that of a server of one. The others are loaded when
they are asked for. Each has one ``change`` at a time, a task that loads or ends it; who needs the model
waits for that and looks again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

from fastapi import Request

from engine.hub.memory import available_bytes
from engine.request.errors import EngineDeadError, EngineError
from server.errors import CLIENT_GONE_STATUS, ApiError, bad_request, shutting_down, unknown_model
from server.metrics.prometheus import AnswerMetrics
from server.models.launcher import EngineLauncher
from server.models.services import ARRIVAL, Services
from server.reply.streaming import ClientGoneError, unless_client_leaves
from server.request.wish import Wish, known_name
from server.response_store import AskStore
from server.settings import Settings

logger = logging.getLogger(__name__)

State = Literal["loaded", "loading", "not loaded"]
_RETRY_SECONDS = 5
_GIB = 1 << 30


class Model:
    """``keep_alive``: seconds that it stays loaded when nothing uses it; infinity: for ever."""

    def __init__(
        self,
        name: str,
        *,
        launcher: EngineLauncher | None = None,
        services: Services | None = None,
        keep_alive: float = math.inf,
    ) -> None:
        self.name = name
        self.launcher = launcher
        self.services = services
        self.change: asyncio.Task[None] | None = None
        self.is_loading = self.is_ending = False
        self.num_users = 0
        self.used_at = 0.0
        self._usual_keep_alive = self.keep_alive = keep_alive
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> Services | None:
        """Returns the services that answer for it now; None: it has to be loaded first."""
        if self.launcher is None:
            return self.services
        is_there = self.services is not None and self.services.engine.is_alive
        return self.services if is_there and self.change is None else None

    @property
    def state(self) -> State:
        return "loaded" if self.ready else "loading" if self.is_loading else "not loaded"

    @property
    def adapters(self) -> Sequence[str]:
        if self.ready is not None:
            return [each.name for each in self.ready.adapters]
        return () if self.launcher is None else self.launcher.adapters

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and may be ended."""
        is_used = self.num_users > 0 or (self.services and self.services.engine.num_open > 0)
        return self.launcher is not None and self.ready is not None and not is_used

    @property
    def holds_memory(self) -> bool:
        return self.is_loading or self.is_ending or self.ready is not None

    @property
    def expires_in(self) -> float:
        """Returns the seconds after which it is ended if nothing uses it meanwhile."""
        if self._timer is None:
            return self.keep_alive
        return max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def adopt(self, services: Services) -> None:
        """It is loaded."""
        self.services = services
        self.keep_alive = self._usual_keep_alive

    def hold(self) -> None:
        """It does not expire from now on."""
        self.used_at = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rest(self, expire: Callable[[], None]) -> None:
        """It expires where nothing uses it meanwhile."""
        self.hold()
        if self.keep_alive < math.inf:
            self._timer = asyncio.get_running_loop().call_later(self.keep_alive, expire)


class Models:
    """The models of one application. ``state``: "serving" between the application's start and the first
    word of its end. ``metrics``: of all models, and of what belongs to none. ``free_bytes``: of the
    host's memory."""

    def __init__(
        self,
        models: Sequence[Model],
        settings: Settings,
        metrics: AnswerMetrics,
        ask_store: AskStore,
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        self.all = models
        self.settings = settings
        self.metrics = metrics
        self._free_bytes = free_bytes
        self.ask_store = ask_store
        self.pulls = asyncio.Semaphore(1) if settings.allow_pull else None
        self.created = int(time.time())
        self.state: Literal["starting", "serving", "draining"] = "starting"
        self._making_room = asyncio.Lock()

    @property
    def only(self) -> Services:
        """Returns what answers in a server of one model that is there from start to end."""
        (services,) = self.kept
        return services

    @property
    def kept(self) -> list[Services]:
        """Returns what answers for the models that are there from start to end."""
        return [each.services for each in self.all if each.services and not each.launcher]

    @property
    def names(self) -> list[str]:
        """Returns what requests may call their model: adapters' names follow their model's."""
        return [name for each in self.all for name in (each.name, *each.adapters)]

    @property
    def _is_draining(self) -> bool:
        return self.state == "draining"

    def find(self, name: str | None, *, with_tags: bool = False) -> Model:
        """Returns the model of this name, or that has an adapter of it. ``with_tags``: names are
        Ollama's. Raises ApiError."""
        if self.all[0].launcher is None or (name is None and len(self.all) == 1):
            return self.all[0]
        if name is None:
            named = ", ".join(repr(each.name) for each in self.all)
            raise bad_request("model", f"model: is missing; this server serves {named}")
        meant = known_name(name, self.names) if with_tags else name
        for each in self.all:
            if meant == each.name or meant in each.adapters:
                return each
        first, *others = [each.name for each in self.all]
        raise unknown_model(name, first, others)

    @asynccontextmanager
    async def using(
        self, request: Request, wish: Callable[[], Wish]
    ) -> AsyncIterator[Services | None]:
        """The services for the model that a request names, loaded for as long as the block and the
        streams that it has begun. None: there is nothing to unload. Raises ApiError, and what
        ended its engine while it was loaded."""
        request.scope[ARRIVAL] = time.perf_counter()
        if self.all[0].launcher is None:
            yield self.all[0].services
            return
        wanted = wish()
        model = self.find(wanted.model, with_tags=request.url.path.startswith("/api/"))
        model.num_users += 1
        try:
            model.hold()
            services = model.ready
            if services is None and (model.is_loading or not wanted.only_unloads):
                services = await self._loaded(model, request)
            if services is not None and wanted.keep_alive is not None:
                model.keep_alive = wanted.keep_alive
            yield services
        finally:
            model.num_users -= 1
            self._settle(model)

    async def drain(self) -> None:
        """Take no more requests, and return when none goes on. Harmless when repeated."""
        self.state = "draining"
        await asyncio.gather(*map(self._drain, self.all))

    async def close(self) -> None:
        """End all that is left."""
        await self.drain()
        for each in self.kept:
            each.bodies.close()
        await asyncio.gather(*(each.launcher.stop() for each in self.all if each.launcher))

    async def _drain(self, model: Model) -> None:
        model.hold()
        if model.launcher is not None and model.is_loading:
            await model.launcher.stop()
        if model.change is not None:
            await asyncio.wait({model.change})
        if model.services is not None:
            await model.services.engine.stop(self.settings.drain_seconds)

    async def _loaded(self, model: Model, request: Request) -> Services:
        """Raises ApiError, EngineDeadError."""

        async def wait() -> Services:
            while (services := model.ready) is None:
                if self._is_draining:
                    raise shutting_down()
                change = model.change or self._begin(model, self._load(model))
                # What is begun goes on without those who leave.
                await asyncio.wait({change})
                if not self._is_draining and (error := change.exception()):
                    raise error
            return services

        try:
            return await unless_client_leaves(request.receive, wait)
        except ClientGoneError:
            message = "The client left while the model was loaded."
            raise ApiError(CLIENT_GONE_STATUS, message, code="client_gone") from None

    def _begin(self, model: Model, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def change() -> None:
            try:
                await work
            finally:
                model.change = None
                self._settle(model)

        model.change = asyncio.ensure_future(change())
        # Where all who waited have left, nobody else asks for it.
        model.change.add_done_callback(lambda done: done.cancelled() or done.exception())
        return model.change

    def _settle(self, model: Model) -> None:
        """Lets a model expire that nothing uses any more."""
        if model.is_idle and self.state == "serving":
            model.rest(partial(self._expire, model))

    def _expire(self, model: Model) -> None:
        if model.is_idle:
            self._begin_end(model, "idle")

    def _begin_end(self, model: Model, reason: str) -> asyncio.Task[None]:
        model.is_ending = True
        return self._begin(model, self._end(model, reason))

    async def _end(self, model: Model, reason: str) -> None:
        assert model.launcher is not None
        logger.info("ending %s: %s", model.name, reason)
        model.services = None
        model.hold()
        self.metrics.count("model_ends", model.name, reason)
        try:
            await model.launcher.stop()
        finally:
            model.is_ending = False

    async def _load(self, model: Model) -> None:
        """Raises ApiError, EngineDeadError."""
        assert model.launcher is not None
        if model.services is not None:
            await self._end(model, "died")
        async with self._making_room:
            promised = await self._make_room(model)
            model.is_loading = True
        logger.info("loading %s", model.name)
        outcome = "failed"
        try:
            async with asyncio.timeout(self.settings.load_timeout):
                services = await model.launcher.launch(promised)
            if not services.engine.is_alive:
                raise EngineDeadError("the engine ended when it was loaded")
            services.engine.add_idle_listener(partial(self._settle, model))
            model.adopt(services)
            outcome = "loaded"
        except TimeoutError:
            logger.error("%s took longer than load_timeout to load", model.name)
            raise _not_loaded(model, "took too long to load") from None
        except (EngineError, OSError, ValueError) as error:
            # What a server's end cuts off is no fault.
            level = logging.INFO if self._is_draining else logging.ERROR
            logger.log(level, "%s does not load: %s", model.name, error)
            raise _not_loaded(model, "could not be loaded; the server's log says why") from error
        finally:
            model.is_loading = False
            self.metrics.count("model_loads", model.name, outcome)

    async def _make_room(self, model: Model) -> int:
        """Ends models that nothing uses, least recently used first, until there is room for this one.
        Returns the bytes that the others will take yet. Raises ApiError."""
        while True:
            if self._is_draining:
                raise shutting_down()
            others = [each for each in self.all if each is not model and each.holds_memory]
            promised = sum(each.launcher.promised_bytes for each in others if each.launcher)
            if not others or self._fits(model, len(others), promised):
                return promised
            ending = {each.change for each in others if each.is_ending and each.change}
            if not ending:
                idle = [each for each in others if each.is_idle]
                if not idle:
                    raise _no_room(model, others, self.settings.max_loaded_models)
                oldest = min(idle, key=lambda each: each.used_at)
                ending = {self._begin_end(oldest, "memory")}
            await asyncio.wait(ending)

    def _fits(self, model: Model, num_others: int, promised_bytes: int) -> bool:
        assert model.launcher is not None
        most = self.settings.max_loaded_models
        if most is not None and num_others >= most:
            return False
        needed = model.launcher.needed_bytes
        return not needed or self._free_bytes() - promised_bytes >= needed


def _not_loaded(model: Model, reason: str) -> ApiError:
    return _later(f"The model '{model.name}' {reason}.", "model_not_loaded")


def _no_room(model: Model, others: Sequence[Model], most: int | None) -> ApiError:
    assert model.launcher is not None
    size = model.launcher.needed_bytes
    takes = f", which takes {size / _GIB:.1f} GiB" if size else ""
    if most is not None and len(others) >= most:
        takes = f" beside {most} (max_loaded_models)"
    held = ", ".join(
        f"'{each.name}' {'is being loaded' if each.is_loading else 'has requests running'}"
        for each in others
    )
    return _later(f"There is no room for the model '{model.name}'{takes}: {held}.", "no_room")


def _later(message: str, code: str) -> ApiError:
    headers = {"Retry-After": str(_RETRY_SECONDS)}
    return ApiError(503, message, code=code, headers=headers)
