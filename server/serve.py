"""Runs the server: an engine, in a process of its own or in this one, and HTTP in front of it."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from engine.config import EngineConfig
from engine.drafting.drafts import check_name, check_names
from engine.drafting.located import located
from engine.lora.names import parse_adapters
from engine.process.client import RemoteEngine
from engine.process.launch import EngineProcess, ignore_signals
from engine.process.light_imports import light_imports, without_torch
from engine.process.memory import settle_memory
from engine.process.preload import preload_environment
from engine.ranks.rank import rank_here
from engine.request.info import EngineInfo
from engine.tokenizer import load_tokenizer
from server.app import (
    Shared,
    application,
    build_app,
    http_config,
    public_name,
    services_of,
)
from server.http.draining import DrainingServer, exit_at_signals
from server.http.hosts import is_loopback
from server.http.listener import bind
from server.metrics.finished import add_line
from server.metrics.prometheus import Metrics
from server.metrics.several import SeveralMetrics
from server.metrics.telemetry.begin import check_telemetry
from server.models.launcher import EngineLauncher
from server.models.services import Services
from server.models.table import Model, Models
from server.request.speculative import SpeculativeResolver
from server.response_store import ResponseStore
from server.settings import Settings
from server.tenants.keys import keys_of
from server.workers.parent import Serve, Workers, wished

logger = logging.getLogger("slipstream")


_KEEP_ALIVE = 300.0
"""Seconds that each of several models stays loaded where no setting says it: as in Ollama."""
_BODY_BYTES = 64 << 20
"""The longest body where no setting says it and the models' lengths are not known."""
OneModel = tuple[Settings, EngineConfig]


def serve(settings: Settings, config: EngineConfig) -> None:
    """Serve one model until a signal says to end; returns once that has been done in order. Raises
    EngineError, ValueError or OSError where the model, the settings or the port rule it out, and
    SystemExit with 128 and the signal's number where one ended it at once: a second one, or one before
    it served."""
    check(settings, config)
    config = located(config)
    rank = rank_here(config.tensor_parallel_size)
    if rank is not None and rank.number > 0:
        _follow(config)
        return
    with _listening(settings) as listener:
        if not settings.engine_process:
            if settings.restart_engine:
                raise ValueError("restart_engine: the engine needs a process of its own")
            if settings.api_workers > 1:
                raise ValueError("api_workers: several need the engine in a process of its own")
            if config.tensor_parallel_size > 1:
                raise ValueError(
                    "tensor_parallel_size: several ranks need the engine in a process of its own"
                )
            # Imported late: torch takes seconds to load, and a server in front of an engine needs none.
            with light_imports(config):
                from engine.build import build_engine

            _speak_http(build_app(*build_engine(config), settings), settings, listener)
            return
        process = EngineProcess(
            config, logs=settings.log_options(), environment=preloads(settings, config)
        )
        try:
            process.begin()
            if settings.api_workers == 1:
                _serve_alone(process, settings, config, listener)
            else:
                _serve_with_workers(process, settings, config, listener)
        finally:
            process.stop()


def serve_several(settings: Settings, models: Sequence[OneModel]) -> None:
    """Serve models that are loaded when they are asked for; ``settings``: the server's. Raises as
    ``serve``."""
    _check_several(settings, models)
    models = [(own, located(config)) for own, config in models]
    with _listening(settings) as listener:
        app = _several_app(settings, models)
        try:
            _speak_http(app, settings, listener)
        finally:
            # Where a second signal ended all at once, or a thread would wait for one that loads.
            for each in app.state.models.all:
                each.launcher.end_process()


def _several_app(settings: Settings, models: Sequence[OneModel]) -> FastAPI:
    # All tokenizers now: what has none is refused at start, and reading one takes the interpreter.
    with without_torch():
        tokenizers = [
            load_tokenizer(each.served_model, each.revision, each.trust_remote_code)
            for _, each in models
        ]
    names = [public_name(config.model_name, own) for own, config in models]
    metrics = SeveralMetrics(
        names,
        lambda: (each.name for each in table.all if each.ready),
        lambda: table.state == "draining",
    )
    ask_store = ResponseStore(settings.stored_response_bytes).ask

    def launched(own: Settings, config: EngineConfig, tokenizer: Any, name: str) -> Model:
        def answer(engine: RemoteEngine, resolver: SpeculativeResolver | None) -> Services:
            known = {"served_model_name": name} | ({} if resolver is None else wished(resolver))
            shared = Shared(metrics.of(name, engine.info), None, ask_store)
            goes_by = own.model_copy(update=known)
            return services_of(engine, tokenizer, goes_by, shared, may_go=True)

        launcher = EngineLauncher(
            config,
            answer,
            logs=settings.log_options(),
            environment=preloads(settings, config),
            step_timeout=settings.step_timeout,
        )
        keep_alive = _KEEP_ALIVE if own.keep_alive is None else own.keep_alive
        return Model(name, launcher=launcher, keep_alive=keep_alive)

    found = [
        launched(*each, tokenizer, name)
        for each, tokenizer, name in zip(models, tokenizers, names, strict=True)
    ]
    table = Models(found, settings, metrics, ask_store)
    drafters = dict.fromkeys(name for _, config in models for name in check_names(config))
    return application(table, settings, tuple(drafters), _BODY_BYTES)


