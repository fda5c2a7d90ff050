"""The parts that answer for one model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from engine.process.streams import EventStreams
from engine.request.errors import TryLaterError
from engine.request.info import AdapterInfo
from server.http.middleware import KEY_OF
from server.metrics.prometheus import RequestMetrics
from server.plan import RequestPlan, ignored_header
from server.reply.choices import ChoiceSource
from server.reply.streaming import answer
from server.reply.token_texts import TokenTexts
from server.reply.writers import WholeWriter
from server.request.body import Body
from server.request.large_bodies import BodyReader, LargeBody
from server.request.speculative import ChangeSpeculation, SpeculativeResolver
from server.request.translate import Translator
from server.response_store import AskStore
from server.tenants.terms import Terms

Result = TypeVar("Result")
Few = Sequence[str] | None
ARRIVAL = "slipstream.arrival"
"""In a request's scope: when it came, by the clock of ``GenerationRequest.arrival_time``."""


@dataclass(slots=True)
class Services:
    """They are made when the model's engine is there. ``fingerprint``: equal for servers that write the
    same tokens for the same seed. ``step_timeout``: seconds without progress after which the engine
    counts as hung.
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

    async def answer(
        self,
        kind: Callable[[RequestPlan, TokenTexts, str], WholeWriter],
        body: Body | LargeBody,
        request: Request,
        work: Callable[..., RequestPlan],
    ) -> Response:
        """Returns the reply to a request on the terms of its key, as a ``kind`` writes it. ``work`` makes
        a plan as ``Translator.plan`` does. Raises ApiError, EngineError."""
        terms = terms_of(request)
        arrival = request.scope.get(ARRIVAL) or time.perf_counter()
        plan = await self.read(body, request, partial(work, arrival_time=arrival))
        if terms and terms.tenant.name:
            plan = terms.on(plan)
        writer = kind(plan, self.texts, self.fingerprint_of(plan.adapter))
        return await answer(request, self.choices.run, writer)

    async def read(
        self, body: Body | LargeBody, request: Request, work: Callable[..., Result]
    ) -> Result:
        """Returns the result of ``work`` on the body, for which there are no drafters and adapters but
        those of the request's key. Raises ApiError."""
        if terms := terms_of(request):
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
        terms = terms_of(request)
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

    async def charge(self, request: Request) -> None:
        """Count a request that costs this server time and the engine none. Raises TenantLimitError,
        EngineDeadError."""
        terms = terms_of(request)
        if terms is None or terms.tenant.requests_per_minute is None:
            return
        try:
            await self.engine.charge(terms.tenant)
        except TryLaterError as error:
            self.metrics.count("tenant_rejections", terms.tenant.name, error.code)
            raise

    def resolver_for(self, request: Request) -> SpeculativeResolver:
        """Returns what those with this request's key may ask of speculation."""
        terms = terms_of(request)
        return self.resolver.held_to(terms.drafters if terms else None)

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


def terms_of(request: Request) -> Terms | None:
    """Returns those of the key that came with the request; None: it needs none."""
    terms: Terms | None = request.scope.get(KEY_OF)
    return terms


def tenant_of(request: Request) -> str:
    """Returns the name of the tenant whose key came with the request; "" for none."""
    terms = terms_of(request)
    return terms.tenant.name if terms else ""
