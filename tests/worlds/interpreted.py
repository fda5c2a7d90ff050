"""Triton's programs on this machine: under its interpreter where there is no GPU (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_CPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="this test's tensors lie on a CPU")


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
    """Less of what the interpreter does over and over: it replaces the language's functions at every call
    of a function by a program, though they are replaced already, works out types of numpy and of blocks
    for every operation, and does sums and products of integers twice, once in 64 bits, to compare them
    for an assertion that it then leaves out."""
    if DEVICE.type == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch, _patching_language_once():
        _remember_types(patch)
        _compute_once(patch)
        yield


def _compute_once(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if not options.debug:
        patch.setattr(interpreter_builder, "options", replace(options, sanitize_overflow=False))


def _remember_types(patch: pytest.MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    of_numpy: dict[str, Any] = {}
    of_blocks: dict[Any, tuple[Any, ...]] = {}
    of_shapes: dict[Any, tuple[Any, ...]] = {}
    find_dtype = interpreter._get_np_dtype
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    def dtype(found: Any) -> Any:
        if found.name not in of_numpy:
            of_numpy[found.name] = find_dtype(found)
        return of_numpy[found.name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(each, "value", each) for each in shape))
        if key not in of_blocks:
            make_block(self, element_ty, shape)
            of_blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = of_blocks[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.shape.values if type.is_block() else ()
        key = (*key,)
        if key not in of_shapes:
            make_tensor(self, handle, type)
            of_shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_shapes[key]

    patch.setattr(interpreter, "_get_np_dtype", dtype)
    patch.setattr(tl.block_type, "__init__", block)
    patch.setattr(tl.tensor, "__init__", tensor)


@contextmanager
def _patching_language_once() -> Iterator[None]:
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
