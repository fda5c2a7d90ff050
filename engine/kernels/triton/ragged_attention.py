"""Attention of ragged rows over block tables, as Triton programs.

What to do lies in device memory, as ``engine.attention.work`` wrote it: a launch depends on nothing but
sizes, so it can be captured and run again over other contents.

``attend``: a program takes one work item, up to ``TILE_ROWS`` rows of one request, and one key head; the
query heads that share it are folded into rows. Keys are taken in chunks, counted from the text's first
key, as long as the item says, which follows from its rows whatever the batch is. A chunk has sums of its
own (maximum, weights, weighted values), and they are merged in the order of the text: by the program
itself, or, where the item is one of several that divide a text, by ``join``, in the same order with the
same operations. So how work is divided leaves no trace in a row's bits.

``store_rows`` puts new keys and values into their slots.
"""

import triton
import triton.language as tl

from engine.kernels.triton.interpreted import product_in_order

ITEM_INTS = tl.constexpr(12)
"""Ints of a work item: where its rows' records begin, how many, its block table, first chunk, number of
chunks, the key after the last, where its tail's slots begin and the first key that they give, whether its
sums are joined later, the first key that its rows see, the key after the last that all of them see,
wherever their own are, keys of a chunk."""
ROW_INTS = tl.constexpr(3)
"""The numbers of a row: its place in the batch, the key after its own in its text, its first partial sum
or -1."""
JOIN_INTS = tl.constexpr(3)
"""The numbers of a row to be joined: its place in the batch, its first partial sum, how many; 0: there is
none."""
NEVER = tl.constexpr(2147483647)
"""A key number that no text reaches."""


@triton.jit
def _stored(address, mask, IS_FP8: tl.constexpr, TYPE: tl.constexpr):
    """Keys or values in the queries' type. Floats of 8 bits (e4m3) come as bytes: as bits of a float16
    they are the same number times 2**-8, subnormal ones included; no device need know the type."""
    read = tl.load(address, mask=mask, other=0)
    if IS_FP8:
        bits = read.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        rows = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        rows = read
    return rows.to(TYPE)


