"""Wires an engine and a tokenizer into an application. Nothing is global: apps can share a
process.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from engine.process.streams import EventStreams
from engine.request.info import EngineInfo
from server import apis, endpoints
from server.errors import install_error_handlers
from server.http.framing import HeadLimits
from server.http.hosts import Hosts
from server.http.middleware import AnswerMiddleware, BodyLimitMiddleware, GuardMiddleware
from server.http.openapi import describe_as_it_is
from server.http.protocol import HttpConfig, Patience
from server.metrics.finished import FinishedMiddleware
from server.metrics.prometheus import Metrics, RequestMetrics
from server.metrics.telemetry.begin import begin_telemetry
from server.models.services import Services
from server.models.table import Model, Models
from server.plan import IGNORED_HEADER
from server.reply.choices import ChoiceSource
from server.reply.token_texts import TokenTexts
from server.request.large_bodies import BodyReader, default_body_bytes
from server.request.message_formats import MessageFormats
from server.request.prompts import template_of
from server.request.speculative import ChangeSpeculation, SpeculativeChange, SpeculativeResolver
from server.request.translate import Translator
from server.response_store import AskStore, ResponseStore
from server.settings import Settings
from server.tenants.keys import keys_of
from server.version import server_version

if TYPE_CHECKING:
    from server.metrics.telemetry.pipeline import Telemetry


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts shared by several applications in front of one engine, or by the models of one application.
    ``metrics``: steps included, which are counted here where they are this process's own.
    ``change_speculation``: None: it is decided here."""

    metrics: RequestMetrics
    change_speculation: ChangeSpeculation | None
    ask_store: AskStore


def build_app(
    engine: EventStreams, tokenizer: Any, settings: Settings, shared: Shared | None = None
) -> FastAPI:
    """The application; its lifespan starts and stops the engine. ``shared``: what it has in common with
    others in front of the same engine; None: it is alone.

    Raises ValueError where the settings' speculative defaults or caps do not fit the engine, or the file
    of API keys cannot be used.
    """
    name = public_name(engine.info.model, settings)
    if shared is None:
        own = Metrics(engine.info, name, is_draining=lambda: models.state == "draining")
        shared = Shared(own, None, ResponseStore(settings.stored_response_bytes).ask)
    services = services_of(engine, tokenizer, settings, shared)
    models = Models(
        [Model(name, services=services)],
        settings,
        shared.metrics,
        shared.ask_store,
    )
    limit = default_body_bytes(engine.info.max_model_len, tokenizer)
    return application(models, settings, engine.info.drafters, limit)


def application(
    models: Models, settings: Settings, drafters: Collection[str], body_bytes: int
) -> FastAPI:
    """The application in front of these models. ``drafters``: those that can be named; ``body_bytes``:
    the longest body where no setting says it. Raises as ``build_app``."""
    # Where there are several models, there is none.
    telemetry = begin_telemetry(settings.otlp_endpoint, models.all[0].name)
    of_apis = routers(apis)
    app = FastAPI(
        title="Slipstream",
        summary="LLM inference in which every request drafts, and no output changes for it.",
        version=server_version(),
        # Its own pages for these load scripts from elsewhere; endpoints/docs.py has one that does not.
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _serving(models, telemetry),
        # As they are: FastAPI makes what it includes anew, models of all answers and all, and on the
        # first request to each application.
        routes=[route for router in (*routers(endpoints), *of_apis) for route in router.routes],
    )
    count_rejection = partial(models.metrics.count, "rejections")
    install_error_handlers(app, count_rejection)
    describe_as_it_is(app, drafters)
    app.state.models = models
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes or body_bytes)
    if settings.request_log is not None:
        app.add_middleware(FinishedMiddleware, path=settings.request_log)
    # With a key all are answered: a page of another site does not know it.
    hosts = Hosts((settings.host, *(settings.allowed_hosts or ())), settings.allow_open)
    app.add_middleware(
        GuardMiddleware,
        guarded=guarded(of_apis),
        admin_key=None if settings.admin_key is None else settings.admin_key.get_secret_value(),
        find=keys_of(settings.api_key, settings.api_keys_file, drafters),
        is_draining=lambda: models.state == "draining",
        hosts=None if settings.has_key else hosts,
        count=count_rejection,
    )
    if telemetry is not None:
        # Imported late: what it builds on is an extra.
        from server.metrics.telemetry.pipeline import WatchMiddleware

        app.add_middleware(WatchMiddleware, telemetry=telemetry)
    app.add_middleware(AnswerMiddleware, metrics=models.metrics)
    if settings.cors_origins:
        # Around what refuses: a page can only read why with these headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER, "x-request-id", "request-id", "retry-after"],
        )
    return app


