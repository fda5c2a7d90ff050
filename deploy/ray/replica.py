"""A replica: the server's application and its engine's process, without a port of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message

from deploy.ray.adoption import SharedSpeculation, Speculation
from deploy.ray.exchange import Forwarded, Whole, answers, whole_answer
from deploy.ray.scaling import OpenTokens
from deploy.ray.settings import read_settings
from engine.drafting.located import located
from engine.process.client import RemoteEngine
from engine.process.launch import EngineProcess
from engine.process.streams import Take
from engine.request.events import TokenEvent
from engine.request.params import GenerationRequest
from engine.tokenizer import load_tokenizer
from server.app import build_app
from server.request.large_bodies import default_body_bytes
from server.serve import check, preloads

# Siblings that take longer to say what they go by are asked again.
_ASK_SECONDS = 5.0


class CountingEngine(RemoteEngine):
    """Knows how much it has to do."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.tokens = OpenTokens()

    async def stream(self, request: GenerationRequest, take: Take) -> None:
        with self.tokens.counted(request) as count:

            def count_and_take(event: TokenEvent) -> Coroutine[Any, Any, None] | None:
                count(event)
                return take(event)

            await super().stream(request, count_and_take)


class Replica:
    """The actor that Serve makes and asks. ``given``: settings of the server."""

    async def __init__(self, given: dict[str, Any]) -> None:  # type: ignore[misc]
        """Raises EngineError, ValueError, OSError where the model or the settings rule it out."""
        own = serve.get_replica_context()
        self.name: str = own.replica_id.unique_id
        self._siblings = serve.get_deployment_handle(own.deployment, own.app_name)
        settings = read_settings(given)
        config = settings.engine_config()
        check(settings, config)
        settings.log_options().begin()
        config = await asyncio.to_thread(located, config)
        self._process = EngineProcess(
            config, logs=settings.log_options(), environment=preloads(settings, config)
        )
        self._open = AsyncExitStack()
        self._open.push_async_callback(asyncio.to_thread, self._process.stop)
        try:
            self._process.begin()
            asked = asyncio.ensure_future(self._ask_siblings())
            tokenizer = await asyncio.to_thread(
                load_tokenizer, config.served_model, config.revision, config.trust_remote_code
            )
            info = await asyncio.to_thread(self._process.ready)
            self._engine = CountingEngine(info, self._process.connect(), self._process.pulse)
            self._process.watch(None, settings.step_timeout)
            self._app = build_app(self._engine, tokenizer, settings)
            self._services = self._app.state.models.only
            self._services.bodies.warm()
            await self._open.enter_async_context(self._app.router.lifespan_context(self._app))
            fingerprint = hashlib.blake2b(settings.model_dump_json().encode()).hexdigest()
            self._speculation = SharedSpeculation(self.name, fingerprint, self._services)
            await self._speculation.adopt(await asked)
        except BaseException:
            await self._open.aclose()
            raise
        self._max_body_bytes = settings.max_body_bytes or default_body_bytes(
            info.max_model_len, tokenizer
        )

        following = asyncio.ensure_future(self._follow())
        self._open.callback(following.cancel)

    async def _ask_siblings(self) -> list[Speculation]:
        """Returns the speculation of all replicas that take requests."""
        asked = self._siblings.broadcast("speculation")
        with suppress(TimeoutError, DeploymentUnavailableError):
            found = await asked.results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
            return [each for each in found if isinstance(each, Speculation)]
        return []

    async def _follow(self) -> None:
        """Changes made since the siblings were asked, until this is one of those who are told."""
        while not await self._speculation.adopt(await self._ask_siblings()):
            await asyncio.sleep(0.5)

    async def __del__(self) -> None:
        """Serve calls it when the open requests have ended."""
        await self._open.aclose()

    async def answer(self, request: Forwarded) -> AsyncGenerator[str | list[Message], None]:
        """The replica's name, and then the answer's ASGI messages in lists."""
        yield self.name
        async with aclosing(answers(self._app, request)) as found:
            async for messages in found:
                yield messages

    async def answer_whole(self, request: Forwarded) -> Whole:
        """The answer to a request that all replicas get."""
        return await whole_answer(self._app, request, self.name)

    async def speculation(self) -> Speculation:
        """Returns this replica's speculation, as ``/admin`` has made it."""
        return self._speculation.show()

    async def max_body_bytes(self) -> int:
        """The longest body that it takes."""
        return self._max_body_bytes

    async def check_health(self) -> None:
        """Raises RuntimeError where Serve has to replace it: its engine is dead, or hangs."""
        if not self._engine.is_alive:
            raise RuntimeError("the engine is dead")
        if self._services.is_hung:
            raise RuntimeError("the engine hangs")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the figure that ``TokenScaling`` goes by."""
        return {"open_tokens": float(self._engine.tokens.total)}