@triton.jit
def _product(left, right, PRECISION: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """In float32."""
    if IS_INTERPRETED:
        product = product_in_order(left, right)
    else:
        product = tl.dot(left, right, input_precision=PRECISION)
    return product


@triton.jit
def _finite(value):
    """Returns a maximum as it is subtracted: minus infinity less itself is no number."""
    return tl.where(value == float("-inf"), 0.0, value)


@triton.jit
def _merge(most, weight, other_most, other_weight):
    """Merges sums over keys with those over the keys after them. Returns the maximum, the weight, and the
    factors of both sums of values."""
    merged = tl.maximum(most, other_most)
    finite = _finite(merged)
    mine, theirs = tl.exp2(most - finite), tl.exp2(other_most - finite)
    return merged, weight * mine + other_weight * theirs, mine, theirs


@triton.jit
def _divisor(most, weight, sinks, heads, is_row, HAS_SINKS: tl.constexpr):
    """Returns the factor of sums of values and their divisor. A sink has a score and no value."""
    scale = tl.full(weight.shape, 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        largest = tl.maximum(most, sink)
        scale = tl.exp2(most - largest)
        weight = weight * scale + tl.exp2(sink - largest)
    return scale, tl.where(weight == 0.0, 1.0, weight)


@triton.jit
def attend(
    query,  # [num_rows, num_heads, KEY_DIM]
    keys,  # [num_kv_heads, num_slots, KEY_DIM]
    values,  # [num_kv_heads, num_slots, VALUE_DIM]
    plan,  # int32
    output,  # [num_rows, num_heads, VALUE_DIM]
    sums,  # [num_partials, num_heads, VALUE_DIM] float32
    stats,  # [num_partials, num_heads, 2] float32: maximum, weight
    sinks,  # [num_heads]
    query_row_stride,
    query_head_stride,
    key_head_stride,
    value_head_stride,
    output_row_stride,
    num_heads,
    scale,
    softcap,
    window,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """``PAIRS``: of a row and a head, of a tile; ``KEYS`` are taken at a time. ``scale``: with the
    logarithm of 2 in it, as ``softcap`` has (where ``scale`` has its inverse). ``window``: in
    positions."""
    item = plan + tl.program_id(0) * ITEM_INTS
    num_rows = tl.load(item + 1)
    if num_rows == 0:
        return
    kv_head = tl.program_id(1)
    first_row = tl.load(item)
    table = tl.load(item + 2)
    first_chunk = tl.load(item + 3)
    num_chunks = tl.load(item + 4)
    num_keys = tl.load(item + 5)
    tail = tl.load(item + 6)
    tail_start = tl.load(item + 7)
    is_divided = tl.load(item + 8)
    first_key = tl.load(item + 9)
    block_end = tl.load(item + 10)
    chunk_keys = tl.load(item + 11)

    pair = tl.arange(0, PAIRS)
    head = kv_head * SHARE + pair % SHARE
    is_row = pair // SHARE < num_rows
    record = plan + first_row + pair // SHARE * ROW_INTS
    row = tl.load(record, mask=is_row, other=0).to(tl.int64)
    text_end = tl.load(record + 1, mask=is_row, other=0)
    partial = tl.load(record + 2, mask=is_row, other=0).to(tl.int64)
    seen_end = tl.maximum(text_end, block_end)
    first_seen = first_key
    if HAS_WINDOW:
        oldest = tl.min(tl.where(is_row, text_end, NEVER), 0) - window
        first_seen = tl.maximum(oldest, first_seen)
    first_seen = first_seen // KEYS * KEYS

    key_lane = tl.arange(0, KEY_LANES)
    value_lane = tl.arange(0, VALUE_LANES)
    is_key_lane = key_lane < KEY_DIM
    is_value_lane = value_lane < VALUE_DIM
    address = query + (row * query_row_stride + head * query_head_stride)[:, None]
    queries = tl.load(
        address + key_lane[None, :], mask=is_row[:, None] & is_key_lane[None, :], other=0.0
    )
    keys += kv_head.to(tl.int64) * key_head_stride
    values += kv_head.to(tl.int64) * value_head_stride

    all_most = tl.full([PAIRS], float("-inf"), tl.float32)
    all_weight = tl.zeros([PAIRS], tl.float32)
    all_total = tl.zeros([PAIRS, VALUE_LANES], tl.float32)
    for chunk in range(first_chunk, first_chunk + num_chunks):
        most = tl.full([PAIRS], float("-inf"), tl.float32)
        weight = tl.zeros([PAIRS], tl.float32)
        total = tl.zeros([PAIRS, VALUE_LANES], tl.float32)
        chunk_end = tl.minimum((chunk + 1) * chunk_keys, num_keys)
        for start in range(tl.maximum(chunk * chunk_keys, first_seen), chunk_end, KEYS):
            key = start + tl.arange(0, KEYS)
            is_key = key < chunk_end
            block = tl.load(
                plan + table + key // BLOCK_SIZE, mask=is_key & (key < tail_start), other=0
            )
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            if start + KEYS > tail_start:
                in_tail = is_key & (key >= tail_start)
                placed = tl.load(plan + tail + key - tail_start, mask=in_tail, other=0)
                slot = tl.where(in_tail, placed.to(tl.int64), slot)
            # One comparison of every row and key limits both ends: what comes too early is never reached.
            reached = tl.where(key >= first_key, key, NEVER)
            seen = reached[None, :] < seen_end[:, None]
            if HAS_WINDOW:
                seen = seen & (text_end[:, None] - key[None, :] <= window)
            key_rows = _stored(
                keys + slot[None, :] * KEY_DIM + key_lane[:, None],
                is_key[None, :] & is_key_lane[:, None],
                IS_FP8,
                queries.dtype,
            )
            scores = _product(queries, key_rows, PRECISION, IS_INTERPRETED) * scale
            if HAS_SOFTCAP:
                # The hyperbolic tangent, written with an exponential.
                scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * 2.8853900817779268)))
            scores = tl.where(seen, scores, float("-inf"))
            grown = tl.maximum(most, tl.max(scores, 1))
            finite = _finite(grown)
            weights = tl.exp2(scores - finite[:, None])
            shrunk = tl.exp2(most - finite)
            weight = weight * shrunk + tl.sum(weights, 1)
            most = grown
            value_rows = _stored(
                values + slot[:, None] * VALUE_DIM + value_lane[None, :],
                is_key[:, None] & is_value_lane[None, :],
                IS_FP8,
                queries.dtype,
            )
            added = _product(weights.to(queries.dtype), value_rows, PRECISION, IS_INTERPRETED)
            total = total * shrunk[:, None] + added
        if is_divided != 0:
            place = (partial + chunk) * num_heads + head
            tl.store(stats + place * 2, most, mask=is_row)
            tl.store(stats + place * 2 + 1, weight, mask=is_row)
            tl.store(
                sums + (place * VALUE_DIM)[:, None] + value_lane[None, :],
                total,
                mask=(is_row & (most > float("-inf")))[:, None] & is_value_lane[None, :],
            )
        else:
            all_most, all_weight, mine, theirs = _merge(all_most, all_weight, most, weight)
            all_total = all_total * mine[:, None] + total * theirs[:, None]
    if is_divided == 0:
        kept, divisor = _divisor(all_most, all_weight, sinks, head, is_row, HAS_SINKS)
        means = all_total * kept[:, None] / divisor[:, None]
        tl.store(
            output + (row * output_row_stride + head * VALUE_DIM)[:, None] + value_lane[None, :],
            means,
            mask=is_row[:, None] & is_value_lane[None, :],
        )


