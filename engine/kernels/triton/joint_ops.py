"""Passes after products that layers share, as operators of torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.kernels.triton import Variant, is_interpreted
from engine.kernels.triton.ops import lanes
from engine.kernels.triton.row_ops import Sums

ACTIVATIONS = ("silu", "gelu_tanh")
_ROWS = 4
"""Of a program, and numbers."""
_ELEMENTS = 512
_INTERPRETED_ROWS = 64
_INTERPRETED_ELEMENTS = 1 << 14
"""The same where a program's operations cost what numpy's calls do, however much they take."""
_LAUNCH = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
"""Without fusion of a product and a sum into one operation, which rounds once, as torch's do not."""


class HeadNorm(NamedTuple):
    """Of each head: ``factors`` ``[dim]`` float32. ``is_rounded``: as for ``row_norm``."""

    factors: torch.Tensor
    epsilon: float
    is_rounded: bool


class Heads(NamedTuple):
    """What becomes of a joint product of queries, keys and values before rows attend. ``cosines``,
    ``sines``: ``[num_rows, dim]`` of its type, by which the halves of queries and keys are rotated."""

    num_heads: int
    cosines: torch.Tensor
    sines: torch.Tensor
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None


def heads_variant(num_heads: int, num_kv_heads: int, dim: int, is_fp8: bool) -> Variant:
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": dim,
        "LANES": lanes(dim),
        "ROWS": _INTERPRETED_ROWS if is_interpreted() else _ROWS,
        "IS_FP8": is_fp8,
    }
    return Variant(constants, _LAUNCH)


def gate_variant(activation: str) -> Variant:
    elements = _INTERPRETED_ELEMENTS if is_interpreted() else _ELEMENTS
    return Variant({"ELEMENTS": elements, "ACTIVATION": activation}, _LAUNCH)


def put_heads(
    sums: Sums,
    heads: Heads,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    largest_key: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms and rotates the heads of a product ``[num_rows, (num_heads + 2 * num_kv_heads) * dim]``, and
    stores keys and values in their ``slots`` of a store's planes. Returns queries ``[num_rows, num_heads,
    dim]``, and room for the rows' outputs, which are zeros already where rows are padding."""
    query_norm, key_norm = (
        (None, 0.0, 0) if norm is None else (norm.factors, norm.epsilon, 1 + norm.is_rounded)
        for norm in (heads.query_norm, heads.key_norm)
    )
    of_angles = heads.num_heads, heads.cosines, heads.sines
    put: tuple[torch.Tensor, torch.Tensor] = _put_heads(
        *sums, *of_angles, *query_norm, *key_norm, keys, values, slots, largest_key
    )
    return put


@torch.library.custom_op("slipstream::put_heads", mutates_args=("keys", "values"))
def _put_heads(
    chunks: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    query_factors: torch.Tensor | None,
    query_epsilon: float,
    query_norm: int,
    key_factors: torch.Tensor | None,
    key_epsilon: float,
    key_norm: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    largest_key: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from engine.kernels.triton.joint_programs import rotate_and_store

    num_rows, (num_kv_heads, _, dim) = chunks.shape[1], keys.shape
    query = cosines.new_empty(num_rows, num_heads, dim)
    output = torch.empty_like(query)
    is_fp8 = keys.dtype == torch.uint8
    constants, launch = heads_variant(num_heads, num_kv_heads, dim, is_fp8)
    stored = torch.float8_e4m3fn if is_fp8 else keys.dtype
    largest = min(torch.finfo(stored).max, torch.finfo(query.dtype).max)
    grid = -(-num_rows // constants["ROWS"]), num_heads + 2 * num_kv_heads
    with torch.cuda.device_of(chunks):
        rotate_and_store[grid](
            chunks,
            chunks if bias is None else bias,
            cosines,
            sines,
            chunks if query_factors is None else query_factors,
            chunks if key_factors is None else key_factors,
            slots,
            keys,
            values,
            query,
            output,
            num_rows,
            chunks.stride(0),
            chunks.stride(1),
            cosines.stride(0),
            keys.stride(0),
            values.stride(0),
            query_epsilon,
            key_epsilon,
            min(largest, largest_key),
            largest,
            **constants,
            NUM_CHUNKS=len(chunks),
            HAS_BIAS=bias is not None,
            QUERY_NORM=query_norm,
            KEY_NORM=key_norm,
            **launch,
        )
    return query, output


@_put_heads.register_fake
def _(
    chunks: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    cosines: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    del bias
    query = cosines.new_empty(chunks.shape[1], num_heads, cosines.shape[1])
    return query, torch.empty_like(query)


def gate_rows(sums: Sums, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """Returns the activation (of ``ACTIVATIONS``) of the first half of each row of a product, times the
    other: ``[num_rows, half]`` of ``dtype``."""
    gated: torch.Tensor = _gate_rows(*sums, activation, dtype)
    return gated


@torch.library.custom_op("slipstream::gate_rows", mutates_args=())
def _gate_rows(
    chunks: torch.Tensor, bias: torch.Tensor | None, activation: str, dtype: torch.dtype
) -> torch.Tensor:
    from engine.kernels.triton.joint_programs import gate

    num_chunks, num_rows, width = chunks.shape
    output = chunks.new_empty(num_rows, width // 2, dtype=dtype)
    constants, launch = gate_variant(activation)
    with torch.cuda.device_of(chunks):
        gate[(-(-output.numel() // constants["ELEMENTS"]),)](
            chunks,
            chunks if bias is None else bias,
            output,
            num_rows,
            chunks.stride(0),
            width // 2,
            **constants,
            NUM_CHUNKS=num_chunks,
            HAS_BIAS=bias is not None,
            **launch,
        )
    return output


@_gate_rows.register_fake
def _(
    chunks: torch.Tensor, bias: torch.Tensor | None, activation: str, dtype: torch.dtype
) -> torch.Tensor:
    del bias, activation
    return chunks.new_empty(chunks.shape[1], chunks.shape[2] // 2, dtype=dtype)
