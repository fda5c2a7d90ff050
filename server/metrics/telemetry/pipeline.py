"""OpenTelemetry's own parts, put together: from the requests that have the engine write to a collector.

Both signals go out from threads of the SDK, in batches; a collector that is slow or gone costs no request
anything. What the standard ``OTEL_*`` variables say of resource, headers, sampling, batches and limits,
the SDK reads itself.
"""

from __future__ import annotations

import threading
import time
import uuid

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import format_span_id, format_trace_id
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.logs import add_log_fields
from server.metrics.record import RECORD_KEY, RequestRecord
from server.metrics.telemetry.requests import OPERATIONS, WatchedRequests
from server.version import server_version

CLOSE_SECONDS = 5.0
"""Seconds that the last batch may take when the server ends."""


class Telemetry:
    """Sends the spans and figures of one application. An endpoint that is None gets nothing."""

    def __init__(self, traces: str | None, metrics: str | None, model_name: str) -> None:
        own = {
            "service.version": server_version(),
            # Several processes of a server count for themselves: their figures add up.
            "service.instance.id": str(uuid.uuid4()),
        }
        found = Resource.create(own)
        if str(found.attributes["service.name"]).startswith("unknown_service"):
            found = found.merge(Resource({"service.name": "slipstream"}))
        self._tracers = TracerProvider(resource=found, shutdown_on_exit=False)
        if traces is not None:
            self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(traces)))
        readers = []
        if metrics is not None:
            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(metrics)))
        self._meters = MeterProvider(readers, found, shutdown_on_exit=False)
        self.requests = WatchedRequests(
            self._tracers.get_tracer("slipstream", server_version()),
            self._meters.get_meter("slipstream", server_version()),
            model_name,
        )

    def close(self) -> None:
        """Send what is left, for ``CLOSE_SECONDS`` at most. Blocks."""
        threads = [
            threading.Thread(target=each.shutdown, daemon=True)
            for each in (self._tracers, self._meters)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CLOSE_SECONDS / len(threads))


class WatchMiddleware:
    """Begins the record and the span of a request, and ends both. Plain ASGI, so that disconnects pass
    through."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._requests = telemetry.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        record = scope[RECORD_KEY] = RequestRecord()
        span = self._requests.begin(path, Headers(scope=scope))
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
            self._requests.end(span, path, record, status, time.perf_counter() - begun)
