"""Products with weights and norms that give a row its own bits, as operators of torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.kernels.triton import Variant, is_interpreted, num_processors

_CHUNK = 1024
_WIDE_FEATURES = 128
_ENOUGH_PARTS = 128
"""Of a weight, by outputs and chunks of inputs, for a program each. A layer of fewer has narrower ones;
where there are twice as many, chunks are twice as long. A number, not the device's: bits hang on it."""
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


@torch.library.custom_op("slipstream::row_product", mutates_args=())
def row_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As ``F.linear``: ``rows`` ``[.., in_features]``, ``weight`` ``[out_features, in_features]``, which
    may be a transposed view, ``bias`` ``[out_features]``, all of one type (float32, bfloat16, float16);
    returns ``[.., out_features]`` of it. Sums are float32's, in an order that the layer alone decides."""
    from engine.kernels.triton.row_programs import multiply

    in_features, out_features = rows.shape[-1], weight.shape[0]
    flat = lying_together(rows.reshape(-1, in_features))
    num_rows = flat.shape[0]
    output = rows.new_empty(*rows.shape[:-1], out_features)
    if not output.numel():
        return output
    constants, launch = product_tile(rows.dtype, in_features, out_features)
    num_chunks = -(-in_features // constants["CHUNK"])
    grid = (-(-num_rows // constants["ROWS"]), -(-out_features // constants["FEATURES"]))
    is_divided = num_chunks > 1 and grid[0] * grid[1] < _enough_programs(rows.device)
    sums = output
    if is_divided:
        sums = rows.new_empty(num_chunks, num_rows, out_features, dtype=torch.float32)
    added = weight if bias is None else bias
    with torch.cuda.device_of(rows):
        multiply[(*grid, num_chunks if is_divided else 1)](
            flat,
            weight,
            added,
            output,
            sums,
            num_rows,
            out_features,
            in_features,
            flat.stride(0),
            weight.stride(0),
            weight.stride(1),
            **constants,
            HAS_BIAS=bias is not None,
            IS_DIVIDED=is_divided,
            **launch,
        )
        if is_divided:
            add_sums(sums, bias, output)
    return output


def add_sums(sums: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor) -> None:
    """Fills ``output`` ``[num_rows, out_features]`` with the ``sums`` of chunks that programs left."""
    from engine.kernels.triton.row_programs import add_chunks

    num_chunks, num_rows, out_features = sums.shape
    count = num_rows * out_features
    constants, launch = adding_tile(num_chunks)
    added = sums if bias is None else bias
    add_chunks[(-(-count // _ELEMENTS),)](
        added, output, sums, count, out_features,
        **constants, HAS_BIAS=bias is not None, **launch,
    )  # fmt: skip


@row_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


@torch.library.custom_op("slipstream::row_norm", mutates_args=())
def row_norm(
    rows: torch.Tensor, factors: torch.Tensor, epsilon: float, is_rounded: bool
) -> torch.Tensor:
    """Each of ``rows`` ``[.., length]`` over its root mean square, times ``factors`` ``[length]``
    float32. ``is_rounded``: rounded to its type before it is weighed."""
    from engine.kernels.triton.row_programs import normalize

    length = rows.shape[-1]
    flat = lying_together(rows.reshape(-1, length))
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if output.numel():
        constants, launch = norm_tile(length)
        with torch.cuda.device_of(rows):
            normalize[(-(-flat.shape[0] // constants["ROWS"]),)](
                flat,
                factors,
                output,
                flat.shape[0],
                flat.stride(0),
                epsilon,
                **constants,
                IS_ROUNDED=is_rounded,
                **launch,
            )
    return output


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
