"""Spans and metrics of requests over OTLP, an extra: with it off, nothing but ``begin`` is imported."""
