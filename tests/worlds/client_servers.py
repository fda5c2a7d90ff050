"""Servers for the client's tests, each behind a real uvicorn in a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from server.app import build_app
from server.settings import Settings
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer

WAIT_SECONDS = 900.0
"""After which a test that waits is taken to hang; a busy machine is no fault."""
USER_AND_KEY = {"user", "max_tokens", "temperature", "seed", "stop", "stream", "stream_options"}


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The app's address, while the block runs."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@contextmanager
def slipstream(engine: ScriptedEngine, **settings: Any) -> Iterator[str]:
    """A Slipstream server whose engine is scripted."""
    with listening(
        build_app(engine, byte_tokenizer(), Settings(drain_seconds=1, **settings))
    ) as url:
        yield url


class OtherServer:
    """A strict server of OpenAI's API that is not Slipstream: fields that OpenAI has not are errors,
    and nothing but text is streamed. ``bodies`` keeps what it was asked."""

    def __init__(self, pieces: tuple[str, ...] = ("one ", "two ", "three")) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.pieces = pieces
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._answer)
        self.app.post("/v1/chat/completions")(self._answer)

    async def _models(self) -> Any:
        return {"object": "list", "data": [{"id": "other/model", "object": "model"}]}

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        unknown = set(body) - USER_AND_KEY - {"model", "prompt", "messages"}
        if unknown or body["model"] != "other/model":
            return JSONResponse({"detail": f"refused: {sorted(unknown)}, {body['model']}"}, 400)
        return StreamingResponse(self._events("messages" in body), media_type="text/event-stream")

    async def _events(self, is_chat: bool) -> AsyncIterator[str]:
        if is_chat:
            yield _event([{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}])
        for at, text in enumerate(self.pieces):
            reason = "stop" if at == len(self.pieces) - 1 else None
            content = {"delta": {"content": text}} if is_chat else {"text": text}
            yield _event([{"index": 0, "finish_reason": reason, **content}])
        yield _event([], usage={"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6})
        yield "data: [DONE]\n\n"


def _event(choices: list[dict[str, Any]], **more: Any) -> str:
    return f"data: {json.dumps({'object': 'chunk', 'choices': choices, **more})}\n\n"
