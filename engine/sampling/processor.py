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
from engine.grammar.constraint import Path as Path
from engine.request.errors import RequestError
from engine.request.params import SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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
    """The vocabulary that values are checked against. ``encode`` adds no special tokens; ``decode``
    returns the text of tokens."""

    size: int
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a processor may know of its request besides the parameters' values. ``grammar``: of a
    request whose output is constrained."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    stop_token_ids: frozenset[int]
    vocab_size: int
    grammar: GrammarConstraint | None = None


class Stage(IntEnum):
    """The order in which processors run. Truncating processors exclude tokens, never the likeliest, so
    greedy rows skip them."""

    PENALTY = 1
    BIAS = 2
    FORBID = 3
    CONSTRAIN = 4
    TRUNCATE = 5


class LogitsProcessor:
    """One request's processor, for as long as the request lives, preemption included."""

    stage: ClassVar[Stage]
    parameters: ClassVar[tuple[Parameter, ...]]
    fields: ClassVar[Mapping[str, Any]]
    """The fields of ``SamplingParams`` that it reads, and their values where it is not needed: its
    parameters and their defaults, unless it says otherwise."""

    def __init__(self, facts: Facts, **values: Any) -> None:
        """``values``: of all ``fields``, by name. Raises RequestError naming one that does not fit the
        request."""

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        """The values of ``fields`` from a client's values; defaults stand for omitted ones. Raises
        RequestError."""
        del vocabulary
        return values

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
    if "fields" not in vars(cls):
        cls.fields = {each.name: each.default for each in cls.parameters}
    _classes[cls] = None
    return cls


@cache
def processors() -> tuple[type[LogitsProcessor], ...]:
    """All there are, in the order in which they run."""
    package = engine.sampling.processors
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
    return tuple(sorted(_classes, key=lambda cls: (cls.stage, cls.__module__)))


def new_processors(facts: Facts) -> list[LogitsProcessor]:
    """The processors that a request needs, in the order in which they run. Raises RequestError."""
    params, made = facts.params, []
    for cls in processors():
        values = {name: params.get(name, off) for name, off in cls.fields.items()}
        is_idle = cls.stage is Stage.TRUNCATE and params.temperature == 0
        if values != cls.fields and not is_idle:
            made.append(cls(facts, **values))
    return made


def parameters() -> tuple[Parameter, ...]:
    """The request fields of all processors."""
    return tuple(parameter for cls in processors() for parameter in cls.parameters)


def sampling_values(sent: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """Arguments for ``SamplingParams`` from the values that a client sent (None: left out), as far as
    they are not the defaults.

    Raises RequestError naming the field.
    """
    values: dict[str, Any] = {}
    for cls in processors():
        defaults = {each.name: each.default for each in cls.parameters}
        given = {name: sent[name] for name in defaults if sent.get(name) is not None}
        if defaults | given != defaults:
            values |= cls.resolve(defaults | given, vocabulary)
    known = SamplingParams.__dataclass_fields__
    further = {name: values.pop(name) for name in [*values] if name not in known}
    return values | {"further": further}


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """As ``engine.transfer.upload``, which is loaded with the first values: the server, which reads what
    processors declare, does without torch."""
    from engine.transfer import upload as uploaded

    return uploaded(values, device, dtype)


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"{param}: token {token_id} is not in the vocabulary of {vocab_size}."
            raise RequestError(param, message)
