"""Products with weights and norms that give a row its own bits, as operators of torch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from engine.kernels.triton import Variant, is_interpreted, num_processors

_CHUNK = 1024
_WIDE_FEATURES = 128
_ENOUGH_PARTS = 128
"""A weight is divided by outputs and by chunks of inputs into about so many parts, one for each program.
A layer with fewer has narrower parts, one with twice as many has chunks twice as long. The number is
fixed and not the device's, since bits depend on it."""
_ELEMENTS = 1024
_PROGRAMS_PER_PROCESSOR = 2
"""Products of fewer programs are divided by chunks of inputs."""
_LANES_PER_WARP = 512
_INTERPRETED_ROWS = 64
"""Rows of a norm, where a program's operations cost what numpy's calls do, however much they take."""


def product_tile(dtype: torch.dtype, in_features: int, out_features: int) -> Variant:
    """Returns one for all products of a layer: nothing of it may depend on a call's rows. What is taken
    for which layers is what was fastest on an H200, from 1 row to 1,024."""
    if dtype == torch.float32:
        return _tile(16, 64, 32, _CHUNK, launch_of(8, 3))
    num_chunks, num_tiles = -(-in_features // _CHUNK), -(-out_features // _WIDE_FEATURES)
    if num_tiles * num_chunks < _ENOUGH_PARTS:
        return _tile(64, 32, 128, _CHUNK, launch_of(4, 4))
    chunk = 2 * _CHUNK if num_tiles * -(-num_chunks // 2) >= _ENOUGH_PARTS else _CHUNK
    return _tile(64, _WIDE_FEATURES, 64, chunk, launch_of(8, 4))


def _tile(rows: int, features: int, depth: int, chunk: int, launch: dict[str, Any]) -> Variant:
    constants = {"ROWS": rows, "FEATURES": features, "DEPTH": depth, "CHUNK": chunk}
    return Variant(constants | {"IS_INTERPRETED": is_interpreted()}, launch)


def adding_tile(num_chunks: int) -> Variant:
    """Returns that of ``add_chunks``."""
    return Variant({"NUM_CHUNKS": num_chunks, "ELEMENTS": _ELEMENTS}, launch_of(4, 1))


def norm_tile(length: int) -> Variant:
    lanes = 1 << (length - 1).bit_length()
    rows = _INTERPRETED_ROWS if is_interpreted() else 1
    constants = {"LENGTH": length, "LANES": lanes, "ROWS": rows}
    return Variant(constants, launch_of(max(1, min(16, lanes // _LANES_PER_WARP)), 1))


def launch_of(num_warps: int, num_stages: int) -> dict[str, Any]:
    """Without fusion of a product and a sum into one operation, which rounds once: two programs add
    chunks, and both are to round alike."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}


class Sums(NamedTuple):
    """A product that is still to be added up: its chunks, ``[num_chunks, num_rows, out_features]``
    float32, and the bias that they want; one, of the rows' type, is the product."""

    chunks: torch.Tensor
    bias: torch.Tensor | None = None

    @staticmethod
    def of(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Sums:
        """Multiplies ``rows`` ``[num_rows, in_features]``; the rest is as ``row_product`` takes it."""
        chunks = _multiplied(rows, weight, bias)
        return Sums(chunks, bias if len(chunks) > 1 else None)


@torch.library.custom_op("slipstream::row_product", mutates_args=())
def row_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``F.linear``: ``rows`` ``[.., in_features]``, ``weight`` ``[out_features, in_features]``, which
    may be a transposed view, ``bias`` ``[out_features]``, all of one type (float32, bfloat16, float16);
    returns ``[.., out_features]`` of it. Sums are float32's, in an order that the layer alone decides."""
    flat = rows.reshape(-1, rows.shape[-1])
    product = added_up(Sums.of(flat, weight, bias), rows.dtype)
    return product.view(*rows.shape[:-1], weight.shape[0])


def _multiplied(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    from engine.kernels.triton.row_programs import multiply

    rows = lying_together(rows)
    (num_rows, in_features), out_features = rows.shape, weight.shape[0]
    constants, launch = product_tile(rows.dtype, in_features, out_features)
    num_chunks = -(-in_features // constants["CHUNK"])
    grid = (-(-num_rows // constants["ROWS"]), -(-out_features // constants["FEATURES"]))
    if grid[0] * grid[1] >= _enough_programs(rows.device):
        num_chunks = 1
    kind = torch.float32 if num_chunks > 1 else rows.dtype
    sums = rows.new_empty(num_chunks, num_rows, out_features, dtype=kind)
    if not sums.numel():
        return sums
    added = weight if bias is None else bias
    sizes = num_rows, out_features, in_features, rows.stride(0), *weight.stride()
    with torch.cuda.device_of(rows):
        multiply[(*grid, num_chunks)](
            *(rows, weight, added, sums, *sizes),
            **constants,
            HAS_BIAS=bias is not None,
            IS_DIVIDED=num_chunks > 1,
            **launch,
        )
    return sums


def added_up(sums: Sums, dtype: torch.dtype) -> torch.Tensor:
    """Returns the product ``[num_rows, out_features]`` of ``dtype``."""
    from engine.kernels.triton.row_programs import add_chunks

    chunks, bias = sums
    if len(chunks) == 1 or not chunks.numel():
        return chunks[0].to(dtype)
    output = torch.empty_like(chunks[0], dtype=dtype)
    constants, launch = adding_tile(len(chunks))
    with torch.cuda.device_of(chunks):
        add_chunks[(-(-output.numel() // _ELEMENTS),)](
            output if bias is None else bias,
            output,
            chunks,
            output.numel(),
            output.shape[1],
            **constants,
            HAS_BIAS=bias is not None,
            **launch,
        )
    return output


@row_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    del bias
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


@torch.library.custom_op("slipstream::row_norm", mutates_args=())
def row_norm(
    rows: torch.Tensor, factors: torch.Tensor, epsilon: float, is_rounded: bool
) -> torch.Tensor:
    """Each of ``rows`` ``[.., length]`` over its root mean square, times ``factors`` ``[length]``
    float32. ``is_rounded``: rounded to its type before it is weighed."""
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    flat = lying_together(rows.reshape(-1, rows.shape[-1]))
    _normalize(Sums(flat[None]), None, (output, output), factors, epsilon, is_rounded)
    return output


def sum_norm(
    sums: Sums, residual: torch.Tensor, factors: torch.Tensor, epsilon: float, is_rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a product to ``residual`` ``[.., length]``, of the type of both results: the sum, and its norm
    as ``row_norm`` computes it."""
    hidden = torch.empty_like(residual, memory_format=torch.contiguous_format)
    output = torch.empty_like(hidden)
    flat = lying_together(residual.reshape(-1, residual.shape[-1]))
    _normalize(sums, flat, (hidden, output), factors, epsilon, is_rounded)
    return hidden, output


def _normalize(
    sums: Sums,
    residual: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor],
    factors: torch.Tensor,
    epsilon: float,
    is_rounded: bool,
) -> None:
    """``outputs``: what is normed, where that is made here, and its norm."""
    from engine.kernels.triton.row_programs import normalize

    chunks, bias = sums
    num_chunks, num_rows, length = chunks.shape
    if not chunks.numel():
        return
    constants, launch = norm_tile(length)
    added, before = (outputs[1] if each is None else each for each in (bias, residual))
    sizes = num_rows, *chunks.stride()[:2], 0 if residual is None else residual.stride(0)
    with torch.cuda.device_of(chunks):
        normalize[(-(-num_rows // constants["ROWS"]),)](
            *(chunks, added, before, factors, *outputs, *sizes, epsilon),
            **constants,
            NUM_CHUNKS=num_chunks,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            IS_ROUNDED=is_rounded,
            **launch,
        )


@row_norm.register_fake
def _(rows: torch.Tensor, factors: torch.Tensor, epsilon: float, is_rounded: bool) -> torch.Tensor:
    del factors, epsilon, is_rounded
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def lying_together(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def _enough_programs(device: torch.device) -> int:
    """Returns with how many a device is busy."""
    return _PROGRAMS_PER_PROCESSOR * num_processors(device)
