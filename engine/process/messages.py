"""The messages between an engine's process and those in front of it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.logs import LogOptions
from engine.process.link import WithHandle
from engine.request.info import EngineInfo
from engine.request.params import GenerationRequest, Tenant

# --- between the process that launches an engine, or a rank of it, and that process ---


@dataclass(frozen=True, slots=True)
class Launch:
    """Build an engine. ``build`` names the function, as in ``engine.build:build_engine``, so that the
    sender need not load what it needs. ``logs``: how the process logs. ``follow``: the function that the
    other ranks run where the model is shared, named like ``build``."""

    build: str
    config: EngineConfig
    logs: LogOptions
    follow: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot be built; ``reason`` is for its launcher."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attach(WithHandle):
    """The handle is a new client's end of a pipe. ``wants_steps``: the client is told of every step."""

    wants_steps: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Abort everything and end."""


# --- between a client and the engine: these, and a ``StepResult`` per step back ---


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Charge:
    """A question: count a request in which the engine has no other part. The answer is None, or the
    TenantLimitError."""

    tenant: Tenant


@dataclass(frozen=True, slots=True)
class Died:
    """The engine broke; nothing follows."""

    message: str
