"""Replicas of the server around scripted engines, in this process, which go when a test says so."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Message

from deploy.ray.exchange import Forwarded, ReplicaLostError, Whole, answers, whole_answer
from deploy.ray.gateway import Gateway
from slipstream.tools.simulate.affinity import home, preferred
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve


@dataclass
class Gathered:
    """``apps``: by name. ``loads``: open requests that the router takes each to have. ``lives``: how many
    lists of messages a replica gives before it is gone; forever where it is not named. ``refusal``: what
    happens in place of any. ``asked``: who was, in order."""

    apps: dict[str, Any]
    loads: dict[str, int] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    refusal: Exception | None = None
    asked: list[str] = field(default_factory=list)

    async def answer(self, request: Forwarded) -> AsyncGenerator[str | list[Message], None]:
        loads = dict.fromkeys(self.apps, 0) | self.loads
        name = preferred(request.key, loads, request.avoid)[0]
        if request.key is not None:
            request.choice.home = home(request.key, loads)
        self.asked.append(name)
        if self.refusal is not None:
            raise self.refusal
        yield name
        async with aclosing(answers(self.apps[name], request)) as found:
            async for messages in found:
                for message in messages:
                    if self.lives.get(name) == 0:
                        raise ReplicaLostError
                    if name in self.lives:
                        self.lives[name] -= 1
                    yield [message]

    async def ask_all(self, request: Forwarded) -> list[Whole]:
        living = {name: app for name, app in self.apps.items() if self.lives.get(name) != 0}
        return [await whole_answer(app, request, name) for name, app in living.items()]

    async def max_body_bytes(self) -> int:
        return 4096


@dataclass
class Fleet:
    """``engines``: those of the replicas ``a`` and ``b``. ``app``: the ingress."""

    engines: dict[str, ScriptedEngine]
    replicas: Gathered
    client: httpx.AsyncClient
    app: Any


@asynccontextmanager
async def fleet(
    *engines: ScriptedEngine, kind: type[Gathered] = Gathered, **settings: Any
) -> AsyncIterator[Fleet]:
    """Two replicas and the ingress in front of them."""
    named = dict(zip("ab", engines, strict=True))
    async with AsyncExitStack() as stack:
        apps = {}
        for name, engine in named.items():
            server: Any = await stack.enter_async_context(
                serve(engine, body_processes=0, **settings)
            )
            apps[name] = server.app
        replicas = kind(apps)
        app = Gateway(replicas, num_characters=64, name="front").app()
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        yield Fleet(named, replicas, await stack.enter_async_context(client), app)
