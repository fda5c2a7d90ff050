"""Around every request: an id, a count, the API key and a limit. Plain ASGI, so that disconnects pass
through.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.logs import add_log_fields
from server.errors import body_too_large, not_found, shutting_down, unauthorized
from server.metrics import RequestMetrics

REQUEST_ID_KEY = "slipstream.request_id"
KEY_OF = "slipstream.key_of"
_GUARDED = ("/v1", "/tokenize", "/detokenize")
_ADMIN = "/admin"
_REQUEST_ID = re.compile(r"[\w.\-]{1,128}", re.ASCII)


class AnswerMiddleware:
    """Gives answers an ``x-request-id``, the client's own where it is sound, else a new one, and counts
    them by route template and status."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope[REQUEST_ID_KEY] = request_id
        # The task is this request's own, so nothing has to take it back.
        add_log_fields(x_request_id=request_id)

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                # The router has put the route it chose into the scope by now.
                path = getattr(scope.get("route"), "path", "unmatched")
                method = scope["method"] if path != "unmatched" else "any"
                self._metrics.count_http(method, path, message["status"])
            await send(message)

        await self._app(scope, receive, send_and_count)


class BodyLimitMiddleware:
    """Refuses a body over ``max_bytes``, before reading it where its length is declared."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await body_too_large().response()(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                # Raised where the application reads its body, an HTTPException gets through.
                raise HTTPException(413)
            return message

        await self._app(scope, receive_counted, send)


class DrainMiddleware:
    """Refuses what a key guards while the server ends, before a body is read; probes and scrapers are
    answered to the end."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_api(scope) and self._is_draining():
            await shutting_down().response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Guards ``/v1``, ``/tokenize`` and ``/detokenize``; health, metrics and the rest stay open to probes
    and scrapers. ``find`` is given a key, as it came, and has None for one that nobody has; what else it
    finds goes on with the request, as ``scope[KEY_OF]``."""

    def __init__(self, app: ASGIApp, find: Callable[[bytes], object | None]) -> None:
        self._app = app
        self._find = find

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_api(scope):
            found = self._find(key) if (key := _given_key(scope)) is not None else None
            if found is None:
                await unauthorized().response()(scope, receive, send)
                return
            scope[KEY_OF] = found
        await self._app(scope, receive, send)


class AdminKeyMiddleware:
    """Guards ``/admin`` with a key of its own, ASCII too; without one there is nothing at those paths."""

    def __init__(self, app: ASGIApp, admin_key: str | None) -> None:
        self._app = app
        self._expected = None if admin_key is None else admin_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_ADMIN):
            if self._expected is None:
                await not_found().response()(scope, receive, send)
                return
            key = _given_key(scope)
            if key is None or not hmac.compare_digest(key, self._expected):
                await unauthorized("admin").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given_key(scope: Scope) -> bytes | None:
    """In bytes, as it came: what is no ASCII is no key, and comparing text would fail over it."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = given.partition(b" ")
    return key.strip(b" ") if scheme.lower() == b"bearer" else None


def _is_api(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["path"].startswith(_GUARDED))
