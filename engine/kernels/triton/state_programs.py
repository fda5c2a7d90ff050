"""Operations with a state over a step's walks, as Triton programs.

What to do lies in device memory, as ``engine.states.triton`` wrote it: a launch depends on nothing but
sizes. A row's numbers are made of the same operations in the same order, wherever its inputs and the
state before it lie.

``convolve``: a program takes a row and some channels; ``shift`` writes windows when nobody reads those
before any more. ``recur``: a program takes a walk, a head and some of its values, and keeps their state
in registers from entry to entry; what a later entry than the next one follows is also put into a buffer.
"""

import triton
import triton.language as tl

WALK_INTS = tl.constexpr(6)
"""Ints of a walk: its first entry and the one after its last, the slot that it begins from, its first
buffer, its first store and the one after its last."""
ENTRY_INTS = tl.constexpr(10)
"""Ints of an entry: as ``engine.states.work.Entry`` has them, whether a later one than the next follows
it, the slot that its walk begins from."""
STORE_INTS = tl.constexpr(2)
"""Ints of a store: its entry and its slot."""


@triton.jit
def _below(lane, count, is_wanted):
    """A mask of lanes below a count, or of none. The interpreter makes no mask of one and a number."""
    return lane < tl.where(is_wanted, count, 0)


@triton.jit
def _tap(
    rows, states, kept, entries, number, start, channel, row_stride, channels,
    STEPS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The input ``STEPS`` rows before an entry's; ``BEFORE``: inputs of a window."""
    above = number
    missing = STEPS
    for _ in tl.static_range(STEPS):
        is_entry = above >= 0
        missing = tl.where(is_entry, missing - 1, missing)
        above = tl.load(entries + above * ENTRY_INTS + 3, mask=is_entry, other=-1)
    row = tl.load(entries + above * ENTRY_INTS, mask=above >= 0, other=-1).to(tl.int64)
    read = tl.load(entries + above * ENTRY_INTS + 1, mask=above >= 0, other=-1).to(tl.int64)
    place = start.to(tl.int64) * BEFORE + BEFORE - 1 - missing
    is_row = _below(channel, channels, row >= 0)
    is_kept = _below(channel, channels, read >= 0)
    in_window = _below(channel, channels, (above < 0) & (start >= 0))
    x = tl.load(rows + row * row_stride + channel, mask=is_row, other=0.0)
    y = tl.load(kept + read * channels + channel, mask=is_kept, other=0.0)
    z = tl.load(states + place * channels + channel, mask=in_window, other=0.0)
    return tl.where(row >= 0, x.to(tl.float32), tl.where(read >= 0, y, z))


@triton.jit
def convolve(
    rows,  # [num_rows, channels]
    weight,  # [channels, WIDTH]
    bias,  # [channels]
    output,  # [num_rows, channels]
    states,  # [num_slots, WIDTH - 1, channels]
    kept,  # [num_places, channels]
    entries,  # int32
    entry_of,  # [num_rows] int32, -1 for rows of padding
    row_stride,
    channels,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(entry_of + row)
    if number < 0:
        return
    entry = entries + number * ENTRY_INTS
    keep = tl.load(entry + 2).to(tl.int64)
    start = tl.load(entry + 9)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    total = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        x = _tap(
            rows, states, kept, entries, number, start, channel, row_stride, channels,
            WIDTH - 1 - tap, WIDTH - 1,
        )  # fmt: skip
        factor = tl.load(weight + channel * WIDTH + tap, mask=is_channel, other=0.0)
        total += factor.to(tl.float32) * x
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output + row * channels + channel, total, mask=is_channel)
    own = tl.load(rows + row * row_stride + channel, mask=is_channel, other=0.0)
    is_kept = _below(channel, channels, keep >= 0)
    tl.store(kept + keep * channels + channel, own.to(tl.float32), mask=is_kept)


@triton.jit
def shift(
    rows,  # as convolve has them
    states,
    kept,
    walks,  # int32
    entries,
    stores,
    row_stride,
    channels,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A walk's windows, into slots that it may begin from: older inputs are written first, and none is
    read after its place was written."""
    walk = walks + tl.program_id(0) * WALK_INTS
    start = tl.load(walk + 2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    for store in range(tl.load(walk + 4), tl.load(walk + 5)):
        number = tl.load(stores + store * STORE_INTS)
        slot = tl.load(stores + store * STORE_INTS + 1).to(tl.int64)
        for tap in tl.static_range(WIDTH - 1):
            x = _tap(
                rows, states, kept, entries, number, start, channel, row_stride, channels,
                WIDTH - 2 - tap, WIDTH - 1,
            )  # fmt: skip
            tl.debug_barrier()
            place = slot * (WIDTH - 1) + tap
            tl.store(states + place * channels + channel, x, mask=is_channel)


@triton.jit
def _over_length(vector):
    return 1.0 / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def recur(
    query,  # [num_rows, key_heads, KEY_DIM]
    key,
    value,  # [num_rows, heads, VALUE_DIM]
    log_decay,  # [num_rows, heads], or with KEY_DIM numbers each; float32
    beta,  # [num_rows, heads] float32
    output,  # [num_rows, heads, VALUE_DIM]
    states,  # [num_slots, heads, KEY_DIM, VALUE_DIM]
    kept,  # [num_places, row_size]
    buffers,  # [num_buffers, heads, KEY_DIM, VALUE_DIM]
    walks,  # int32
    entries,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    decay_row,
    decay_head,
    beta_row,
    beta_head,
    row_size,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUES: tl.constexpr,
    PER_KEY: tl.constexpr,
    HAS_BETA: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    walk = walks + tl.program_id(0) * WALK_INTS
    first = tl.load(walk)
    end = tl.load(walk + 1)
    start = tl.load(walk + 2).to(tl.int64)
    first_buffer = tl.load(walk + 3).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    shared = head * KEY_HEADS // HEADS
    key_lane = tl.arange(0, KEY_LANES)
    value_lane = part * VALUES + tl.arange(0, VALUES)
    is_key = key_lane < KEY_DIM
    is_value = value_lane < VALUE_DIM
    is_state = is_key[:, None] & is_value[None, :]
    size = HEADS * KEY_DIM * VALUE_DIM
    own = (head * KEY_DIM + key_lane[:, None]) * VALUE_DIM + value_lane[None, :]
    # Where a place keeps keys, values, decays and betas.
    key_at = shared * KEY_DIM + key_lane
    value_at = KEY_HEADS * KEY_DIM + head * VALUE_DIM + value_lane
    decays_at = KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    decay_at = decays_at + (head * KEY_DIM + key_lane if PER_KEY else head + key_lane * 0)
    beta_at = decays_at + HEADS * (KEY_DIM if PER_KEY else 1) + head

    is_begun = is_state & _below(key_lane, KEY_DIM, start >= 0)[:, None]
    state = tl.load(states + start * size + own, mask=is_begun, other=0.0)
    for number in range(first, end):
        entry = entries + number * ENTRY_INTS
        row = tl.load(entry).to(tl.int64)
        read = tl.load(entry + 1).to(tl.int64)
        keep = tl.load(entry + 2).to(tl.int64)
        parent = tl.load(entry + 3)
        source = first_buffer + tl.load(entry + 4)
        buffer = first_buffer + tl.load(entry + 5)
        if (number > first) & (parent != number - 1):
            begun = tl.load(states + start * size + own, mask=is_begun, other=0.0)
            is_left = is_state & _below(key_lane, KEY_DIM, parent >= 0)[:, None]
            left = tl.load(buffers + source * size + own, mask=is_left, other=0.0)
            state = tl.where(parent < 0, begun, left)
        if row >= 0:
            k = tl.load(key + row * key_row + shared * key_head + key_lane, mask=is_key, other=0.0)
            q = tl.load(
                query + row * query_row + shared * query_head + key_lane, mask=is_key, other=0.0
            )
            x = tl.load(
                value + row * value_row + head * value_head + value_lane, mask=is_value, other=0.0
            )
            k, q, x = k.to(tl.float32), q.to(tl.float32), x.to(tl.float32)
            if NORMALISES:
                k = k * _over_length(k)
                q = q * _over_length(q)
            q = q * scale
            logs = log_decay + row * decay_row + head * decay_head
            decay = tl.exp(tl.load(logs + key_lane * PER_KEY, mask=is_key, other=0.0))
            weight = 1.0
            if HAS_BETA:
                weight = tl.load(beta + row * beta_row + head * beta_head)
        else:
            place = kept + read * row_size
            k = tl.load(place + key_at, mask=is_key, other=0.0)
            q = tl.zeros([KEY_LANES], tl.float32)
            x = tl.load(place + value_at, mask=is_value, other=0.0)
            decay = tl.load(place + decay_at, mask=is_key, other=0.0)
            weight = tl.load(place + beta_at)
        if keep >= 0:
            place = kept + keep * row_size
            tl.store(place + value_at, x, mask=is_value)
            if part == 0:
                tl.store(place + key_at, k, mask=is_key)
                tl.store(place + decay_at, decay, mask=is_key)
                tl.store(place + beta_at, weight)
        state = state * decay[:, None]
        if HAS_BETA:
            x = weight * (x - tl.sum(state * k[:, None], 0))
        state = state + k[:, None] * x[None, :]
        if row >= 0:
            place = output + (row * HEADS + head) * VALUE_DIM + value_lane
            tl.store(place, tl.sum(state * q[:, None], 0), mask=is_value)
        store = tl.load(entry + 6).to(tl.int64)
        snapshot = tl.load(entry + 7).to(tl.int64)
        is_stored = is_state & _below(key_lane, KEY_DIM, store >= 0)[:, None]
        tl.store(states + store * size + own, state, mask=is_stored)
        is_stored = is_state & _below(key_lane, KEY_DIM, snapshot >= 0)[:, None]
        tl.store(states + snapshot * size + own, state, mask=is_stored)
        if tl.load(entry + 8) != 0:
            tl.store(buffers + buffer * size + own, state, mask=is_state)
        tl.debug_barrier()
