"""Products with weights in few bits, as Triton programs in which a row's bits are its own.

How weights lie: ``packed_codes``. Codes are widened to the rows' type, which holds every number that they
stand for, and multiplied in tiles of sixteen inputs. Sums of those inputs that share a scale are weighed
in float32, and added in order within chunks, and chunks as in ``row_programs``, whose ``add_chunks`` adds
those of several programs. No weight is ever rounded.

How many ``ROWS`` a program takes says how many columns stand beside one another in its tiles, and how
many ``FEATURES`` how many lines: what is multiplied and added for one of them, by which instruction and
in what order, is the same for any number.

Experts' outputs stand beside one another in one weight. Rows that are pairs of a row and an expert come
in blocks of one expert's (``expert_ops``), of which a program takes one.
"""

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from engine.kernels.triton.interpreted import product_in_order

INPUTS = tl.constexpr(16)
"""That a tile multiplies at once, and words of an output that lie together."""
WORD = tl.constexpr(16)
"""Bits of a word."""
_WHOLE = tl.constexpr(0x4B000000)
"""The bits of 2 ** 23 in float32, to whose lowest a whole number is added."""
_TO_HALF = tl.constexpr(256.0)
"""Numbers of e4m3 are so much larger than float16's with the same bits of exponent."""
_LARGE = {"bf16": (0x4300, 0x3F80, "bf16x2"), "fp16": (0x6400, 0x3C00, "f16x2")}
"""The bits of a number to whose lowest a whole number is added, those of one, and the name of pairs."""


@constexpr_function
def widening_asm(dtype, place, zero):
    """Instructions that make two numbers of the codes of four bits at ``place`` in two words, less
    ``zero``: the compiler finds twice as many."""
    bits, unit, name = _LARGE[dtype]
    large, one, less = (f"0x{each:04X}{each:04X}" for each in (bits, unit, (bits | 0x8000) + zero))
    return (
        "{ .reg .b32 t, o, z; "
        f"shr.u32 t, $1, {4 * place}; lop3.b32 t, t, 0x000F000F, {large}, 0xEA; "
        f"mov.b32 o, {one}; mov.b32 z, {less}; fma.rn.{name} $0, t, o, z; }}"
    )