def services_of(
    engine: EventStreams,
    tokenizer: Any,
    settings: Settings,
    shared: Shared,
    *,
    may_go: bool = False,
) -> Services:
    """Returns the services in front of an engine. ``may_go``: it comes and goes. Raises as
    ``build_app``."""
    info = engine.info
    model_name = public_name(info.model, settings)
    resolver = SpeculativeResolver(info, settings.speculative, settings.speculative_caps)
    template = template_of(tokenizer)
    formats = MessageFormats(
        tokenizer, template, settings.tool_call_parser, settings.reasoning_parser
    )
    takes_models = settings.generation_config == "auto"
    translator = Translator(
        info,
        tokenizer,
        resolver,
        model_name,
        settings.max_choices,
        settings.max_request_seconds,
        formats,
        settings.sampling.over(info.sampling_defaults if takes_models else {}),
        settings.log_client_fields,
        may_go,
    )
    engine.add_adapter_listener(translator.adopt_adapters)
    bodies = BodyReader(translator, settings.body_processes, settings.log_options())
    if model_name in translator.adapters:
        raise ValueError(f"lora: the model itself is called {model_name!r}")
    change = shared.change_speculation
    if isinstance(own := shared.metrics, Metrics):
        own.show_engine(info, lambda: engine.is_alive)
        engine.add_step_listener(own.observe_step)
        engine.add_adapter_listener(own.show_adapters)
        own.show_speculation(resolver.defaults)
        change = change or _changing(translator, own)
    assert change is not None
    texts = TokenTexts(tokenizer)
    return Services(
        engine=engine,
        metrics=shared.metrics,
        bodies=bodies,
        change_speculation=change,
        ask_store=shared.ask_store,
        choices=ChoiceSource(engine, tokenizer, texts, shared.metrics),
        texts=texts,
        model_name=model_name,
        fingerprint=_fingerprint(info, model_name),
        has_chat_template=bool(template),
        step_timeout=settings.step_timeout,
    )


@asynccontextmanager
async def _serving(models: Models, telemetry: Telemetry | None) -> AsyncIterator[None]:
    """The application's life."""
    for each in models.kept:
        await each.engine.start()
    models.state = "serving"
    try:
        yield
    finally:
        await models.close()
        if telemetry is not None:
            await asyncio.to_thread(telemetry.close)


def _changing(translator: Translator, metrics: Metrics) -> ChangeSpeculation:
    """Returns what changes speculation where one application is alone in front of the engine."""

    async def change(wish: SpeculativeChange, *, from_built_in: bool) -> SpeculativeResolver:
        found = translator.resolver.changed(wish, from_built_in=from_built_in)
        translator.resolver = found
        metrics.show_speculation(found.defaults, True)
        return found

    return change


def public_name(model: str, settings: Settings) -> str:
    """A model's name in the API: a hub id as it is; of a local folder or file only its name, since
    paths are nobody's business."""
    path = Path(model)
    own = path.name if path.is_absolute() or path.exists() else model
    return settings.served_model_name or own.removesuffix(".gguf")


def _fingerprint(info: EngineInfo, model_name: str) -> str:
    """Equal for servers that write the same tokens for the same seed."""
    parts = [server_version(), model_name, info.device, info.dtype, info.determinism]
    if info.quantization is not None:
        parts += [info.quantization.method, str(info.quantization.activation_bits)]
        parts += [f"{scheme}, {count}" for scheme, count in info.quantization.schemes.items()]
    return "fp_" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:10]


def http_config(app: FastAPI, settings: Settings) -> HttpConfig:
    """How every process that speaks HTTP does so."""
    patience = Patience(
        read=settings.read_timeout,
        write=settings.write_timeout,
        keep_alive=settings.keep_alive_timeout,
        count=app.state.models.metrics.count,
    )
    limits = HeadLimits(settings.max_header_bytes, settings.max_headers)
    return HttpConfig(app, patience, limits)


def routers(*packages: ModuleType) -> list[APIRouter]:
    """Returns the router of every file of these packages that has one, by folder and name: of
    ``endpoints`` and ``apis``, if none is named."""
    modules = (
        import_module(each.name)
        for package in packages or (endpoints, apis)
        for each in walk_packages(package.__path__, f"{package.__name__}.")
    )
    return [each.router for each in modules if hasattr(each, "router")]


def guarded(of_apis: Sequence[APIRouter]) -> tuple[str, ...]:
    """Returns how the paths begin that want a key: all paths of APIs, but for the root. Raises ValueError
    for one that begins with a parameter: any path may be meant."""
    paths = {getattr(route, "path", "/") for router in of_apis for route in router.routes} - {"/"}
    if open_ones := [path for path in paths if path.startswith("/{")]:
        raise ValueError(f"the path {open_ones[0]} of an API has to begin with a name")
    return ("/v1", "/api", *sorted(path.partition("{")[0] for path in paths))
