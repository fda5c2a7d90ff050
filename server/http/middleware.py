"""Around every request: an id, a count, keys and a limit. Plain ASGI, so that disconnects pass
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
from server.errors import (
    REQUEST_ID_KEY,
    ApiError,
    bad_request,
    not_found,
    shutting_down,
    to_api_error,
    unauthorized,
    unknown_host,
)
from server.http.hosts import Hosts
from server.metrics.prometheus import AnswerMetrics

KEY_OF = "slipstream.key_of"
_ADMIN = "/admin"
_PROBES = ("/health", "/ready")
_REQUEST_ID = re.compile(r"[\w.\-]{1,128}", re.ASCII)


class AnswerMiddleware:
    """Gives answers an ``x-request-id``, the client's own where it is sound, else a new one, also by the
    name that Anthropic's clients read, and counts them by route template and status. An unexpected
    exception becomes its 500 here, since the framework would answer outside of all middleware."""

    def __init__(self, app: ASGIApp, metrics: AnswerMetrics) -> None:
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

        has_begun = False

        async def send_and_count(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
                # The router has put the route it chose into the scope by now.
                path = getattr(scope.get("route"), "path", "unmatched")
                method = scope["method"] if path != "unmatched" else "any"
                # A route's template, never what a client made up.
                self._metrics.count("http_requests", method, path, str(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, send_and_count)
        except Exception as error:
            if has_begun:
                raise
            found = to_api_error(error)
            self._metrics.count("rejections", found.code or str(found.status))
            await found.response(scope)(scope, receive, send_and_count)


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
        is_over = declared.isdecimal() and int(declared) > self._max_bytes
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = {} if is_over else await receive()
            num_bytes += len(message.get("body", b""))
            if is_over or num_bytes > self._max_bytes:
                # Raised where the application reads its body, it gets through and is counted.
                raise HTTPException(413)
            return message

        await self._app(scope, receive_counted, send)


class GuardMiddleware:
    """Refuses, before a body is read, what has no right to be here, and who says twice by which.

    ``/admin`` wants the admin key, ASCII too; without one there is nothing at those paths. Paths that
    begin as one of ``guarded`` want a key that ``find`` knows, where there is a ``find``: it gets a key
    as it came and returns what goes on with the request, as ``scope[KEY_OF]``, or None for a key that
    nobody has. While the server ends, these are refused to all. Health, metrics and the rest
    stay open to probes and scrapers. All but probes want a Host among ``hosts``, where there are any.
    """

    def __init__(
        self,
        app: ASGIApp,
        guarded: tuple[str, ...],
        admin_key: str | None,
        find: Callable[[bytes], object | None] | None,
        is_draining: Callable[[], bool],
        count: Callable[[str], None],
        hosts: Hosts | None = None,
    ) -> None:
        """``count``: is told the code of each refusal, as errors further in are counted."""
        self._app, self._count = app, count
        self._guarded = guarded
        self._hosts = hosts
        self._admin_key = None if admin_key is None else admin_key.encode("ascii")
        self._find = find
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        if refusal.status != 404:
            self._count(refusal.code or str(refusal.status))
        await refusal.response(scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._hosts is not None and scope["path"] not in _PROBES:
            for host in headers.getlist("host"):
                if host not in self._hosts:
                    return unknown_host(host)
        if len(headers.getlist("authorization")) > 1:
            # Of a proxy and this server each might go by another one.
            return bad_request(None, "There is more than one Authorization header.", "invalid_http")
        if scope["path"].startswith(_ADMIN):
            if self._admin_key is None:
                return not_found()
            key = _given_key(scope)
            is_right = key is not None and hmac.compare_digest(key, self._admin_key)
            return None if is_right else unauthorized("admin")
        if not scope["path"].startswith(self._guarded):
            return None
        if self._find is not None:
            key = _given_key(scope)
            scope[KEY_OF] = None if key is None else self._find(key)
            if scope[KEY_OF] is None:
                return unauthorized()
        return shutting_down() if self._is_draining() else None


def _given_key(scope: Scope) -> bytes | None:
    """In bytes, as it came: what is no ASCII is no key, and comparing text would fail over it.
    Anthropic's clients send ``x-api-key``, and the other header beside it where their users set both."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip(b" ") if scheme.lower() == b"bearer" else headers.get(b"x-api-key")
