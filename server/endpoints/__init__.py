"""The endpoints, one file each: a file here that has a ``router`` is part of the application, its
OpenAPI schema and the table in docs/api.md. What a handler works with comes as ``Served``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from engine.process.streams import EventStreams
from engine.request.errors import TryLaterError
from server.http.middleware import KEY_OF
from server.metrics.prometheus import RequestMetrics
from server.reply.choices import ChoiceSource
from server.reply.streaming import answer
from server.reply.token_texts import TokenTexts
from server.reply.writers import Writer
from server.request.large_bodies import BodyReader
from server.request.live_speculation import ChangeSpeculation
from server.request.speculative import SpeculativeResolver
from server.tenants.terms import Terms


@dataclass(slots=True)
class Services:
    """The parts of one application. ``fingerprint``: equal for servers that write the same tokens
    for the same seed. ``step_timeout``: seconds after which the engine's step counts as hung.
    ``state``: "serving" between the app's start and the first word of its end.
    """

    engine: EventStreams
    metrics: RequestMetrics
    bodies: BodyReader
    change_speculation: ChangeSpeculation
    choices: ChoiceSource
    texts: TokenTexts
    model_name: str
    fingerprint: str
    has_chat_template: bool
    step_timeout: float
    drain_seconds: float
    created: int = field(default_factory=lambda: int(time.time()))
    state: Literal["starting", "serving", "draining"] = "starting"

    async def answer(self, body: Any, request: Request, kind: type[Writer]) -> Response:
        """The reply of the engine, on the terms of the request's key. Raises ApiError and EngineError."""
        terms = _terms(request)
        plan = await self.bodies.plan(body, time.perf_counter(), terms.drafters if terms else None)
        if terms and terms.tenant.name:
            plan = terms.on(plan)
        writer = kind(plan, self.texts, self.model_name, self.fingerprint)
        return await answer(request, self.choices.run, writer)

    async def charge(self, request: Request) -> None:
        """Count a request that costs this server time and the engine none. Raises TenantLimitError,
        EngineDeadError."""
        terms = _terms(request)
        if terms is None or terms.tenant.requests_per_minute is None:
            return
        try:
            await self.engine.charge(terms.tenant)
        except TryLaterError as error:
            self.metrics.count("tenant_rejections", terms.tenant.name, error.code)
            raise

    def resolver_for(self, request: Request) -> SpeculativeResolver:
        """Returns what those with this request's key may ask of speculation."""
        terms = _terms(request)
        return self.resolver.held_to(terms.drafters if terms else None)

    async def drain(self) -> None:
        """Take no more requests, and return when none goes on. Harmless when repeated."""
        self.state = "draining"
        await self.engine.stop(self.drain_seconds)

    @property
    def resolver(self) -> SpeculativeResolver:
        """The resolver of requests that come now."""
        return self.bodies.resolver

    @property
    def is_hung(self) -> bool:
        return self.engine.step_seconds > self.step_timeout


def _terms(request: Request) -> Terms | None:
    terms: Terms | None = request.scope.get(KEY_OF)
    return terms


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Served = Annotated[Services, Depends(_services)]


def routers() -> list[APIRouter]:
    """Returns the router of every file here, by name."""
    names = sorted(module.name for module in iter_modules(__path__))
    return [import_module(f"{__name__}.{name}").router for name in names]
