"""A server's measured profile for the simulation: costs of steps, lengths and drafting of each kind of
request, and the server's sizes. A JSON file, written by
``python -m slipstream.tools.simulate measure``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.config import EngineConfig

SCHEMA = 1
_SIZES = (
    "block_size",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_waiting",
    "max_num_nodes",
    "prefill_chunk",
    "shed_speculation",
    "shed_queue",
    "enable_prefix_cache",
)
"""Settings of the engine that a simulated one obeys."""


class ProfileError(ValueError):
    """A profile that cannot be simulated; the message names file and field."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. ``steps``: rows, tokens of context, seconds and requests of measured steps, as
    ``CostModel`` takes them. Besides: ``overhead`` of every step, ``per_request`` that samples in it,
    ``per_admission`` of a request before it reaches the engine (its server's work, on the same cores),
    ``drafting`` of one request that its drafter is asked for. ``with_drafts``: by how much a step is
    dearer whose requests have different numbers of rows. ``with_neighbour``: by how much steps are
    slower while the other replicas of a machine are busy.
    """

    steps: tuple[tuple[int, int, float, int], ...]
    overhead: float = 0.0
    per_request: float = 0.0
    per_admission: float = 0.0
    drafting: float = 0.0
    with_drafts: float = 1.0
    with_neighbour: float = 1.0

    def __post_init__(self) -> None:
        for name in ("overhead", "per_request", "per_admission", "drafting"):
            _require(0 <= getattr(self, name) < math.inf, f"costs.{name} must be seconds from 0")
        for name in ("with_drafts", "with_neighbour"):
            _require(0 < getattr(self, name) < math.inf, f"costs.{name} must be above 0")
        _require(bool(self.steps), "costs.steps is empty")
        for index, step in enumerate(self.steps):
            rows, context, seconds, requests = step
            fits = rows >= 1 and context >= 0 and 0 < seconds < math.inf and requests >= 1
            _require(fits, f"costs.steps[{index}] is not [rows, context, seconds, requests]")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic. ``lengths``: pairs of tokens of prompt and answer, each as likely.
    ``prefix``: how many of a prompt's tokens all prompts of one tenant and kind begin with.
    ``share`` of the requests, in proportion. ``offered``: how often the drafter has something to
    propose; ``acceptance[d]``: how often its token at depth d is right where those before it were (the
    last holds for all depths after it).
    """

    lengths: tuple[tuple[int, int], ...]
    share: float = 1.0
    prefix: int = 0
    offered: float = 1.0
    acceptance: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(0 < self.share < math.inf, "share must be above 0")
        _require(self.prefix >= 0, "prefix must not be negative")
        _require(0 <= self.offered <= 1, "offered must be from 0 to 1")
        _require(all(0 <= each <= 1 for each in self.acceptance), "acceptance must be from 0 to 1")
        _require(bool(self.lengths), "lengths is empty")
        for index, (prompt, answer) in enumerate(self.lengths):
            fits = prompt > self.prefix and answer >= 1
            _require(fits, f"lengths[{index}] must be [prompt > prefix, answer >= 1] in tokens")


@dataclass(frozen=True, slots=True)
class Profile:
    """``engine``: the settings of the server's engine that matter here."""

    costs: Costs
    kinds: Mapping[str, Kind]
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(num_blocks=4096))

    def __post_init__(self) -> None:
        _require(bool(self.kinds), "kinds is empty")
        _require(self.engine.num_blocks is not None, "engine.num_blocks is missing")


def _require(fits: bool, message: str) -> None:
    if not fits:
        raise ProfileError(message)


def read_profile(path: Path) -> Profile:
    """Raises ProfileError naming file and field, OSError."""
    try:
        return _profile(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:  # ProfileError and JSONDecodeError are ValueErrors
        raise ProfileError(f"{path}: {error}") from error


def write_profile(profile: Profile, path: Path) -> None:
    """Raises OSError."""
    sizes = {name: getattr(profile.engine, name) for name in _SIZES}
    document = {
        "schema": SCHEMA,
        "engine": {name: value for name, value in sizes.items() if value is not None},
        "costs": asdict(profile.costs),
        "kinds": {name: asdict(kind) for name, kind in profile.kinds.items()},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _profile(document: Any) -> Profile:
    _fields(document, "profile", ("schema", "engine", "costs", "kinds"))
    if document.get("schema") != SCHEMA:
        raise ProfileError(f"schema must be {SCHEMA}")
    engine = _fields(document.get("engine", {}), "engine", _SIZES)
    costs = _fields(document.get("costs", {}), "costs", _names(Costs))
    kinds = document.get("kinds", {})
    _require(isinstance(kinds, dict), "kinds must be an object")
    return Profile(
        Costs(**{**costs, "steps": _rows(costs.get("steps"), "costs.steps", 4)}),
        {name: _kind(name, fields) for name, fields in kinds.items()},
        EngineConfig(**engine),
    )


def _kind(name: str, given: Any) -> Kind:
    where = f"kinds.{name}"
    fields = _fields(given, where, _names(Kind))
    lengths = _rows(fields.get("lengths"), f"{where}.lengths", 2)
    try:
        acceptance = tuple(map(float, fields.get("acceptance", ())))
        return Kind(**{**fields, "lengths": lengths, "acceptance": acceptance})
    except (ValueError, TypeError) as error:
        raise ProfileError(f"{where}: {error}") from error


def _names(kind: type) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)  # type: ignore[attr-defined]


def _fields(given: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    _require(isinstance(given, dict), f"{where} must be an object")
    for name in given:
        _require(name in known, f"{where} has no field {name!r}; known: {', '.join(known)}")
    return dict(given)


def _rows(given: Any, where: str, width: int) -> tuple[Any, ...]:
    _require(isinstance(given, list | tuple), f"{where} must be a list")
    for index, row in enumerate(given):
        fits = isinstance(row, list | tuple) and len(row) == width
        fits = fits and all(type(each) in (int, float) for each in row)
        _require(fits, f"{where}[{index}] must be {width} numbers")
    return tuple(map(tuple, given))
