"""The models of an engine's settings, each where it lies on this machine."""

from __future__ import annotations

from dataclasses import replace

from engine.config import EngineConfig
from engine.drafting.drafts import parse_drafts
from engine.hub.memory import available_bytes
from engine.hub.name import parse_name
from engine.lora.names import parse_adapters
from engine.names import locate


def located(config: EngineConfig) -> EngineConfig:
    """Returns the settings with paths in place of names on the hub: of the model, of drafts and adapters.
    What is not in the cache yet is fetched, if it fits into the memory of a CPU that is to run it.

    Raises OSError and ValueError as ``locate``.
    """
    memory = available_bytes() if config.device == "cpu" else None

    def path_of(model: str, revision: str | None = None) -> str:
        found = locate(model, revision, memory)
        return model if parse_name(model) is None else found

    drafts = [(each.name, path_of(each.path)) for each in parse_drafts(config.draft)]
    adapters = parse_adapters(config.lora)
    return replace(
        config,
        model=config.model and path_of(config.model, config.revision),
        draft=tuple(path if name is None else f"{name}={path}" for name, path in drafts),
        lora=tuple(f"{name}={path_of(path)}" for name, path in adapters.items()),
    )
