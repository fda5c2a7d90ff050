"""Puts modules in others' places, throughout a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(
    model: nn.Module,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...],
    find: Callable[[nn.Module], nn.Module | None],
) -> int:
    """Puts what ``find`` returns of a module, which is one of ``kinds``, into its place; None: it stays.
    What is one of ``kinds`` already, and what that holds, stays too. Returns how many were replaced."""
    replaced = 0
    for parent in list(model.modules()):
        if isinstance(parent, kinds):
            continue
        for name, child in list(parent.named_children()):
            found = None if isinstance(child, kinds) else find(child)
            if found is not None:
                setattr(parent, name, found)
                replaced += 1
    return replaced
