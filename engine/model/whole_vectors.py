"""Elementwise functions computed alike for every element.

torch's loops on a CPU compute many elements at a time by one approximation, and what is left at a
tensor's end by another, so that a row's last bit may depend on how many rows there are. Within
``whole_vectors`` such functions get tensors that end with a whole vector.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_ELEMENTS = 64
"""A multiple of what any CPU computes at a time."""
_NAMES = frozenset(
    {"sigmoid", "softplus", "silu", "gelu", "tanh", "logsigmoid", "mish", "elu", "hardswish", "erf"}
)


class whole_vectors(TorchFunctionMode):  # noqa: N801  (reads as a function)
    """Applies to what runs within it on a CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        named = kwargs or {}
        if getattr(func, "__name__", "") not in _NAMES or not args:
            return func(*args, **named)
        given, *rest = args
        missing = -given.numel() % _ELEMENTS
        if not missing or named.get("inplace"):
            return func(*args, **named)
        padded = F.pad(given.reshape(-1), (0, missing))
        return func(padded, *rest, **named)[: given.numel()].view(given.shape)
