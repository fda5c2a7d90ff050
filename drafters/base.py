"""The drafter protocol: what guesses for a target, and what it is told afterwards.

One drafter object per engine and name holds the states of all its requests, so that drafters with
a model of their own can batch. The engine thread is the only caller. A drafter never sees tensors
of the engine: token ids, options and, where it asks for them, the target's top tokens per verified
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from drafters.tree import DraftTree

OptionValue: TypeAlias = bool | int | float | str


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What one request asked for: ``width`` 1 is a chain; ``depth`` bounds the longest path."""

    width: int = 1
    depth: int = 16


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request's turn to draft.

    ``token_ids`` is the request's live list, prompt plus everything emitted (the last one is the
    anchor); read it, never keep or change it. ``max_nodes`` bounds the tree.
    """

    request_id: str
    token_ids: Sequence[int]
    max_nodes: int
    shape: DraftShape


@dataclass(frozen=True, slots=True)
class Observation:
    """What the target said about one request in one step.

    Row 0 is the anchor, row ``i + 1`` is node ``i`` of ``tree`` (the part that was verified; empty
    at gamma 0). ``path`` holds the rows whose token was emitted, starting with row 0; the target's
    token at the last of them is the last of ``emitted_token_ids``, unless the run was trimmed by a
    stop. ``top_token_ids[r]`` are the target's likeliest tokens at row ``r``, best first,
    zero-probability ones left out, if the drafter's ``num_top_tokens`` asked for them.
    """

    request_id: str
    token_ids: Sequence[int]
    tree: DraftTree
    row_token_ids: Sequence[int]
    path: Sequence[int]
    emitted_token_ids: Sequence[int]
    top_token_ids: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """A per-request option of a drafter: checked by the server, listed by ``GET /v1/drafters``."""

    name: str
    default: OptionValue
    description: str
    minimum: float | None = None
    maximum: float | None = None

    def check(self, value: object) -> OptionValue:
        """The value, if it fits. Raises ValueError naming the option otherwise."""
        kind = type(self.default)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.name} must be {kind.__name__}, not {type(value).__name__}")
        assert isinstance(value, bool | int | float | str)
        if not isinstance(value, bool | str):
            if self.minimum is not None and value < self.minimum:
                raise ValueError(f"{self.name} must be at least {self.minimum:g}")
            if self.maximum is not None and value > self.maximum:
                raise ValueError(f"{self.name} must be at most {self.maximum:g}")
        return value


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The public face of a drafter. ``drafts_trees``: has several continuations to offer."""

    name: str
    description: str
    drafts_trees: bool
    options: tuple[DrafterOption, ...] = ()

    def defaults(self) -> dict[str, OptionValue]:
        return {option.name: option.default for option in self.options}

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        """Defaults overlaid with checked values. Raises ValueError naming the offending option."""
        known = {option.name: option for option in self.options}
        unknown = sorted(set(given) - set(known))
        if unknown:
            have = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{self.name} has no option {unknown[0]!r}; it has: {have}")
        return self.defaults() | {name: known[name].check(value) for name, value in given.items()}


@runtime_checkable
class Drafter(Protocol):
    """A method of guessing. ``open`` .. ``close`` bracket a request's life, preemption included."""

    info: DrafterInfo

    def open(
        self,
        request_id: str,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        salt: str,
    ) -> None:
        """Start a request whose known tokens are ``token_ids`` (its prompt).

        ``salt`` names the tenant: nothing learned under one salt may draft under another.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A tree per request, at most ``max_nodes`` nodes each, possibly empty."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from verified rows. ``token_ids`` already ends with ``emitted_token_ids``."""

    def num_top_tokens(self, request_id: str) -> int:
        """How many of the target's top tokens per row ``observe`` wants for it; 0: none."""

    def close(self, request_id: str) -> None:
        """Forget the request."""


@dataclass(slots=True)
class DraftOptions:
    """A request's choice of drafter as the engine carries it: all options present and checked."""

    name: str = "none"
    shape: DraftShape = field(default_factory=DraftShape)
    options: dict[str, OptionValue] = field(default_factory=dict)
