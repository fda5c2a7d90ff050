"""Sampling parameters that edit or truncate logits, and the register of them.

A file in ``engine/sampling/processors/`` that defines a :class:`LogitsProcessor` under
:func:`register` is all that a parameter needs: it is found there, and the request schema of
``/v1``, its 400s and docs/api.md follow from what it declares.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import engine.sampling.processors
from engine.grammar.constraint import GrammarConstraint
from engine.request.errors import RequestError
from engine.request.params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Path = tuple[int, ...]
"""The draft tokens from the anchor (excluded) to a row (included)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A request field. ``type``: ``Annotated`` with bounds from ``annotated_types``, checked by the
    server. ``default``: what leaving the field out means; then nothing is done to any logit."""

    name: str
    type: Any
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary that values are checked against. ``encode`` adds no special tokens."""

    size: int
    encode: Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a processor may know of its request besides the parameters' values. ``grammar``: of a
    request whose output is constrained."""

    prompt_token_ids: Sequence[int]
    stop_token_ids: frozenset[int]
    vocab_size: int
    grammar: GrammarConstraint | None = None


class Stage(IntEnum):
    """The order in which processors run. Those that truncate rule tokens out, never the likeliest,
    so greedy rows do without them."""

    PENALTY = 1
    BIAS = 2
    FORBID = 3
    CONSTRAIN = 4
    TRUNCATE = 5


class LogitsProcessor:
    """One request's processor, for as long as the request lives, preemption included."""

    stage: ClassVar[Stage]
    parameters: ClassVar[tuple[Parameter, ...]]
    """Its fields; none where what it works with comes to ``of`` by other ways."""

    def __init__(self, facts: Facts, **values: Any) -> None:
        """``values``: of all ``parameters``, by name. Raises RequestError naming one that does not
        fit the request."""

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        """The values as the engine wants them, from those a client sent; where other names are
        returned, they are fields of ``SamplingParams``. Raises RequestError."""
        del vocabulary
        return values

    @classmethod
    def of(cls, params: SamplingParams, facts: Facts) -> LogitsProcessor | None:
        """The processor of a request; None where all values are the defaults."""
        values = {p.name: params.get(p.name, p.default) for p in cls.parameters}
        if all(values[p.name] == p.default for p in cls.parameters):
            return None
        return cls(facts, **values)

    def append(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that a step emitted."""

    def is_active(self) -> bool:
        """Returns whether it may change a row now."""
        return True

    def process(self, logits: Tensor, paths: Sequence[Path]) -> None:
        """Edit ``logits`` in place: float32 ``[num_rows, vocab_size]``, the request's rows of a step.

        Each row by the state after its path, as if its draft tokens were text, and by nothing else:
        the bits of a row must not depend on how many rows there are. Elementwise operations, maxima and
        sorting are safe; sum over a row by itself (``for row in logits``), not over all rows in one call.
        Nothing is read off the device: no shape, no branch depends on a logit.
        What is not overridden rules out what ``forbidden`` names.
        """
        pairs = [(row, t) for row, path in enumerate(paths) for t in self.forbidden(path)]
        if pairs:
            rows, token_ids = upload(pairs, logits.device).unbind(1)
            logits[rows, token_ids] = float("-inf")

    def forbidden(self, path: Path) -> Iterable[int]:
        """Tokens that may not follow ``path``."""
        del path
        return ()


_Class = TypeVar("_Class", bound=type[LogitsProcessor])
_classes: dict[type[LogitsProcessor], None] = {}
_owners: dict[str, type[LogitsProcessor]] = {}
"""Processors by their parameters' names."""


def register(cls: _Class) -> _Class:
    """Register a processor. Raises ValueError where a parameter's name is taken."""
    for parameter in cls.parameters:
        owner = _owners.setdefault(parameter.name, cls)
        if owner is not cls:
            raise ValueError(f"{parameter.name} belongs to {owner.__name__}")
    _classes[cls] = None
    return cls


@cache
def processors() -> tuple[type[LogitsProcessor], ...]:
    """All there are, in the order in which they run."""
    package = engine.sampling.processors
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
    return tuple(sorted(_classes, key=lambda cls: (cls.stage, cls.__module__)))


def parameters() -> tuple[Parameter, ...]:
    """The request fields of all processors."""
    return tuple(parameter for cls in processors() for parameter in cls.parameters)


def sampling_values(sent: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Arguments for ``SamplingParams`` from the values that a client sent (None: left out).

    Raises RequestError naming the field.
    """
    values: dict[str, Any] = {}
    for cls in processors():
        given = {p.name: _or(sent.get(p.name), p.default) for p in cls.parameters}
        values |= cls.resolve(given, vocabulary)
    known = SamplingParams.__dataclass_fields__
    further = {name: value for name, value in values.items() if name not in known}
    return {name: value for name, value in values.items() if name in known} | {"further": further}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """As ``engine.transfer.upload``, which is loaded with the first values: the server reads what
    processors declare, and does without torch."""
    from engine.transfer import upload as uploaded

    return uploaded(values, device, dtype)


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"{param}: token {token_id} is not in the vocabulary of {vocab_size}."
            raise RequestError(param, message)
