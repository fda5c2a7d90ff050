"""An HTTP client of a server around a given engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from llguidance import LLMatcher, LLTokenizer

from server.app import build_app
from server.settings import Settings
from worlds.scripted_engine import EOS, VOCAB_SIZE, ScriptedEngine, byte_tokenizer


@asynccontextmanager
async def serve(
    engine: ScriptedEngine, tokenizer: Any = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serves an engine for a block's length; gives an HTTP client whose ``app`` is the server."""
    settings = {"allowed_hosts": ["test"], **settings}
    app = build_app(engine, tokenizer or byte_tokenizer(), Settings(**settings))
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
            client.app = app  # type: ignore[attr-defined]
            yield client


async def post(
    path: str, body: Any, engine: ScriptedEngine, tokenizer: Any = None, **settings: Any
) -> httpx.Response:
    """The answer to one request, of a server that serves nothing else."""
    async with serve(engine, tokenizer, **settings) as client:
        return await client.post(path, json=body)


def fault(reply: httpx.Response, name: str = "code") -> tuple[int, Any]:
    """The status of an error, and what its ``name`` says."""
    return reply.status_code, reply.json()["error"][name]


def as_json(body: Any, padding: int = 0, **headers: str) -> dict[str, Any]:
    """Arguments of a post whose body ends with so many blanks."""
    headers |= {"content-type": "application/json"}
    return {"content": json.dumps(body) + " " * padding, "headers": headers}


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    return [
        line if line == "[DONE]" else json.loads(line)
        for line in (part.removeprefix("data: ") for part in text.split("\n\n"))
        if line
    ]


def named_events(text: str) -> list[Any]:
    """The data of server-sent events whose names have to be their types."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def allows(grammar: str, text: str) -> bool:
    """Whether a text matches a grammar."""
    tokenizer = byte_tokenizer()
    vocabulary = LLTokenizer(
        tokenizer.backend_tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS]
    )
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and bool(matcher.is_accepting())


def endless(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(script=lambda _: [97] * 400, group_sizes=(1,), **options)


async def until(condition: Any) -> None:
    """Waits for the event loop to bring something about; fails after five minutes, since a busy
    machine is no fault."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)
