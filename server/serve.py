"""Runs the server: an engine, in a process of its own or in this one, and HTTP in front of it."""

from __future__ import annotations

import logging
import signal
import socket
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.drafting.drafts import check_name, check_names
from engine.drafting.located import located
from engine.lora.names import parse_adapters
from engine.process.client import RemoteEngine
from engine.process.launch import EngineProcess
from engine.process.light_imports import light_imports, without_torch
from engine.process.memory import settle_memory
from engine.process.preload import preload_environment
from engine.process.streams import EventStreams
from engine.ranks.rank import rank_here
from engine.request.info import EngineInfo
from engine.tokenizer import load_tokenizer
from server.app import build_app, http_config, public_name
from server.http.draining import DrainingServer, exit_at_signals
from server.http.hosts import is_loopback
from server.http.listener import bind
from server.metrics.finished import add_line
from server.metrics.prometheus import Metrics
from server.metrics.telemetry.begin import check_telemetry
from server.request.speculative import SpeculativeResolver
from server.response_store import ResponseStore
from server.settings import Settings
from server.tenants.keys import keys_of
from server.workers.parent import Serve, Workers

logger = logging.getLogger("slipstream")


def serve(settings: Settings, config: EngineConfig) -> None:
    """Serve until a signal says to end; returns once that has been done in order. Raises EngineError,
    ValueError or OSError where the model, the settings or the port rule it out, and SystemExit with 128
    and the signal's number where one ended it at once: a second one, or one before it served."""
    check(settings, config)
    config = located(config)
    rank = rank_here(config.tensor_parallel_size)
    if rank is not None and rank.number > 0:
        _follow(config)
        return
    with exit_at_signals(), bind(settings.host, settings.port) as listener:
        is_local = is_loopback(listener.getsockname()[0])
        if not (is_local or settings.has_key or settings.allow_open):
            raise ValueError(
                f"host: other machines reach {settings.host}, and there is no API key: set api_key or "
                "api_keys_file, or allow_open to serve whoever reaches the port"
            )
        if not settings.engine_process:
            if settings.api_workers > 1:
                raise ValueError("api_workers: several need the engine in a process of its own")
            if config.tensor_parallel_size > 1:
                raise ValueError(
                    "tensor_parallel_size: several ranks need the engine in a process of its own"
                )
            # Imported late: torch takes seconds to load, and a server in front of an engine needs none.
            with light_imports(config):
                from engine.build import build_engine

            _speak_http(*build_engine(config), settings, listener)
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
        add_line(Path(settings.request_log), b"")


def _follow(config: EngineConfig) -> None:
    """Runs as a rank that was launched beside the first one, which serves and hears of signals."""
    from engine.build import follow_engine

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
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
    _speak_http(engine, tokenizer, settings, listener)


def _serve_with_workers(
    process: EngineProcess, settings: Settings, config: EngineConfig, listener: socket.socket
) -> None:
    info = process.ready()
    # What the workers would refuse is refused here, once.
    resolver = SpeculativeResolver(info, settings.speculative, settings.speculative_caps)
    metrics = Metrics(
        info,
        public_name(info, settings),
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


def _speak_http(
    engine: EventStreams, tokenizer: Any, settings: Settings, listener: socket.socket
) -> None:
    app = build_app(engine, tokenizer, settings)
    app.state.services.bodies.warm()
    settle_memory()
    server = DrainingServer(http_config(app, settings), app.state.services.drain)
    server.run([listener])


def preloads(settings: Settings, config: EngineConfig) -> dict[str, str]:
    """Variables that the engine's process gets beside its parent's."""
    if not settings.preload or config.device != "cpu":
        return {}
    found = preload_environment()
    logger.info("preloaded into the engine's process: %s", found.get("LD_PRELOAD", "nothing"))
    return found
