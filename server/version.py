"""The installed distribution's version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    """``0+source`` where the tree runs without being installed."""
    try:
        return version("slipstream-llm")
    except PackageNotFoundError:
        return "0+source"
