"""Operators take the place of functions in transformers' modeling files, by a step's plan: a file in
``operators`` each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Operator = Callable[..., Any]
"""Called with the step's plan, the operation's number in the model, and the function's own arguments, of
one text, its rows those of the step; returns what the function does."""
_Kind = TypeVar("_Kind", bound=Operator)

OPERATORS: dict[str, Operator] = {}
"""Each by the name of the function whose place it takes."""
NEVER_CALLED: set[str] = set()
"""Functions that layers call with a cache of transformers' own, or in training: never here."""


def state_operator(*functions: str, never_called: tuple[str, ...] = ()) -> Callable[[_Kind], _Kind]:
    """Registers what takes the place of ``functions``. ``never_called``: those that the same layers call
    with a cache of transformers' own, or in training. Raises ValueError for a function that is taken."""

    def register(kind: _Kind) -> _Kind:
        for name in functions:
            if name in OPERATORS:
                raise ValueError(f"there are two operators for {name!r}")
            OPERATORS[name] = kind
        NEVER_CALLED.update(never_called)
        return kind

    return register
