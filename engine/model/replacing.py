"""Puts modules in others' places, throughout a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(
    model: nn.Module, kind: type[nn.Module], find: Callable[[nn.Module], nn.Module | None]
) -> int:
    """By what ``find`` returns of them, which is a ``kind``; None: they stay. Returns how many. What is a
    ``kind`` already, and what that holds, stays too."""
    replaced = 0
    for parent in list(model.modules()):
        if isinstance(parent, kind):
            continue
        for name, child in list(parent.named_children()):
            found = None if isinstance(child, kind) else find(child)
            if found is not None:
                setattr(parent, name, found)
                replaced += 1
    return replaced
