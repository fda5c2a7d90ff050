"""Products with weights and norms, as Triton programs in which a row's bits are its own.

What a row is computed from, and in what order, depends on the layer alone: not on how many rows share the
call, and not on where it lies among them.

``multiply``: a program takes ``ROWS`` rows and ``FEATURES`` outputs, always so many, the missing ones
masked. Inputs are added up ``DEPTH`` at a time, in order, within chunks of ``CHUNK`` inputs, counted
from the first; each chunk has a sum of its own. The chunks' sums are added in order: by the program
itself, or, where few rows would leave the device idle, by ``add_chunks``, in the same order with the same
operations.

``normalize``: root mean square norms, a row's squares in one sum whose order its length decides. It
may add the chunks of a product before, and what that is added to.
"""

import triton
import triton.language as tl

from engine.kernels.triton.interpreted import product_in_order


@triton.jit
def added_up(
    sums,
    chunk_stride,
    place,
    is_place,
    bias,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """A product's chunks in order, in float32, with the ``bias`` there. One: it is whole."""
    if NUM_CHUNKS == 1:
        total = tl.load(sums + place, mask=is_place, other=0.0).to(tl.float32)
    else:
        total = tl.load(sums + place, mask=is_place, other=0.0) + 0.0  # and no -0.0
        for _ in range(1, NUM_CHUNKS):
            sums += chunk_stride
            total = total + tl.load(sums + place, mask=is_place, other=0.0)
    if HAS_BIAS:
        total = total + tl.load(bias, mask=is_place, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    rows,  # [num_rows, in_features]
    weight,  # [out_features, in_features], as it lies or transposed
    bias,  # [out_features]
    output,  # [num_rows, out_features], or sums of chunks, [num_chunks, ..] float32
    num_rows,
    out_features,
    in_features,
    row_stride,
    weight_row_stride,
    weight_column_stride,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """``IS_DIVIDED``: a program for each chunk, which leaves its sum."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    lane = tl.arange(0, DEPTH)
    is_row, is_feature = row < num_rows, feature < out_features
    row_address = rows + row[:, None] * row_stride + lane[None, :]
    weight_address = (
        weight + feature[None, :] * weight_row_stride + lane[:, None] * weight_column_stride
    )
    first_chunk = 0
    end_chunk = tl.cdiv(in_features, CHUNK)
    if IS_DIVIDED:
        first_chunk = tl.program_id(2)
        end_chunk = first_chunk + 1
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    for chunk in range(first_chunk, end_chunk):
        added = tl.zeros([ROWS, FEATURES], tl.float32)
        end = tl.minimum((chunk + 1) * CHUNK, in_features)
        for start in range(chunk * CHUNK, end, DEPTH):
            is_input = lane < end - start
            left = tl.load(row_address + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
            right = tl.load(
                weight_address + tl.cast(start, tl.int64) * weight_column_stride,
                mask=is_feature[None, :] & is_input[:, None],
                other=0.0,
            )
            if IS_INTERPRETED:
                added = added + product_in_order(left, right)
            else:
                added = tl.dot(left, right, added, input_precision="ieee")
        total = total + added
    place = row[:, None] * out_features + feature[None, :]
    is_place = is_row[:, None] & is_feature[None, :]
    if IS_DIVIDED:
        output += tl.cast(first_chunk, tl.int64) * num_rows * out_features
        tl.store(output + place, total, is_place)
    else:
        if HAS_BIAS:
            total = total + tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)
        tl.store(output + place, total, is_place)


@triton.jit(do_not_specialize=["num_elements"])
def add_chunks(
    bias,  # [out_features]
    output,  # [num_rows, out_features]
    sums,  # [num_chunks, num_rows, out_features] float32
    num_elements,
    out_features,
    NUM_CHUNKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_place = place < num_elements
    bias += place % out_features
    total = added_up(sums, num_elements, place, is_place, bias, NUM_CHUNKS, HAS_BIAS)
    tl.store(output + place, total, is_place)


@triton.jit(do_not_specialize=["num_rows", "chunk_stride"])
def normalize(
    rows,  # [num_rows, length], or a product's chunks, [num_chunks, num_rows, length] float32
    bias,  # [length], of the chunks
    residual,  # [num_rows, length]
    factors,  # [length] float32
    hidden,  # [num_rows, length]: what is normed, where it is made here
    output,  # [num_rows, length]
    num_rows,
    chunk_stride,
    row_stride,
    residual_stride,
    epsilon,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """``IS_ROUNDED``: rows are rounded to their type before they are weighed."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    is_lane = lane < LENGTH
    is_place = (row < num_rows)[:, None] & is_lane[None, :]
    place = row[:, None] * row_stride + lane[None, :]
    values = added_up(
        rows, chunk_stride, place, is_place, bias + lane[None, :], NUM_CHUNKS, HAS_BIAS
    )
    written = row[:, None] * LENGTH + lane[None, :]
    if HAS_RESIDUAL:
        at = row[:, None] * residual_stride + lane[None, :]
        before = tl.load(residual + at, mask=is_place, other=0.0).to(tl.float32)
        kept = (before + values.to(output.dtype.element_ty).to(tl.float32)).to(
            output.dtype.element_ty
        )
        tl.store(hidden + written, kept, is_place)
        values = kept.to(tl.float32)
    mean = tl.sum(values * values, 1) / LENGTH
    values = values * tl.rsqrt(mean + epsilon)[:, None]
    if IS_ROUNDED:
        values = values.to(output.dtype.element_ty).to(tl.float32)
    weighed = values * tl.load(factors + lane, mask=is_lane, other=0.0)[None, :]
    tl.store(output + written, weighed, is_place)
