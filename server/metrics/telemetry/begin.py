"""Whether telemetry is sent, and where to. Knows nothing of OpenTelemetry's packages, which may be
missing."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.metrics.telemetry.pipeline import Telemetry

_GENERAL = "OTEL_EXPORTER_OTLP_ENDPOINT"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def endpoint_of(signal: str, endpoint: str | None) -> str | None:
    """The URL to which "traces" or "metrics" go; None: nowhere. ``endpoint``, the setting, comes before
    OpenTelemetry's variables."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if off or os.environ.get(f"OTEL_{signal.upper()}_EXPORTER") == "none":
        return None
    own = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    base = endpoint or (None if own else os.environ.get(_GENERAL))
    return own if base is None else f"{base.rstrip('/')}/v1/{signal}"


def check_telemetry(endpoint: str | None) -> bool:
    """Whether anything is sent. Raises ValueError where it should be and the extra is missing."""
    if not (endpoint_of("traces", endpoint) or endpoint_of("metrics", endpoint)):
        return False
    try:
        import_module(_EXPORTER)
    except ImportError as error:
        given = "otlp_endpoint" if endpoint else "OTEL_EXPORTER_OTLP_ENDPOINT"
        needs = "OpenTelemetry: pip install -e '.[otel]'"
        raise ValueError(f"{given}: sending spans and metrics needs {needs}") from error
    return True


def begin_telemetry(endpoint: str | None, model_name: str) -> Telemetry | None:
    """None: nothing is sent. Raises as ``check_telemetry``."""
    if not check_telemetry(endpoint):
        return None
    # Imported late: only here is it known that it can be.
    from server.metrics.telemetry.pipeline import Telemetry

    traces, metrics = (endpoint_of(each, endpoint) for each in ("traces", "metrics"))
    return Telemetry(traces, metrics, model_name)
