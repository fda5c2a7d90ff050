"""Around the requests that have the engine write: begins their record and their span, and ends both."""

from __future__ import annotations

import time

from opentelemetry.trace import format_span_id, format_trace_id
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.logs import add_log_fields
from server.metrics.record import RECORD_KEY, RequestRecord
from server.metrics.telemetry.attributes import OPERATIONS
from server.metrics.telemetry.pipeline import Telemetry


class WatchMiddleware:
    """Plain ASGI, so that disconnects pass through."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        operation = OPERATIONS.get(path)
        if scope["type"] != "http" or scope["method"] != "POST" or operation is None:
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        record = scope[RECORD_KEY] = RequestRecord()
        span = self._telemetry.spans.begin(operation, path, Headers(scope=scope))
        context = span.get_span_context()
        if context.is_valid:
            add_log_fields(
                trace_id=format_trace_id(context.trace_id), span_id=format_span_id(context.span_id)
            )
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            seconds = time.perf_counter() - begun
            self._telemetry.spans.end(span, record, status)
            self._telemetry.figures.observe(operation, record, status, seconds)
