"""Passes after products that layers share, as their programs are launched."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.kernels.triton import Variant, is_interpreted
from engine.kernels.triton.ops import lanes
from engine.kernels.triton.row_ops import Sums

ACTIVATIONS = ("silu", "gelu_tanh")
_ROWS, _ELEMENTS = 4, 512
"""Sizes of a program: rows of a head, and elements of a gated network."""
_INTERPRETED_ROWS, _INTERPRETED_ELEMENTS = 64, 1 << 14
"""The same where a program's operations cost what numpy's calls do, however much they take."""
_LAUNCH = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
"""Without fusion of a product and a sum into one operation, which rounds once, as torch's do not."""


class HeadNorms(NamedTuple):
    """Norms of heads, as ``row_norm``. ``factors``: ``[2, dim]`` float32, of queries and of keys."""

    factors: torch.Tensor
    epsilon: float
    is_rounded: bool


class Heads(NamedTuple):
    """How queries, keys and values of a joint product are normalised and rotated. ``cosines``,
    ``sines``: ``[num_rows, dim]`` of its type, by which the halves of queries and keys are rotated."""

    num_heads: int
    cosines: torch.Tensor
    sines: torch.Tensor
    norms: HeadNorms | None


def heads_variant(num_heads: int, num_kv_heads: int, dim: int, is_fp8: bool) -> Variant:
    rows = _INTERPRETED_ROWS if is_interpreted() else _ROWS
    sizes = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "DIM": dim, "LANES": lanes(dim)}
    return Variant(sizes | {"ROWS": rows, "IS_FP8": is_fp8}, _LAUNCH)


def gate_variant(activation: str) -> Variant:
    elements = _INTERPRETED_ELEMENTS if is_interpreted() else _ELEMENTS
    return Variant({"ELEMENTS": elements, "ACTIVATION": activation}, _LAUNCH)


def put_heads(
    sums: Sums,
    heads: Heads,
    planes: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    largest_key: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms and rotates the heads of a product ``[num_rows, (num_heads + 2 * num_kv_heads) * dim]``, and
    stores keys and values in their ``slots`` of a store's planes. Returns queries ``[num_rows, num_heads,
    dim]``, and room for the rows' outputs, which are zeros already where rows are padding."""
    from engine.kernels.triton.joint_programs import rotate_and_store

    (chunks, bias), (num_heads, cosines, sines, norms) = sums, heads
    keys, values = planes
    num_rows, (num_kv_heads, _, dim) = chunks.shape[1], keys.shape
    query = cosines.new_empty(num_rows, num_heads, dim)
    output = torch.empty_like(query)
    is_fp8 = keys.dtype == torch.uint8
    constants, launch = heads_variant(num_heads, num_kv_heads, dim, is_fp8)
    stored = torch.float8_e4m3fn if is_fp8 else keys.dtype
    largest = min(torch.finfo(stored).max, torch.finfo(query.dtype).max)
    given_bias, factors = (
        chunks if each is None else each for each in (bias, norms and norms.factors)
    )
    tensors = chunks, given_bias, cosines, sines, factors, slots, keys, values, query, output
    strides = *chunks.stride()[:2], cosines.stride(0), keys.stride(0), values.stride(0)
    numbers = norms.epsilon if norms else 0.0, min(largest, largest_key), largest
    with torch.cuda.device_of(chunks):
        rotate_and_store[(-(-num_rows // constants["ROWS"]), num_heads + 2 * num_kv_heads)](
            *(*tensors, num_rows, *strides, *numbers),
            **constants,
            NUM_CHUNKS=len(chunks),
            HAS_BIAS=bias is not None,
            NORM=1 + norms.is_rounded if norms else 0,
            **launch,
        )
    return query, output


def gate_rows(sums: Sums, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the activation (of ``ACTIVATIONS``) of the first half of each row of a product, times the
    other: ``[num_rows, half]`` of ``dtype``."""
    from engine.kernels.triton.joint_programs import gate

    chunks, bias = sums
    num_chunks, num_rows, width = chunks.shape
    output = chunks.new_empty(num_rows, width // 2, dtype=dtype)
    constants, launch = gate_variant(activation)
    tensors = chunks, chunks if bias is None else bias, output
    with torch.cuda.device_of(chunks):
        gate[(-(-output.numel() // constants["ELEMENTS"]),)](
            *(*tensors, num_rows, chunks.stride(0), width // 2),
            **constants,
            NUM_CHUNKS=num_chunks,
            HAS_BIAS=bias is not None,
            **launch,
        )
    return output
