"""The application's arguments and settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from drafters.registry import drafter_settings
from server.settings import Settings, with_drafters

# Sockets, processes and times of HTTP are Serve's here, and it replaces what dies.
_SERVE_DECIDES = ("host", "port", "api_workers", "engine_process", "restart_engine", "drain_seconds",
                  "read_timeout", "write_timeout", "keep_alive_timeout")  # fmt: skip


class Arguments(BaseModel):
    """``args`` of the application. ``settings``: the server's, by the names that its file of settings
    has. ``prefix_characters``: requests of an API key and salt whose texts begin with the same so many
    characters go to one replica while it is not much busier than others; 0: all requests of a key and
    salt do."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any] = {}
    prefix_characters: int = Field(default=256, ge=0)


def read_settings(given: dict[str, Any]) -> Settings:
    """The server's settings, and ``SLIPSTREAM_*`` variables below them. Raises ValueError."""
    settings = with_drafters(drafter_settings())(**given)
    if vain := sorted(settings.model_fields_set & set(_SERVE_DECIDES)):
        raise ValueError(f"{', '.join(vain)}: Serve decides on this; leave it out")
    return settings
