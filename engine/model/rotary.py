"""Gives a model's rotary position embeddings one compiled pass each, in place.

transformers' attention modules call a function of their file by its name, some eighteen operations on
tensors that take half of a small model's step. transformers has no seam there, and to give its file
another function would change models that are not the engine's. So a model's own modules get their class's
forward over a copy of the file's names, in which that name means the compiled pass. What rotates
otherwise than by halves is seen in what it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from engine.kernels import KINDS

_NAME = "apply_rotary_pos_emb"
_PROBED_SHAPES = ((3, 5, 64), (1, 2, 32))
"""Heads, rows, dimensions."""


@torch.inference_mode()
def fuse_rotary(model: nn.Module) -> int:
    """Replaces them; returns how many."""
    replaced = 0
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue
        function = forward.__globals__.get(_NAME) if _NAME in forward.__code__.co_names else None
        if function is not None and _rotates_halves(function):
            module.forward = MethodType(_with_name(forward, partial(_rotated, function)), module)
            replaced += 1
    return replaced


def _with_name(forward: FunctionType, rotated: Callable[..., Any]) -> FunctionType:
    """Returns the same code, for which the name means ``rotated``."""
    names = {**forward.__globals__, _NAME: rotated}
    args = forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    copy = FunctionType(*args)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotated(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Stands in ``function``'s place; what is not for the kernel is still the function's."""
    from engine.kernels.rotary import can_rotate, rotate

    if len(given) != 4 or named or not can_rotate(*given):
        return function(*given, **named)
    return rotate(*given)


@cache
def _rotates_halves(function: Callable[..., Any]) -> bool:
    """Whether its results have the bits of the kernel's."""
    from engine.kernels.rotary import rotate

    generator = torch.Generator().manual_seed(0)

    def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for heads, rows, dim in _PROBED_SHAPES:
        for dtype in KINDS:
            query = drawn(dtype, 1, rows, heads, dim).transpose(1, 2)
            key = drawn(dtype, 1, rows, 1, dim).transpose(1, 2)
            angles = drawn(dtype, 1, rows, dim), drawn(dtype, 1, rows, dim)
            try:
                expected = function(query, key, *angles)
            except Exception:  # it takes something else
                return False
            if not isinstance(expected, tuple) or len(expected) != 2:
                return False
            got = rotate(query, key, *angles)
            if not all(_is_same(*pair) for pair in zip(got, expected, strict=True)):
                return False
    return True


def _is_same(got: torch.Tensor, expected: object) -> bool:
    return (
        isinstance(expected, torch.Tensor)
        and expected.dtype == got.dtype
        and torch.equal(got, expected)
    )
