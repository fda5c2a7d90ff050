"""Products with weights in few bits that give a row its own bits, as an operator of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.kernels.triton import Variant, is_interpreted, num_processors
from engine.kernels.triton.packed_codes import NUMBERS, CodeFormat, PackedCodes
from engine.kernels.triton.row_ops import add_sums, launch_of, lying_together

_CHUNKS = (2048, 1024, 512, 256)
_ENOUGH_PARTS = 512
"""The longest chunks of inputs are taken that leave a weight so many parts, by outputs and chunks: a
number, not the device's, since bits hang on it."""
_FEW_ROWS = 16
_NARROW, _WIDE = 32, 64
"""Outputs of a program of few rows and of more."""
_PROGRAMS_PER_PROCESSOR = 8
"""Products of fewer programs are divided by chunks of inputs."""


def code_tile(kind: CodeFormat, num_rows: int, out_features: int) -> Variant:
    """Returns one for a call. Chunks, which bits hang on, are the layer's alone. Two warps that lie one
    below the other: of more, the shape of a tile says on some devices which instruction multiplies."""
    tiles = -(-out_features // _NARROW)
    fitting = (each for each in _CHUNKS if tiles * -(-kind.in_features // each) >= _ENOUGH_PARTS)
    rows, features = (_FEW_ROWS, _NARROW) if num_rows <= _FEW_ROWS else (2 * _FEW_ROWS, _WIDE)
    constants = {"ROWS": rows, "FEATURES": features, "CHUNK": next(fitting, _CHUNKS[-1])}
    told = ("bits", "kind", "zero", "span", "inner_span", "tiles", "is_full")
    constants |= {name.upper(): getattr(kind, name) for name in told}
    return Variant(constants | {"IS_INTERPRETED": is_interpreted()}, launch_of(2, 4))


def product(
    rows: torch.Tensor,
    packed: PackedCodes,
    dtype: torch.dtype,
    gate: None = None,
    keeps_inputs: bool = True,
    routes: None = None,
) -> torch.Tensor:
    """``rows`` ``[num_rows, in_features]`` of float32, bfloat16 or float16, as whose type codes are
    multiplied. Returns ``[num_rows, out_features]``. Nothing is gated, rounded or routed here."""
    assert (gate, keeps_inputs, routes) == (None, True, None)
    kind, numbers = packed.format, [packed.tensors.get(name) for name in NUMBERS]
    form = (kind.in_features, kind.bits, kind.zero, kind.span, kind.inner_span)
    operands = (rows, packed.blocks, numbers, packed.bias)
    result: torch.Tensor = code_product(*operands, kind.kind, form, dtype)
    return result


def look_up(packed: PackedCodes, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``ids`` int64, each below ``out_features``. Returns their weights ``[.., in_features]``."""
    found = packed.weight_of(ids.reshape(-1)).dequantized().to(dtype)
    return found.view(*ids.shape, packed.in_features)


@torch.library.custom_op("slipstream::code_product", mutates_args=())
def code_product(
    rows: torch.Tensor,
    codes: torch.Tensor,
    numbers: Sequence[torch.Tensor | None],
    bias: torch.Tensor | None,
    kind: str,
    form: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """``codes``, ``numbers`` (``NUMBERS``) and ``bias`` of a ``PackedCodes``; ``form``: inputs, bits,
    zero and spans of its format. Returns ``[num_rows, out_features]`` of ``dtype``."""
    from engine.kernels.triton.code_programs import multiply_codes

    (num_rows, in_features), out_features = rows.shape, codes.shape[1]
    rows = lying_together(rows)
    output = rows.new_empty(num_rows, out_features, dtype=dtype)
    if not num_rows:
        return output
    constants, launch = code_tile(CodeFormat._make((kind, *form, ())), num_rows, out_features)
    num_chunks = -(-in_features // constants["CHUNK"])
    grid = (-(-num_rows // constants["ROWS"]), -(-out_features // constants["FEATURES"]))
    is_divided = num_chunks > 1 and grid[0] * grid[1] < _enough_programs(rows.device)
    sums = output
    if is_divided:
        sums = rows.new_empty(num_chunks, num_rows, out_features, dtype=torch.float32)
    with torch.cuda.device_of(rows):
        multiply_codes[(*grid, num_chunks if is_divided else 1)](
            rows, codes, *numbers, bias, output, sums, num_rows, out_features, in_features,
            rows.stride(0), **constants, IS_DIVIDED=is_divided, **launch,
        )  # fmt: skip
        if is_divided:
            add_sums(sums, bias, output)
    return output


@code_product.register_fake
def _(rows: torch.Tensor, codes: torch.Tensor, *more: Any) -> torch.Tensor:
    return rows.new_empty(len(rows), codes.shape[1], dtype=more[-1])


def _enough_programs(device: torch.device) -> int:
    """Returns with how many a device is busy."""
    return _PROGRAMS_PER_PROCESSOR * num_processors(device)
