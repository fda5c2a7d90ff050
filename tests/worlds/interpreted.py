"""Triton's programs on this machine: under its interpreter where there is no GPU (tests/conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from worlds import random_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_CPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="this test's tensors lie on a CPU")


def drawn(dtype: torch.dtype, *sizes: int, seed: int = 0) -> torch.Tensor:
    return random_tensors.drawn(*sizes, seed=seed).to(DEVICE, dtype)


def compiled_ahead(capability: int, variants: Iterable[str], cache: Path) -> str:
    """Compiles programs for devices that are not here, in a process of its own: here triton interprets.
    Returns what it says of them, a line each."""
    root = Path(__file__).resolve().parents[2]
    script = root / "tests" / "worlds" / "compiled_ahead.py"
    result = subprocess.run(
        [sys.executable, str(script), str(capability), *variants],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
    for every operation, takes bfloat16 apart into sign, exponent and digits, and does sums and products
    of integers twice, once in 64 bits, to compare them for an assertion that it then leaves out."""
    if DEVICE.type == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch, _patching_language_once():
        _remember_types(patch)
        _compute_once(patch)
        yield


def _compute_once(patch: pytest.MonkeyPatch) -> None:
    """Operations give what they gave, by fewer of numpy's."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    broadcast, convert = TritonSemantic.broadcast_impl_value, interpreter._convert_float
    if not builder.options.debug:
        options = replace(builder.options, sanitize_overflow=False)
        patch.setattr(builder, "options", options)

    def splat(value: Any, block: Any) -> Any:
        handle, shape = value.handle, block.shape.values
        data = np.full(shape, handle.data, dtype=interpreter._get_np_dtype(handle.dtype))
        kind = block.with_element_ty(value.type.scalar)
        return tl.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), kind)

    def widened(value: Any, shape: list[int]) -> Any:
        if value.type.shape.values == shape:
            return value
        handle = builder.create_broadcast(value.handle, shape)
        return tl.tensor(handle, tl.block_type(value.type.scalar, shape))

    def broadcast_values(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        kinds = left.type, right.type
        is_block = tuple(each.is_block() for each in kinds)
        if not all(is_block):
            if not any(is_block):
                return left, right
            return (left, splat(right, kinds[0])) if is_block[0] else (splat(left, kinds[1]), right)
        first, second = (each.shape.values for each in kinds)
        if first == second:
            return left, right
        shape = [b if a == 1 else a for a, b in zip(first, second, strict=False)]
        fits = all(b in (1, each) for b, each in zip(second, shape, strict=False))
        if len(first) != len(second) or not fits:
            return broadcast(self, left, right)
        return widened(left, shape), widened(right, shape)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """A bfloat16 is half a float32, but for what the interpreter makes of the smallest."""
        if rounding is None and {source.name, target.name} == {"bf16", "fp32"}:
            bits = data.view(np.uint16 if source.name == "bf16" else np.uint32)
            smallest = 1 << source.fp_mantissa_width
            size = bits & bits.dtype.type(2 ** (8 * bits.itemsize - 1) - 1)
            if not np.any((size != 0) & (size < smallest)):
                if source.name == "bf16":
                    return bits.astype(np.uint32) << np.uint32(16)
                return (bits >> np.uint32(16)).astype(np.uint16)
        return convert(data, source, target, rounding)

    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_values)
    patch.setattr(interpreter, "_convert_float", convert_float)


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
    """The language's functions stay replaced from the first program until the end."""
    from triton.runtime import interpreter

    plain, patched, scopes = interpreter._patch_lang, set[int](), list[Any]()
    known = {id(interpreter.tl), id(interpreter.tl.core)}
    seen = dict[Any, set[int]]()

    def once(function: Any) -> Any:
        if function not in seen:
            seen[function] = {id(each) for each in function.__globals__.values()} & known
        if not patched or not seen[function] <= patched:
            patched.update(seen[function])
            scopes.append(plain(function))
        return interpreter._LangPatchScope()  # of nothing

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = plain
        for scope in reversed(scopes):
            scope.restore()
