"""A receiver of OTLP over HTTP, as a collector is one: a server on a port of its own that decodes what it
is sent with OpenTelemetry's own protobuf definitions."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


def values(pairs: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind))


@dataclass
class Collector:
    url: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def take(self, path: str, headers: dict[str, str], content: bytes) -> None:
        self.headers.append(headers)
        if path == "/v1/traces":
            for part in ExportTraceServiceRequest.FromString(content).resource_spans:
                self.resources.append(values(part.resource.attributes))
                self.spans += [span for scope in part.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for part in ExportMetricsServiceRequest.FromString(content).resource_metrics:
                self.resources.append(values(part.resource.attributes))
                found = [metric for scope in part.scope_metrics for metric in scope.metrics]
                self.metrics |= {metric.name: metric for metric in found}
        else:
            raise AssertionError(path)

    def span(self, name: str) -> Any:
        (found,) = [each for each in self.spans if each.name == name]
        return found

    def below(self, parent: Any) -> dict[str, Any]:
        """A span's children by name."""
        found = [each for each in self.spans if each.parent_span_id == parent.span_id]
        return {each.name: each for each in found}

    def points(self, name: str, **wanted: str) -> list[Any]:
        """A histogram's, of these attributes."""
        points = self.metrics[name].histogram.data_points
        return [point for point in points if wanted.items() <= values(point.attributes).items()]


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                content = gzip.decompress(content)
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.take(self.path, {k.lower(): v for k, v in self.headers.items()}, content)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
