"""Large bodies are read in processes of their own: parsed, checked, templated and tokenized there.

Each of these may take seconds for a body of some megabytes, mostly under the interpreter's lock, and
would keep every other request's tokens waiting. What comes back is what the event loop would have
made of the body: a plan, or the same refusal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from server.errors import ApiError, from_validation
from server.plan import RequestPlan
from server.request.protocol import ChatRequest, CompletionRequest
from server.request.translate import Translator

logger = logging.getLogger(__name__)

LARGE = 16 << 10
"""Bytes. What is not larger takes the event loop a few milliseconds at worst."""
_NICENESS = 10
CLIENT_GONE_STATUS = 499


@dataclass(frozen=True, slots=True)
class LargeBody:
    """JSON that nobody has looked at, to become a request of this kind."""

    kind: type[CompletionRequest | ChatRequest]
    content: bytes


class LargeBodyRoute(APIRoute):
    """Hands a large body of JSON to the endpoint unread, as ``LargeBody``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        usual = super().get_route_handler()
        kind = get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            try:
                content = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE_STATUS)
            if len(content) <= LARGE or not _is_json(request):
                return await usual(request)
            body = LargeBody(kind, content)
            response: Response = await self.endpoint(body, request, request.app.state.services)
            return response

        return handle


def _is_json(request: Request) -> bool:
    """As FastAPI judges: other bodies it does not parse."""
    main, _, sub = request.headers.get("content-type", "").partition(";")[0].partition("/")
    sub = sub.strip().lower()
    return main.strip().lower() == "application" and (sub == "json" or sub.endswith("+json"))


class BodyReader:
    """Makes plans of bodies: of small ones here, of large ones in a pool of ``num_processes``, which
    begins with the first of them or with ``warm``. 0: all here."""

    def __init__(self, translator: Translator, num_processes: int) -> None:
        self._translator = translator
        self._num_processes = num_processes
        self._pool: ProcessPoolExecutor | None = None

    def warm(self) -> None:
        """Begin now, so that the first large body need not wait for it."""
        if pool := self._get_pool():
            pool.submit(os.getpid)

    async def plan(
        self, body: CompletionRequest | ChatRequest | LargeBody, arrival_time: float
    ) -> RequestPlan:
        """Raises ApiError."""
        if not isinstance(body, LargeBody):
            return self._translator.plan(body, arrival_time)
        pool = self._get_pool()
        if pool is None:
            return read(self._translator, body, arrival_time)
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(pool, _read_here, body, arrival_time)
        except BrokenProcessPool as error:
            # The next one gets a new pool. Which body broke it is not known: all that it had are refused.
            if self._pool is pool:
                self._pool = None
            raise ApiError(500, "The body could not be read.", code="internal_error") from error
        if isinstance(found, ApiError):
            raise found
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _get_pool(self) -> ProcessPoolExecutor | None:
        if self._pool is None and self._num_processes > 0:
            try:
                translator = pickle.dumps(self._translator)
            except Exception as error:  # whatever a tokenizer of somebody else's raises
                logger.warning("large bodies are read by the server itself: %s", error)
                self._num_processes = 0
                return None
            self._pool = ProcessPoolExecutor(
                self._num_processes,
                # A copy of this process would copy its threads' locks.
                multiprocessing.get_context("spawn"),
                _begin,
                (translator,),
            )
        return self._pool


def read(translator: Translator, body: LargeBody, arrival_time: float) -> RequestPlan:
    """What FastAPI and the endpoint do with a small one. Raises ApiError."""
    try:
        data = json.loads(body.content)
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
        raise from_validation([found]) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "There was an error parsing the body") from error
    try:
        request = body.kind.model_validate(data)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from error
    return translator.plan(request, arrival_time)


# --- in the pool ---

_translator: Translator | None = None


def _begin(translator: bytes) -> None:
    global _translator
    # Tokens of running requests come first.
    os.nice(_NICENESS)
    # Ctrl-C reaches the whole group; the server says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _translator = pickle.loads(translator)


def _end_with_parent() -> None:
    """A pool whose server was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _read_here(body: LargeBody, arrival_time: float) -> RequestPlan | ApiError:
    assert _translator is not None
    try:
        return read(_translator, body, arrival_time)
    except ApiError as error:
        return error