def _check_several(settings: Settings, models: Sequence[OneModel]) -> None:
    """Raises ValueError for what is not for models that come and go, and as ``check``."""
    at_odds = {
        "api_workers": settings.api_workers > 1,
        "engine_process": not settings.engine_process,
        "restart_engine": settings.restart_engine,
        "request_log": settings.request_log is not None,
        "otlp_endpoint": check_telemetry(settings.otlp_endpoint),
        "tensor_parallel_size": any(each.tensor_parallel_size > 1 for _, each in models),
    }
    for name, is_given in at_odds.items():
        if is_given:
            raise ValueError(f"{name}: not where models are loaded when they are asked for")
    for each in models:
        check(*each)
    names = [
        (public_name(config.model_name, own), *parse_adapters(config.lora))
        for own, config in models
    ]
    seen = Counter(name for own in names for name in own)
    if twice := [name for name, count in seen.items() if count > 1]:
        raise ValueError(f"served_model_name: two models or adapters are called {twice[0]!r}")
    for setting in ("kv_offload_file", "kv_events_endpoint"):
        given = Counter(getattr(config, setting) for _, config in models)
        if any(count > 1 for value, count in given.items() if value is not None):
            raise ValueError(f"{setting}: two models cannot have the same one")


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """The bound socket, within which signals end the process. Raises ValueError, OSError."""
    with exit_at_signals(), bind(settings.host, settings.port) as listener:
        is_local = is_loopback(listener.getsockname()[0])
        if not (is_local or settings.has_key or settings.allow_open):
            raise ValueError(
                f"host: other machines reach {settings.host}, and there is no API key: set api_key or "
                "api_keys_file, or allow_open to serve whoever reaches the port"
            )
        yield listener


def check(settings: Settings, config: EngineConfig) -> None:
    """Refuse what can be refused before anything is loaded. Raises EngineError, ValueError, OSError."""
    known = check_names(config)
    strategy = settings.speculative.given().get("draft_strategy")
    if strategy is not None:
        check_name("speculative.draft_strategy", strategy, known)
    for name in settings.speculative_caps.draft_strategies or ():
        check_name("speculative_caps.draft_strategies", name, known)
    keys_of(settings.api_key, settings.api_keys_file, known)
    parse_adapters(config.lora)
    check_telemetry(settings.otlp_endpoint)
    if settings.request_log is not None:
        try:
            add_line(Path(settings.request_log), b"")
        except OSError as error:
            raise ValueError(f"request_log: {error}") from error


def _follow(config: EngineConfig) -> None:
    """Runs as a rank that was launched beside the first one, which serves and hears of signals."""
    from engine.build import follow_engine

    ignore_signals()
    follow_engine(config)


def _serve_alone(
    process: EngineProcess, settings: Settings, config: EngineConfig, listener: socket.socket
) -> None:
    with without_torch():
        tokenizer = load_tokenizer(config.served_model, config.revision, config.trust_remote_code)
    engine = RemoteEngine(process.ready(), process.connect(), process.pulse)

    def replace(info: EngineInfo) -> None:
        engine.replace(info, process.connect())

    engine.add_adapter_listener(process.keep_adapters)
    process.watch(replace if settings.restart_engine else None, settings.step_timeout)
    _speak_http(build_app(engine, tokenizer, settings), settings, listener)


def _serve_with_workers(
    process: EngineProcess, settings: Settings, config: EngineConfig, listener: socket.socket
) -> None:
    info = process.ready()
    # What the workers would refuse is refused here, once.
    resolver = SpeculativeResolver(info, settings.speculative, settings.speculative_caps)
    metrics = Metrics(
        info,
        public_name(info.model, settings),
        lambda: process.is_alive,
        lambda: workers.is_draining,
    )
    metrics.show_speculation(resolver.defaults)
    # Drafters' own settings are the engine's business; their class is made anew in each process.
    values = {name: getattr(settings, name) for name in Settings.model_fields if name != "drafter"}
    first = Serve(values, config, info, settings.log_options())
    responses = ResponseStore(settings.stored_response_bytes)
    workers = Workers(settings.api_workers, first, listener, process, metrics, resolver, responses)
    workers.run(settings.drain_seconds, settings.restart_engine, settings.step_timeout)


def _speak_http(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    models: Models = app.state.models
    for each in models.kept:
        each.bodies.warm()
    settle_memory()
    server = DrainingServer(http_config(app, settings), models.drain)
    server.run([listener])


def preloads(settings: Settings, config: EngineConfig) -> dict[str, str]:
    """Variables that the engine's process gets beside its parent's."""
    if not settings.preload or config.device != "cpu":
        return {}
    found = preload_environment()
    logger.info("preloaded into the engine's process: %s", found.get("LD_PRELOAD", "nothing"))
    return found
