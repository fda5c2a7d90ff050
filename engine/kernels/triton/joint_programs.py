"""Passes after products that layers share, as Triton programs: what a model's small operations between
two products do, rounded where those round.

Products come as ``engine.kernels.triton.row_ops.Sums`` leaves them. An element's bits are its row's own.
"""

import triton
import triton.language as tl

from engine.kernels.triton.ragged_attention import storable
from engine.kernels.triton.row_programs import added_up


@triton.jit(do_not_specialize=["num_rows", "chunk_stride"])
def rotate_and_store(
    chunks,  # [num_chunks, num_rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM]: queries, keys, values
    bias,
    cosines,  # [num_rows, DIM]
    sines,  # [num_rows, DIM]
    factors,  # [2, DIM] float32, of queries and keys
    slots,  # [num_rows] int64; -1: a row of padding
    keys,  # [NUM_KV_HEADS, num_slots, DIM]
    values,  # [NUM_KV_HEADS, num_slots, DIM]
    query,  # [num_rows, NUM_HEADS, DIM]
    output,  # [num_rows, NUM_HEADS, DIM]
    num_rows,
    chunk_stride,
    row_stride,
    angle_stride,
    keys_head_stride,
    values_head_stride,
    epsilon,
    largest_key,
    largest_value,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FP8: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
):
    """A program has ``ROWS`` rows of one head. ``NORM``: 0 is none; 2: heads are rounded to their type
    before they are weighed. Outputs of rows of padding are set to zeros here."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    kv_head = (head - NUM_HEADS).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    is_row = row < num_rows
    is_place = is_row & (lane < DIM)
    slot = tl.load(slots + row, mask=is_row, other=0)
    is_stored = is_place & (slot >= 0)
    dtype: tl.constexpr = query.dtype.element_ty
    chunks += row * row_stride + head * DIM
    bias += head * DIM
    mine = added_up(chunks, chunk_stride, lane, is_place, bias + lane, NUM_CHUNKS, HAS_BIAS)
    mine = mine.to(dtype).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        # What each number is rotated with.
        half: tl.constexpr = DIM // 2
        partner = tl.where(lane < half, lane + half, lane - half)
        other = added_up(
            chunks, chunk_stride, partner, is_place, bias + partner, NUM_CHUNKS, HAS_BIAS
        )
        other = other.to(dtype).to(tl.float32)
        if NORM > 0:
            weights = factors + tl.where(head < NUM_HEADS, 0, DIM)
            scale = tl.rsqrt(tl.sum(mine * mine, 1) / DIM + epsilon)[:, None]
            mine, other = mine * scale, other * scale
            if NORM > 1:
                mine, other = mine.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
            mine = mine * tl.load(weights + lane, mask=lane < DIM, other=0.0)
            other = other * tl.load(weights + partner, mask=lane < DIM, other=0.0)
            mine, other = mine.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
        angle = row * angle_stride + lane
        cosine = tl.load(cosines + angle, mask=is_place, other=0.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=is_place, other=0.0).to(tl.float32)
        straight = (mine * cosine).to(dtype).to(tl.float32)
        crossed = (tl.where(lane < half, -other, other) * sine).to(dtype).to(tl.float32)
        mine = (straight + crossed).to(dtype).to(tl.float32)
    if head < NUM_HEADS:
        at = (row * NUM_HEADS + head) * DIM + lane
        tl.store(query + at, mine, mask=is_place)
        zeros = tl.zeros([ROWS, LANES], dtype)
        tl.store(output + at, zeros, mask=is_place & (slot < 0))
    elif head < NUM_HEADS + NUM_KV_HEADS:
        at = kv_head * keys_head_stride + slot * DIM + lane
        stored = storable(mine, largest_key, IS_FP8, keys.dtype.element_ty)
        tl.store(keys + at, stored, mask=is_stored)
    else:
        at = (kv_head - NUM_KV_HEADS) * values_head_stride + slot * DIM + lane
        stored = storable(mine, largest_value, IS_FP8, values.dtype.element_ty)
        tl.store(values + at, stored, mask=is_stored)


@triton.jit(do_not_specialize=["num_rows", "chunk_stride"])
def gate(
    chunks,  # [num_chunks, num_rows, 2 * half]: what the activation is for, and what it is a factor of
    bias,
    output,  # [num_rows, half]
    num_rows,
    chunk_stride,
    half,
    ELEMENTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    row, feature = place // half, place % half
    is_place = row < num_rows
    at = row * 2 * half + feature
    dtype: tl.constexpr = output.dtype.element_ty
    gated = added_up(chunks, chunk_stride, at, is_place, bias + feature, NUM_CHUNKS, HAS_BIAS)
    at, bias = at + half, bias + half
    factor = added_up(chunks, chunk_stride, at, is_place, bias + feature, NUM_CHUNKS, HAS_BIAS)
    gated, factor = gated.to(dtype).to(tl.float32), factor.to(dtype).to(tl.float32)
    # Exponentials of what is not above 0 have an end.
    if ACTIVATION == "silu":
        small = tl.exp(-tl.abs(gated))
        gated = gated * tl.where(gated < 0.0, small, 1.0) / (1.0 + small)
    else:  # gelu_tanh
        inner = 0.7978845608028654 * (gated + 0.044715 * gated * gated * gated)
        small = tl.exp(-2.0 * tl.abs(inner))
        gated = gated * tl.where(inner < 0.0, small, 1.0) / (1.0 + small)
    tl.store(output + place, gated.to(dtype).to(tl.float32) * factor, is_place)
