"""Triton's programs on this machine: under its interpreter where there is no GPU (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def counting_loads(planes: Iterator[torch.Tensor]) -> Iterator[list[int]]:
    """Bytes that programs load from ``planes`` meanwhile, under the interpreter; one number in a list."""
    from triton.runtime.interpreter import InterpreterBuilder

    ranges = [
        (each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in planes
    ]
    counted = [0]
    plain = InterpreterBuilder.create_masked_load

    def counting(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        loaded = plain(self, ptrs, mask, *rest)
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        for first, count in ranges:
            inside = (addresses >= first) & (addresses < first + count)
            counted[0] += int(inside.sum()) * loaded.data.itemsize
        return loaded

    InterpreterBuilder.create_masked_load = counting
    try:
        yield counted
    finally:
        InterpreterBuilder.create_masked_load = plain


@contextmanager
def patching_once() -> Iterator[None]:
    """The interpreter replaces the language's functions at every call of a function by a program, though
    they are replaced already: a third of its time."""
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime import interpreter

    plain, patched = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        known = {id(interpreter.tl), id(interpreter.tl.core)}
        mine = {id(each) for each in function.__globals__.values()} & known
        if patched and mine <= patched:
            return None
        is_first = not patched
        patched.update(mine)
        scope = plain(function)
        if is_first:
            restore = scope.restore

            def restoring() -> None:
                patched.clear()
                restore()

            scope.restore = restoring
        return scope

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = plain
