"""The facts of a GGUF architecture that its files leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from engine.weights.gguf.configuration import Said
from engine.weights.gguf.conversion import Undo


class Architecture(NamedTuple):
    """``model_type``: transformers' word for it. ``undo``: what the conversion did. ``says``: returns
    more of the configuration, the type of another model among it."""

    model_type: str
    undo: tuple[Undo, ...] = ()
    says: Callable[[Said], Mapping[str, Any]] = lambda _: {}
