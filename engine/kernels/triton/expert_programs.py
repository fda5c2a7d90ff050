"""Which rows each expert is multiplied with, and what a row's experts add up to, as Triton programs."""

import triton
import triton.language as tl


@triton.jit
def _experts(chosen, pair, num_pairs, NUM_EXPERTS: tl.constexpr):
    """Those of pairs; ``NUM_EXPERTS``: none."""
    expert = tl.load(chosen + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
    return tl.where((expert >= 0) & (expert < NUM_EXPERTS), expert, NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def lay_pairs(
    chosen,  # [num_pairs]
    pairs,  # [num_pairs]
    blocks,  # [3, num_blocks]
    experts,  # [num_pairs]
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A program for each expert, which lays its pairs and blocks behind those of the experts before it,
    and one for pairs without an expert and blocks without pairs. ``BINS``: a power of two above the
    experts; ``PAIRS`` are looked at together."""
    mine = tl.program_id(0)
    lane, each = tl.arange(0, PAIRS), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        counts += tl.histogram(_experts(chosen, start + lane, num_pairs, NUM_EXPERTS), BINS)
    is_before = each < mine
    first = tl.sum(tl.where(is_before, counts, 0), 0)
    block = tl.sum(tl.where(is_before, (counts + (SIZE - 1)) // SIZE, 0), 0)
    place = first
    for start in range(0, num_pairs, PAIRS):
        pair = start + lane
        expert = _experts(chosen, pair, num_pairs, NUM_EXPERTS)
        is_mine = (expert == mine) & (pair < num_pairs)
        behind = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(pairs + place + behind - 1, pair.to(tl.int64), is_mine)
        place += tl.sum(is_mine.to(tl.int32), 0)
        if mine == NUM_EXPERTS:
            known = tl.where(expert < NUM_EXPERTS, expert, 0)
            tl.store(experts + pair, known.to(tl.int64), pair < num_pairs)
    end, last = place, block + tl.cdiv(place - first, SIZE)
    if mine == NUM_EXPERTS:
        end, last = first, num_blocks
    for start in range(block, last, PAIRS):
        own = start + lane
        begin = tl.minimum(first + (own - block) * SIZE, end)
        behind = tl.minimum(begin + SIZE, end)
        is_there = own < last
        owner = tl.minimum(mine, NUM_EXPERTS - 1) + tl.zeros([PAIRS], tl.int64)
        tl.store(blocks + own, owner, is_there)
        tl.store(blocks + num_blocks + own, begin.to(tl.int64), is_there)
        tl.store(blocks + 2 * num_blocks + own, behind.to(tl.int64), is_there)


@triton.jit(do_not_specialize=["num_features"])
def add_outputs(
    rows,  # [num_rows * num_chosen, num_features]
    weights,  # [num_rows, num_chosen]
    output,  # [num_rows, num_features]
    num_features,
    NUM_CHOSEN: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """In float32, in the order in which they were chosen."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    is_feature = feature < num_features
    total = tl.zeros([FEATURES], tl.float32)
    for choice in range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + choice
        part = tl.load(rows + pair * num_features + feature, is_feature, other=0.0).to(tl.float32)
        part = part * tl.load(weights + pair).to(tl.float32)
        total = part if choice == 0 else total + part
    tl.store(output + row * num_features + feature, total, is_feature)
