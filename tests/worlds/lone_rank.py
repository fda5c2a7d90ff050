"""Ranks that follow nobody do this instead."""

from __future__ import annotations

import os
import threading

from engine.config import EngineConfig
from engine.request.errors import UnsupportedModelError


def wait(config: EngineConfig) -> None:
    """Until the end."""
    del config
    threading.Event().wait()


def refuse(config: EngineConfig) -> None:
    """With where it was told to be."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    place = ", ".join(f"{name}={os.environ[name]}" for name in names)
    raise UnsupportedModelError(f"{place}: no {config.model}")