@triton.jit
def numbers_of(
    words,  # int16
    zeros,  # of each output, float32, or None
    like,  # of the type that is wanted
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Numbers that the codes at a place of words stand for, before they are scaled."""
    is_paired: tl.constexpr = BITS == 4 and like.dtype != tl.float32 and not IS_INTERPRETED
    if is_paired:
        asm: tl.constexpr = widening_asm(like.dtype.name, PLACE, ZERO)
        values = tl.inline_asm_elementwise(asm, "=r,r", [words], like.dtype, True, 2)
    else:
        code = (words.to(tl.int32) >> (BITS * PLACE)) & ((1 << BITS) - 1)
        if KIND == "whole":
            values = (code | _WHOLE).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
        elif KIND == "e5m2":
            values = (code << 8).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            half = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
            values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * _TO_HALF
    if zeros is not None:
        values = values.to(tl.float32) - zeros
    return values.to(like.dtype)


@triton.jit
def place_of(first, feature, out_features, SPAN: tl.constexpr):
    """Where numbers of the input ``first`` lie, for each output: those of a span, or 0 of all inputs."""
    if SPAN:
        return tl.cast(first // SPAN, tl.int64) * out_features + feature
    return feature


@triton.jit
def scale_of(scales, inner, at, inner_at, is_there):
    """Scales, times whole numbers where there are ``inner`` ones, ``[features, 1]`` float32."""
    scale = tl.load(scales + at, mask=is_there, other=0).to(tl.float32)
    if inner is not None:
        scale = scale * tl.load(inner + inner_at, mask=is_there, other=0).to(tl.float32)
    return scale[:, None]


@triton.jit
def dot(left, right, added, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:
        return added + product_in_order(left, right)
    return tl.dot(left, right, added, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def multiply_codes(
    rows,  # [num_rows, in_features]
    codes,  # [units, num_channels, 16] int16
    scales,  # [spans, num_channels], like those that follow; what a format does not have is None
    minima,
    zeros,
    inner_scales,
    inner_minima,
    channel_scales,  # [1, num_channels]
    bias,  # [out_features]
    pairs,  # [num_pairs] int64, by experts; None: rows are rows
    blocks,  # [3, num_blocks] int64: an expert, where its pairs begin and end
    output,  # [num_rows, out_features], or of each chunk
    num_rows,
    out_features,
    in_features,
    row_stride,
    num_blocks,
    num_chosen,
    num_experts,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    SPAN: tl.constexpr,
    INNER_SPAN: tl.constexpr,
    TILES: tl.constexpr,
    IS_FULL: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """``TILES``: so many tiles of a unit, of which a word has codes, share their scales. ``IS_FULL``:
    inputs fill their units. ``IS_DIVIDED``: a program for each chunk, which leaves its sum."""
    unit: tl.constexpr = INPUTS * WORD // BITS
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    lane = tl.arange(0, INPUTS)
    is_feature = feature < out_features
    if pairs is None:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row, source, channel = row < num_rows, row, feature
        num_inputs = in_features
    else:
        block = blocks + tl.program_id(0)
        first_pair, end_pair = tl.load(block + num_blocks), tl.load(block + 2 * num_blocks)
        pair = first_pair + tl.arange(0, ROWS)
        is_row = pair < end_pair
        row = tl.load(pairs + pair, mask=is_row, other=0)
        source, channel = row // num_chosen, feature + tl.load(block) * out_features
        # A block without pairs has nothing to add.
        num_inputs = tl.where(first_pair < end_pair, in_features, 0)
    num_channels = out_features * num_experts
    row_address = rows + source[None, :] * row_stride + lane[:, None]
    code_address = codes + channel[:, None] * INPUTS + lane[None, :]
    first_chunk = 0
    end_chunk = tl.cdiv(in_features, CHUNK)
    if IS_DIVIDED:
        first_chunk = tl.program_id(2)
        end_chunk = first_chunk + 1
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for chunk in range(first_chunk, end_chunk):
        added = tl.zeros([FEATURES, ROWS], tl.float32)
        end = tl.minimum((chunk + 1) * CHUNK, num_inputs)
        for start in range(chunk * CHUNK, end, unit):
            offset = tl.cast(start // unit, tl.int64) * num_channels * INPUTS
            words = tl.load(code_address + offset, mask=is_feature[:, None], other=0)
            for tile in tl.static_range(0, unit // INPUTS, TILES):
                first = start + tile * INPUTS
                # Behind the last input there are codes, but no scales.
                is_there = is_feature
                if not IS_FULL:
                    is_there = is_feature & (tl.full([FEATURES], first, tl.int32) < in_features)
                span = place_of(first, channel, num_channels, SPAN)
                inner_span = place_of(first, channel, num_channels, INNER_SPAN)
                zero = None
                if zeros is not None:
                    zero = scale_of(zeros, None, span, span, is_there)
                here = added
                if scales is not None:
                    here = tl.zeros([FEATURES, ROWS], tl.float32)
                plain = tl.zeros([FEATURES, ROWS], tl.float32)
                for place in tl.static_range(tile, tile + TILES):
                    at = start + place * INPUTS
                    is_input = is_row[None, :]
                    if not IS_FULL:
                        is_input = is_row[None, :] & (lane < in_features - at)[:, None]
                    right = tl.load(row_address + at, mask=is_input, other=0.0)
                    left = numbers_of(words, zero, right, place, BITS, KIND, ZERO, IS_INTERPRETED)
                    here = dot(left, right, here, IS_INTERPRETED)
                    if minima is not None:
                        ones = tl.full([FEATURES, INPUTS], 1.0, tl.float32).to(right.dtype)
                        plain = dot(ones, right, plain, IS_INTERPRETED)
                if scales is None:
                    added = here
                else:
                    scale = scale_of(scales, inner_scales, span, inner_span, is_there)
                    added = tl.fma(here, scale, added)
                if minima is not None:
                    least = scale_of(minima, inner_minima, span, inner_span, is_there)
                    added = tl.fma(plain, least, added)
        if channel_scales is not None:
            added = added * tl.load(channel_scales + channel, mask=is_feature, other=0.0)[:, None]
        total = total + added
    where = row[None, :] * out_features + feature[:, None]
    is_output = is_row[None, :] & is_feature[:, None]
    if IS_DIVIDED:
        offset = tl.cast(first_chunk, tl.int64) * num_rows * out_features
        tl.store(output + offset + where, total, is_output)
    else:
        if bias is not None:
            of_feature = tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)
            total = total + of_feature[:, None]
        tl.store(output + where, total, is_output)
