"""Gives a model's rotary position embeddings one compiled pass each, in place.

transformers' attention modules call a function of that name, some eighteen operations on tensors. A
model's modules get their forward with another function under the name; the function itself, and other
models that use it, stay as they are. What rotates otherwise than by halves is seen in what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from engine.kernels import KINDS, find_kernel

_NAME = "apply_rotary_pos_emb"
_PROBED_SHAPES = ((3, 5, 64), (1, 2, 32))
"""Heads, rows, dimensions."""


@torch.inference_mode()
def fuse_rotary(model: nn.Module) -> int:
    """Replace them; returns how many. None without numba."""
    if find_kernel("rotary") is None:
        return 0
    replaced = 0
    found: dict[Callable[..., Any], bool] = {}
    for module in model.modules():
        forward = type(module).forward
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if not isinstance(forward, FunctionType) or _NAME not in names or "forward" in vars(module):
            continue
        function = forward.__globals__.get(_NAME)
        if function is None:
            continue
        if function not in found:
            found[function] = _rotates_halves(function)
        if found[function]:
            module.forward = MethodType(_with_rotation(forward, _Rotation(function)), module)
            replaced += 1
    return replaced


class _Rotation:
    """In the function's place; what is not for the kernel is still the function's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._kernel = find_kernel("rotary")

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(given) != 4 or named or not self._kernel.can_rotate(*given):
            return self._function(*given, **named)
        return self._kernel.rotate(*given)


def _with_rotation(forward: FunctionType, rotation: _Rotation) -> FunctionType:
    copy = FunctionType(
        forward.__code__,
        forward.__globals__ | {_NAME: rotation},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__annotations__ = forward.__annotations__
    return copy


def _rotates_halves(function: Callable[..., Any]) -> bool:
    """Whether its results have the bits of the kernel's."""
    kernel = find_kernel("rotary")
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
            got = kernel.rotate(query, key, *angles)
            if not all(_is_same(*pair) for pair in zip(got, expected, strict=True)):
                return False
    return True


def _is_same(got: torch.Tensor, expected: object) -> bool:
    return (
        isinstance(expected, torch.Tensor)
        and expected.dtype == got.dtype
        and torch.equal(got, expected)
    )
