"""OpenTelemetry's own parts, put together: from spans and figures to a collector.

Both signals go out from threads of the SDK, in batches; a collector that is slow or gone costs no request
anything. What the standard ``OTEL_*`` variables say of resource, headers, sampling, batches and limits,
the SDK reads itself.
"""

from __future__ import annotations

import threading
import uuid

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from server.metrics.telemetry.figures import RequestFigures
from server.metrics.telemetry.spans import RequestSpans
from server.version import server_version

_SCOPE = "slipstream"
CLOSE_SECONDS = 5.0
"""What the last batch may take when the server ends."""


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
        self.spans = RequestSpans(self._tracers.get_tracer(_SCOPE, server_version()), model_name)
        self.figures = RequestFigures(self._meters.get_meter(_SCOPE, server_version()), model_name)

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
