"""``POST /api/pull``, as Ollama has it: fetches a model of the hub into this machine's cache, where the
operator allows it. What is served does not change.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json

from engine.hub.choice import HubError, HubFile
from engine.hub.fetch import fetch
from engine.hub.name import HubName, read_name
from server.apis.ollama.reply import OllamaError
from server.apis.ollama.request import OllamaPullRequest
from server.endpoints import Table
from server.errors import ApiError, refused
from server.http.openapi import REFUSED_BODY, errors
from server.plan import ignored_header
from server.request.large_bodies import LargeBody, TableRoute

router = APIRouter(tags=["ollama"], route_class=TableRoute)
_NOT_ALLOWED = "pull: this server fetches no models; its setting allow_pull (--allow-pull) is off."
_SUCCESS = {"status": "success"}
Line = dict[str, Any]


@router.post("/api/pull", responses=errors(*REFUSED_BODY, 403, 429, 500, 503, shape=OllamaError))
async def ollama_pull(body: OllamaPullRequest, request: Request, models: Table) -> Response:
    """Ollama's: fetch a model of the hub, where `--allow-pull` is set."""
    wanted: Any = body.parse() if isinstance(body, LargeBody) else body
    headers = ignored_header(wanted.ignored())
    if models.pulls is None:
        raise ApiError(403, _NOT_ALLOWED, code="pull_not_allowed")
    try:
        name = read_name(wanted.model)
    except ValueError as error:
        raise refused("model", f": {error}") from None
    for served in models.kept:
        await served.charge(request)
    lines = _pull(name, models.pulls)
    if wanted.stream:
        written = (to_json(line) + b"\n" async for line in lines)
        return StreamingResponse(written, 200, headers, "application/x-ndjson")
    async for line in lines:
        if "error" in line:
            raise ApiError(500, line["error"], code="pull_failed")
    return JSONResponse(_SUCCESS, headers=headers)


async def _pull(name: HubName, pulls: asyncio.Semaphore) -> AsyncIterator[Line]:
    """Yields Ollama's lines of how far it is, of which the last says success, or why there is none. One
    that is closed ends the download, which the next goes on with."""
    yield {"status": "pulling manifest"}
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[Line | None] = asyncio.Queue()
    is_gone = threading.Event()

    def told(file: HubFile, done: int) -> None:
        if is_gone.is_set():
            raise InterruptedError("nobody waits for it")
        line: Line = {"status": f"pulling {file.blob[:12]}", "digest": f"sha256:{file.blob}"}
        line |= {"total": file.size, "completed": done}
        loop.call_soon_threadsafe(found.put_nowait, line)

    async with pulls:
        fetching = loop.run_in_executor(None, lambda: fetch(name, told=told))
        fetching.add_done_callback(lambda _: found.put_nowait(None))
        try:
            while (line := await found.get()) is not None:
                yield line
            fetching.result()
        except HubError as error:
            yield {"error": str(error)}
            return
        finally:
            is_gone.set()
            fetching.add_done_callback(lambda done: done.cancelled() or done.exception())
    yield _SUCCESS
