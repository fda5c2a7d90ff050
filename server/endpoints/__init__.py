"""The endpoints, one file each: a file here that has a ``router`` is part of the application, its
OpenAPI schema and the table in docs/api.md. What a handler works with comes as ``Served``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request

from engine.process.streams import EventStreams
from engine.request.errors import TryLaterError
from engine.request.info import AdapterInfo
from server.http.middleware import KEY_OF
from server.metrics.prometheus import RequestMetrics
from server.plan import RequestPlan, ignored_header
from server.reply.choices import ChoiceSource
from server.reply.token_texts import TokenTexts
from server.request.body import Body
from server.request.large_bodies import BodyReader, LargeBody
from server.request.speculative import ChangeSpeculation, SpeculativeResolver
from server.request.translate import Translator
from server.response_store import AskStore
from server.tenants.terms import Terms

Writer = TypeVar("Writer")
Result = TypeVar("Result")
Few = Sequence[str] | None


@dataclass(slots=True)
class Services:
    """The parts of one application. ``fingerprint``: equal for servers that write the same tokens
    for the same seed. ``step_timeout``: seconds without progress after which the engine counts as hung.
    ``drops_unknown``: whether unknown fields of bodies are left out and listed, instead of refused.
    ``pulls``: lets one fetch a model at a time; None: nobody may.
    ``state``: "serving" between the app's start and the first word of its end.
    """

    engine: EventStreams
    metrics: RequestMetrics
    bodies: BodyReader
    change_speculation: ChangeSpeculation
    ask_store: AskStore
    choices: ChoiceSource
    texts: TokenTexts
    model_name: str
    fingerprint: str
    has_chat_template: bool
    step_timeout: float
    drain_seconds: float
    drops_unknown: bool
    pulls: asyncio.Semaphore | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    state: Literal["starting", "serving", "draining"] = "starting"

    async def writer(
        self,
        kind: Callable[[RequestPlan, TokenTexts, str, str], Writer],
        body: Body | LargeBody,
        request: Request,
        work: Callable[..., RequestPlan],
    ) -> Writer:
        """Returns what writes the reply to a request, on the terms of its key. ``work`` makes a plan as
        ``Translator.plan`` does. Raises ApiError."""
        terms = _terms(request)
        plan = await self.read(body, request, partial(work, arrival_time=time.perf_counter()))
        if terms and terms.tenant.name:
            plan = terms.on(plan)
        name = plan.adapter or self.model_name
        return kind(plan, self.texts, name, self.fingerprint_of(plan.adapter))

    async def read(
        self, body: Body | LargeBody, request: Request, work: Callable[..., Result]
    ) -> Result:
        """Returns the result of ``work`` on the body, for which there are no drafters and adapters but
        those of the request's key. Raises ApiError."""
        if terms := _terms(request):
            work = partial(_held_to, terms.drafters, terms.adapters, work)
        return await self.bodies.read(body, work)

    async def read_apart(
        self, body: Body | LargeBody, request: Request, work: Callable[..., Result]
    ) -> tuple[Result, dict[str, str]]:
        """Returns the result of ``work``, of which no plan comes, and the headers of its answer. Raises
        ApiError."""
        return await self.read(body, request, partial(_with_headers, work))

    def adapters_for(self, request: Request) -> tuple[AdapterInfo, ...]:
        """Returns those that are loaded and that the request's key may name."""
        terms = _terms(request)
        few = terms.adapters if terms else None
        return tuple(each for each in self.adapters if few is None or each.name in few)

    def fingerprint_of(self, adapter: str | None) -> str:
        """Returns that of the model under an adapter; None: as it is."""
        found = next((each for each in self.adapters if each.name == adapter), None)
        return self.fingerprint if found is None else f"{self.fingerprint}_{found.digest[:10]}"

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Returns those that are loaded."""
        return self.engine.info.adapters or ()

    def tenant_of(self, request: Request) -> str:
        """Returns the name of the tenant whose key came with the request; "" for none."""
        terms = _terms(request)
        return terms.tenant.name if terms else ""

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
        return self.bodies.translator.resolver

    @property
    def is_hung(self) -> bool:
        return self.engine.stalled_seconds > self.step_timeout


def _held_to(drafters: Few, adapters: Few, work: Callable[..., Result], *given: Any) -> Result:
    translator, body = given
    return work(translator.held_to(drafters, adapters), body)


def _with_headers(
    work: Callable[..., Result], translator: Translator, body: Body
) -> tuple[Result, dict[str, str]]:
    return work(translator, body), ignored_header(body.ignored())


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