@triton.jit
def _waiting(stat, value, partial, end, num_heads, VALUE_DIM: tl.constexpr, is_value):
    """The sums of a chunk: maximum, weight and values. ``stat``, ``value``: where those of the first are.
    From ``end`` on there is nothing, and merging nothing changes no bit."""
    is_there = is_value & (partial < end)
    most = tl.load(stat + partial * num_heads * 2, mask=is_there, other=float("-inf"))
    weight = tl.load(stat + partial * num_heads * 2 + 1, mask=is_there, other=0.0)
    total = tl.load(value + partial * num_heads * VALUE_DIM, mask=is_there, other=0.0)
    # Where nothing was seen, nothing was written.
    return most, weight, tl.where(most > float("-inf"), total, 0.0)


@triton.jit
def join(
    joins,  # int32, of the plan
    output,  # [num_rows, num_heads, VALUE_DIM]
    sums,  # as attend wrote them
    stats,
    sinks,
    output_row_stride,
    num_heads,
    SHARE: tl.constexpr,
    SHARE_LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One row, and the heads of one key head."""
    record = joins + tl.program_id(0) * JOIN_INTS
    num_partials = tl.load(record + 2)
    if num_partials == 0:
        return
    row = tl.load(record).to(tl.int64)
    first = tl.load(record + 1).to(tl.int64)
    # Every value has its head's numbers at hand, so that nothing is handed from thread to thread, and
    # several chunks are on their way from memory at once.
    lane = tl.arange(0, SHARE_LANES)[:, None]
    value_lane = tl.arange(0, VALUE_LANES)[None, :]
    is_value = (lane < SHARE) & (value_lane < VALUE_DIM)
    head = tl.program_id(1) * SHARE + lane + value_lane * 0
    all_most = tl.full([SHARE_LANES, VALUE_LANES], float("-inf"), tl.float32)
    all_weight = tl.zeros([SHARE_LANES, VALUE_LANES], tl.float32)
    all_total = tl.zeros([SHARE_LANES, VALUE_LANES], tl.float32)
    stat, value = stats + head * 2, sums + head * VALUE_DIM + value_lane
    end = first + num_partials
    for partial in range(first, end, 4):
        # All are asked for before the first is needed.
        at = partial + head * 0
        most, weight, total = _waiting(stat, value, at, end, num_heads, VALUE_DIM, is_value)
        most_1, weight_1, total_1 = _waiting(
            stat, value, at + 1, end, num_heads, VALUE_DIM, is_value
        )
        most_2, weight_2, total_2 = _waiting(
            stat, value, at + 2, end, num_heads, VALUE_DIM, is_value
        )
        most_3, weight_3, total_3 = _waiting(
            stat, value, at + 3, end, num_heads, VALUE_DIM, is_value
        )
        all_most, all_weight, mine, theirs = _merge(all_most, all_weight, most, weight)
        all_total = all_total * mine + total * theirs
        all_most, all_weight, mine, theirs = _merge(all_most, all_weight, most_1, weight_1)
        all_total = all_total * mine + total_1 * theirs
        all_most, all_weight, mine, theirs = _merge(all_most, all_weight, most_2, weight_2)
        all_total = all_total * mine + total_2 * theirs
        all_most, all_weight, mine, theirs = _merge(all_most, all_weight, most_3, weight_3)
        all_total = all_total * mine + total_3 * theirs
    kept, divisor = _divisor(all_most, all_weight, sinks, head, is_value, HAS_SINKS)
    tl.store(
        output + row * output_row_stride + head * VALUE_DIM + value_lane,
        all_total * kept / divisor,
        mask=is_value,
    )


@triton.jit
def storable(rows, largest, IS_FP8: tl.constexpr, TYPE: tl.constexpr):
    """``rows`` as they are stored, without what is no number. To 8 bits by nearest, even at ties, as
    torch does: a mantissa of 3 bits, or, below the normal numbers, multiples of 2**-9."""
    rows = rows.to(tl.float32)
    rows = tl.where(tl.abs(rows) < float("inf"), rows, 0.0)
    rows = tl.minimum(tl.maximum(rows, -largest), largest)
    if IS_FP8:
        size = tl.abs(rows)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
        sign = (rows.to(tl.int32, bitcast=True) >> 24) & 0x80
        stored = (tl.where(size < 0.015625, small, normal) | sign).to(TYPE)
    else:
        stored = rows.to(TYPE)
    return stored


@triton.jit(do_not_specialize=["num_rows"])
def store_rows(
    key,  # [num_rows, num_kv_heads, KEY_DIM]
    value,  # [num_rows, num_kv_heads, VALUE_DIM]
    slots,  # [num_rows] int64; -1: a row of padding
    keys,  # [num_kv_heads, num_slots, KEY_DIM]
    values,  # [num_kv_heads, num_slots, VALUE_DIM]
    output,  # [num_rows, num_heads, VALUE_DIM]
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    keys_head_stride,
    values_head_stride,
    num_rows,
    num_kv_heads,
    largest_key,
    largest_value,
    SHARE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """``PAIRS`` of a row and a key head. Rows of padding are nobody's work, so their outputs are set
    here: to zeros, which no layer after this one stumbles over."""
    pair = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS))[:, None]
    row = (pair // num_kv_heads).to(tl.int64)
    head = (pair % num_kv_heads).to(tl.int64)
    key_lane = tl.arange(0, KEY_LANES)[None, :]
    value_lane = tl.arange(0, VALUE_LANES)[None, :]
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=0)
    is_key = is_row & (slot >= 0) & (key_lane < KEY_DIM)
    is_value = is_row & (slot >= 0) & (value_lane < VALUE_DIM)
    new_key = tl.load(
        key + row * key_row_stride + head * key_head_stride + key_lane, mask=is_key, other=0.0
    )
    new_value = tl.load(
        value + row * value_row_stride + head * value_head_stride + value_lane,
        mask=is_value,
        other=0.0,
    )
    tl.store(
        keys + head * keys_head_stride + slot * KEY_DIM + key_lane,
        storable(new_key, largest_key, IS_FP8, keys.dtype.element_ty),
        mask=is_key,
    )
    tl.store(
        values + head * values_head_stride + slot * VALUE_DIM + value_lane,
        storable(new_value, largest_value, IS_FP8, values.dtype.element_ty),
        mask=is_value,
    )
    is_padding = is_row & (slot < 0) & (value_lane < VALUE_DIM)
    zeros = tl.zeros([PAIRS, VALUE_LANES], output.dtype.element_ty)
    for shared in range(SHARE):
        out = ((row * num_kv_heads + head) * SHARE + shared) * VALUE_DIM
        tl.store(output + out + value_lane, zeros, mask=is_padding)
