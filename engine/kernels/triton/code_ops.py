"""Products with weights in few bits that give a row its own bits, as an operator of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.kernels.triton import Variant, is_interpreted, num_processors
from engine.kernels.triton.expert_ops import ROWS_OF_BLOCK, Routes
from engine.kernels.triton.packed_codes import NUMBERS, CodeFormat, PackedCodes
from engine.kernels.triton.row_ops import Sums, added_up, launch_of, lying_together

_CHUNKS = (2048, 1024, 512, 256)
_ENOUGH_PARTS = 512
"""The longest chunks of inputs are taken that leave a weight so many parts, by outputs and chunks: a
number, not the device's, since bits hang on it."""
_FEW_ROWS = ROWS_OF_BLOCK
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
    routes: Routes | None = None,
) -> torch.Tensor:
    """``rows`` ``[num_rows, in_features]`` of float32, bfloat16 or float16, as whose type codes are
    multiplied; of ``routes``, those of the pairs or what these are made of. Returns ``[num_rows or
    num_pairs, out_features]``. Nothing is gated or rounded here."""
    assert (gate, keeps_inputs) == (None, True)
    bias = packed.bias
    if routes is None or bias is None:
        result: torch.Tensor = code_product(*_operands(rows, packed, dtype, routes))
        return result
    result = code_product(*_operands(rows, packed, torch.float32, routes))
    return (result + bias[routes.experts]).to(dtype)


def sums(
    rows: torch.Tensor, packed: PackedCodes, dtype: torch.dtype, routes: Routes | None = None
) -> Sums:
    """Returns the same, as what comes next may add it up."""
    bias = packed.bias
    if routes is not None and bias is not None:
        return Sums(product(rows, packed, dtype, routes=routes)[None])
    chunks = _multiplied(*_operands(rows, packed, dtype, routes))
    return Sums(chunks, bias if len(chunks) > 1 else None)


def _operands(
    rows: torch.Tensor, packed: PackedCodes, dtype: torch.dtype, routes: Routes | None
) -> tuple[Any, ...]:
    """Returns what ``code_product`` takes; experts' biases are added later."""
    kind, bias, routed = packed.format, packed.bias, list[torch.Tensor]()
    form = [kind.in_features, kind.bits, kind.zero, kind.span, kind.inner_span]
    numbers = [packed.tensors.get(name) for name in NUMBERS]
    if routes is not None:
        form += [packed.num_experts, len(routes.pairs) // max(1, len(rows)), routes.rows_of_block]
        bias, routed = None, [routes.pairs, routes.blocks]
    return rows, packed.blocks, numbers, bias, routed, kind.kind, form, dtype


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
    routes: Sequence[torch.Tensor],
    kind: str,
    form: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """``codes``, ``numbers`` (``NUMBERS``) and ``bias`` of a ``PackedCodes``; ``routes``: pairs and
    blocks, or nothing. ``form``: inputs, bits, zero and spans of its format, and of routes how many
    experts there are, pairs for each of the rows, and rows of a block. Returns ``[num_rows,
    out_features]`` of ``dtype``, or of each pair; zeros of those that have no expert."""
    chunks = _multiplied(rows, codes, numbers, bias, routes, kind, form, dtype)
    return added_up(Sums(chunks, bias if len(chunks) > 1 else None), dtype)


def _multiplied(
    rows: torch.Tensor,
    codes: torch.Tensor,
    numbers: Sequence[torch.Tensor | None],
    bias: torch.Tensor | None,
    routes: Sequence[torch.Tensor],
    kind: str,
    form: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns the sums of chunks ``[num_chunks, num_rows, out_features]`` float32; of one, the
    product."""
    from engine.kernels.triton.code_programs import multiply_codes

    (num_rows, in_features), channels = rows.shape, codes.shape[1]
    rows = lying_together(rows)
    num_experts, num_chosen, most_rows = form[5:] or (1, 1, num_rows)
    num_rows, out_features = num_rows * num_chosen, channels // num_experts
    constants, launch = code_tile(CodeFormat._make((kind, *form[:5], ())), most_rows, out_features)
    num_chunks = -(-in_features // constants["CHUNK"])
    pairs, blocks = routes or (None, None)
    num_blocks = -(-num_rows // constants["ROWS"]) if blocks is None else blocks.shape[1]
    grid = (num_blocks, -(-out_features // constants["FEATURES"]))
    is_divided = num_chunks > 1 and grid[0] * grid[1] < _enough_programs(rows.device)
    num_sums, own = (num_chunks, torch.float32) if is_divided else (1, dtype)
    make = rows.new_zeros if routes else rows.new_empty  # of what no block writes
    output = make(num_sums, num_rows, out_features, dtype=own)
    if not num_rows:
        return output
    with torch.cuda.device_of(rows):
        multiply_codes[(*grid, num_sums)](
            rows, codes, *numbers, bias, pairs, blocks, output, num_rows, out_features, in_features,
            rows.stride(0), num_blocks, num_chosen, num_experts,
            **constants, IS_DIVIDED=is_divided, **launch,
        )  # fmt: skip
    return output


@code_product.register_fake
def _(rows: torch.Tensor, codes: torch.Tensor, *more: Any) -> torch.Tensor:
    num_experts, num_chosen, _most = more[-2][5:] or (1, 1, 0)
    return rows.new_empty(num_chosen * len(rows), codes.shape[1] // num_experts, dtype=more[-1])


def _enough_programs(device: torch.device) -> int:
    """Returns with how many a device is busy."""
    return _PROGRAMS_PER_PROCESSOR * num_processors(device)
