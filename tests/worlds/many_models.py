"""A server of several models whose engines are scripted, and come and go when the test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from engine.process.streams import EventStreams
from engine.request.errors import EngineError
from engine.request.params import GenerationRequest
from server.app import Shared, application, services_of
from server.metrics.several import SeveralMetrics
from server.models.services import Services
from server.models.table import Model, Models
from server.response_store import ResponseStore
from server.settings import Settings
from worlds.scripted_engine import EOS, ScriptedEngine, byte_tokenizer

BODY_BYTES = 1 << 22


def engine_of(name: str) -> ScriptedEngine:
    """Writes what follows from its name and the prompt."""

    def script(request: GenerationRequest) -> Sequence[int]:
        prompt = [each for each in request.prompt_token_ids if each < 128][-8:]
        return [*name.encode(), *reversed(prompt), EOS]

    return ScriptedEngine(script=script)


@dataclass
class FakeLauncher:
    """Launches one engine after another, each once ``gate`` is set; ``fault`` refuses them. ``events``
    tells of all launchers of a server, in order. ``needed_bytes``: of memory, where it is loaded."""

    name: str
    events: list[str]
    metrics: Callable[..., Any]
    ask_store: Any
    needed_bytes: int = 0
    promised_bytes: int = 0
    file_bytes: int = 12
    adapters: Sequence[str] = ()
    fault: EngineError | None = None
    engine: ScriptedEngine | None = None
    promised: list[int] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def launch(self, promised_bytes: int) -> Services:
        self.events.append(f"{self.name} begins")
        self.promised.append(promised_bytes)
        self.is_stopped.clear()
        waits = [asyncio.ensure_future(each.wait()) for each in (self.gate, self.is_stopped)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        if self.fault is not None or self.is_stopped.is_set():
            raise self.fault or EngineError("it was ended while it loaded")
        self.engine = engine_of(self.name)
        engine: Any = self.engine
        shared = Shared(self.metrics(self.name, engine.info), None, self.ask_store)
        settings = Settings(served_model_name=self.name, body_processes=0)
        found = services_of(engine, byte_tokenizer(), settings, shared, may_go=True)
        assert isinstance(engine, EventStreams | ScriptedEngine)
        await self.engine.start()
        self.events.append(f"{self.name} is loaded")
        return found

    async def stop(self) -> None:
        self.is_stopped.set()
        if self.engine is not None:
            assert not self.engine.open, "an engine is ended under its requests"
            await self.engine.stop()
            self.engine = None
            self.events.append(f"{self.name} has ended")


def _as_one(launcher: FakeLauncher) -> Any:
    return launcher


@dataclass
class Several:
    client: httpx.AsyncClient
    table: Models
    launchers: Mapping[str, FakeLauncher]
    events: list[str]

    @property
    def app(self) -> Any:
        return self.client.app  # type: ignore[attr-defined]

    async def complete(self, name: str, prompt: str = "x", **fields: Any) -> httpx.Response:
        body = {"model": name, "prompt": prompt, **fields}
        return await self.client.post("/v1/completions", json=body)

    def engine(self, name: str) -> ScriptedEngine:
        """Returns a loaded model's engine."""
        engine = self.launchers[name].engine
        assert engine is not None
        return engine

    def state(self, name: str) -> str:
        return next(each.state for each in self.table.all if each.name == name)


def built(
    names: Sequence[str], keep_alive: float, free: Callable[[], int], **settings: Any
) -> tuple[FastAPI, Models, Mapping[str, FakeLauncher], list[str]]:
    """The application of models of these names, and what it is made of."""
    metrics = SeveralMetrics(
        names,
        lambda: (each.name for each in table.all if each.ready),
        lambda: table.state == "draining",
    )
    events: list[str] = []
    ask_store = ResponseStore(1 << 20).ask
    launchers = {name: FakeLauncher(name, events, metrics.of, ask_store) for name in names}
    models = [
        Model(name, launcher=_as_one(launchers[name]), keep_alive=keep_alive) for name in names
    ]
    chosen = Settings(**({"allowed_hosts": ["test"], "drain_seconds": 1} | settings))
    table = Models(models, chosen, metrics, ask_store, free)
    app = application(table, chosen, ("none", "ngram"), BODY_BYTES)
    return app, table, launchers, events


@asynccontextmanager
async def several(
    *names: str, keep_alive: float = 1e6, free: Callable[[], int] = lambda: 1 << 62, **settings: Any
) -> AsyncIterator[Several]:
    """Serves models of these names for a block's length."""
    app, table, launchers, events = built(names, keep_alive, free, **settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            client.app = app  # type: ignore[attr-defined]
            yield Several(client, table, launchers, events)
    assert {each.state for each in table.all} == {"not loaded"}
    assert all(each.engine is None for each in launchers.values())
