"""Around every request: an id, a count, and the API key. Plain ASGI, so that disconnects pass
through.
"""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import unauthorized
from server.metrics import Metrics

REQUEST_ID_KEY = "slipstream.request_id"
_REQUEST_ID = re.compile(r"[\w.\-]{1,128}", re.ASCII)


class RequestIdMiddleware:
    """Answers carry ``x-request-id``: the client's own where it is sound, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope[REQUEST_ID_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HttpMetricsMiddleware:
    """Counts answers by route template and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The router has put the route it chose into the scope by now.
                path = getattr(scope.get("route"), "path", "unmatched")
                method = scope["method"] if path != "unmatched" else "any"
                self._metrics.count_http(method, path, message["status"])
            await send(message)

        await self._app(scope, receive, send_and_count)


class ApiKeyMiddleware:
    """Guards ``/v1``; health, metrics and the rest stay open to probes and scrapers."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                await unauthorized().response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
