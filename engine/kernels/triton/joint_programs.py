"""Passes after products that layers share, as Triton programs: what a model's small operations between
two products do, rounded where those round.

Products come as ``engine.kernels.triton.row_ops.Sums`` leaves them. An element's bits are its row's own.
"""

import triton
import triton.language as tl

from engine.kernels.triton.ragged_attention import storable
from engine.kernels.triton.row_programs import added_up


@triton.jit
def _rotated(
    mine,  # [ROWS, LANES] float32
    other,  # the same, of the lanes that each one is rotated with
    factors,
    epsilon,
    cosines,
    sines,
    lane,
    partner,
    is_place,
    TYPE: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads over their root mean square, as ``normalize`` does it, and rotated by halves."""
    if NORM > 0:
        scale = tl.rsqrt(tl.sum(mine * mine, 1) / DIM + epsilon)[:, None]
        mine, other = mine * scale, other * scale
        if NORM > 1:
            mine, other = mine.to(TYPE).to(tl.float32), other.to(TYPE).to(tl.float32)
        mine = mine * tl.load(factors + lane, mask=lane < DIM, other=0.0)
        other = other * tl.load(factors + partner, mask=lane < DIM, other=0.0)
        mine, other = mine.to(TYPE).to(tl.float32), other.to(TYPE).to(tl.float32)
    cosine = tl.load(cosines + lane, mask=is_place, other=0.0).to(tl.float32)
    sine = tl.load(sines + lane, mask=is_place, other=0.0).to(tl.float32)
    straight = (mine * cosine).to(TYPE).to(tl.float32)
    crossed = (tl.where(lane < DIM // 2, -other, other) * sine).to(TYPE).to(tl.float32)
    return (straight + crossed).to(TYPE)


@triton.jit(do_not_specialize=["num_rows", "chunk_stride"])
def rotate_and_store(
    chunks,  # [num_chunks, num_rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM]: queries, keys, values
    bias,
    cosines,  # [num_rows, DIM]
    sines,  # [num_rows, DIM]
    query_factors,  # [DIM] float32
    key_factors,  # [DIM] float32
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
    query_epsilon,
    key_epsilon,
    largest_key,
    largest_value,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """A program has ``ROWS`` rows of one head. ``QUERY_NORM``, ``KEY_NORM``: 0 is none; 2: heads are
    rounded to their type before they are weighed. Outputs of rows of padding are set to zeros here."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    lane = tl.arange(0, LANES)[None, :]
    half: tl.constexpr = DIM // 2
    partner = tl.where(lane < half, lane + half, lane - half)
    is_row = row < num_rows
    is_place = is_row & (lane < DIM)
    slot = tl.load(slots + row, mask=is_row, other=0)
    mine = added_up(
        chunks,
        chunk_stride,
        row * row_stride + head * DIM + lane,
        is_place,
        bias + head * DIM + lane,
        NUM_CHUNKS,
        HAS_BIAS,
    )
    mine = mine.to(query.dtype.element_ty).to(tl.float32)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        kv_head = (head - NUM_HEADS - NUM_KV_HEADS).to(tl.int64)
        tl.store(
            values + kv_head * values_head_stride + slot * DIM + lane,
            storable(mine, largest_value, IS_FP8, values.dtype.element_ty),
            mask=is_place & (slot >= 0),
        )
    else:
        other = added_up(
            chunks,
            chunk_stride,
            row * row_stride + head * DIM + partner,
            is_place,
            bias + head * DIM + partner,
            NUM_CHUNKS,
            HAS_BIAS,
        )
        other = other.to(query.dtype.element_ty).to(tl.float32)
        if head < NUM_HEADS:
            turned = _rotated(
                mine,
                other,
                query_factors,
                query_epsilon,
                cosines + row * angle_stride,
                sines + row * angle_stride,
                lane,
                partner,
                is_place,
                query.dtype.element_ty,
                DIM,
                QUERY_NORM,
            )
            at = (row * NUM_HEADS + head) * DIM + lane
            tl.store(query + at, turned, mask=is_place)
            zeros = tl.zeros([ROWS, LANES], output.dtype.element_ty)
            tl.store(output + at, zeros, mask=is_place & (slot < 0))
        else:
            turned = _rotated(
                mine,
                other,
                key_factors,
                key_epsilon,
                cosines + row * angle_stride,
                sines + row * angle_stride,
                lane,
                partner,
                is_place,
                query.dtype.element_ty,
                DIM,
                KEY_NORM,
            )
            kv_head = (head - NUM_HEADS).to(tl.int64)
            tl.store(
                keys + kv_head * keys_head_stride + slot * DIM + lane,
                storable(turned, largest_key, IS_FP8, keys.dtype.element_ty),
                mask=is_place & (slot >= 0),
            )


@triton.jit(do_not_specialize=["num_rows", "chunk_stride"])
def gate(
    chunks,  # [num_chunks, num_rows, 2 * half]: what the activation is for, and what it is a factor of
    bias,
    output,  # [num_rows, half]
    num_rows,
    chunk_stride,
    half,
    ELEMENTS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    row, feature = place // half, place % half
    is_place = row < num_rows
    at, kind = row * 2 * half + feature, output.dtype.element_ty
    gated = added_up(chunks, chunk_stride, at, is_place, bias + feature, NUM_CHUNKS, HAS_BIAS)
    factor = added_up(
        chunks, chunk_stride, at + half, is_place, bias + half + feature, NUM_CHUNKS, HAS_BIAS
    )
    gated = gated.to(kind).to(tl.float32)
    if ACTIVATION == "silu":
        gated = gated / (1.0 + tl.exp(-gated))
    else:  # gelu_tanh, the hyperbolic tangent written with an exponential
        inner = 0.7978845608028654 * (gated + 0.044715 * gated * gated * gated)
        gated = 0.5 * gated * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))
    gated = gated.to(kind).to(tl.float32)
    tl.store(output + place, gated * factor.to(kind).to(tl.float32), is_place)
