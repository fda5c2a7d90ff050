"""Drafts copied from a request's own text, as a Triton program: a program per request.

It takes in what the step before has accepted of its draft under "match", finds the longest, then most
recent, earlier occurrence of the text's last tokens, and lays out the rows of the next step: the anchor,
and what followed there (``drafters.copying.ngram``, to the token).
"""

import triton
import triton.language as tl

RECORD_INTS = tl.constexpr(11)
"""Ints of a request: its text's place or -1, how many tokens of it the host knows, the first of them that
the device lacks, where these lie, the row of its anchor in the step before, nodes of its draft there, its
first row in this step, nodes of its draft, shortest and longest match, and where the slots of its rows
lie, were all of the draft before refused."""
NO_TOKEN = tl.constexpr(-1)
_PLACES = tl.constexpr(1 << 16)
"""More than a text has tokens."""


@triton.jit(do_not_specialize=["num_rows"])
def copy_drafts(
    told,  # int32: records, then tokens and slots
    texts,  # [num_places, text_stride] int32
    tokens,  # int64: what the target has chosen at the rows of the step before
    drafted,  # int64: the tokens of its rows
    output,  # [6, num_rows] int64: tokens, positions, slots, refused, drafted, matched
    text_stride,
    num_rows,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    MOST_MATCHED: tl.constexpr,
):
    """``TOKENS`` of a text are looked at in one go; ``LANES`` are more than there are nodes, and no fewer
    than ``MOST_MATCHED``, up to which the tokens that agree are counted."""
    record = told + tl.program_id(0) * RECORD_INTS
    place = tl.load(record)
    num_known = tl.load(record + 1)
    anchor_row = tl.load(record + 4)
    num_before = tl.load(record + 5)
    first_row = tl.load(record + 6)
    num_nodes = tl.load(record + 7)
    text = texts + tl.maximum(place, 0).to(tl.int64) * text_stride
    lane = tl.arange(0, LANES)

    is_node = lane < num_before
    target = tl.load(tokens + anchor_row + lane, mask=lane <= num_before, other=0).to(tl.int32)
    draft = tl.load(drafted + anchor_row + 1 + lane, mask=is_node, other=-1).to(tl.int32)
    num_accepted = tl.min(tl.where(is_node & (draft == target), LANES, lane), 0)
    anchor = tl.sum(tl.where(lane == num_accepted, target, 0), 0)
    length = num_known + num_accepted + 1

    best = tl.full([], -1, tl.int32)
    if place >= 0:
        first_new = tl.load(record + 2)
        new = told + tl.load(record + 3)
        for start in range(first_new, num_known, TOKENS):
            at = start + tl.arange(0, TOKENS)
            is_new = at < num_known
            tl.store(text + at, tl.load(new + at - first_new, mask=is_new, other=0), mask=is_new)
        tl.store(text + num_known + lane, target, mask=lane <= num_accepted)
        tl.debug_barrier()  # the threads read what others have written
        shortest = tl.load(record + 8)
        longest = tl.load(record + 9)
        for start in range(0, length - 1, TOKENS):
            at = start + tl.arange(0, TOKENS)
            agrees = at < length - 1
            count = tl.zeros([TOKENS], tl.int32)
            for back in range(0, longest):
                last = tl.load(text + tl.maximum(length - 1 - back, 0))
                agrees = agrees & (at >= back)
                agrees = agrees & (tl.load(text + at - back, mask=agrees, other=-1) == last)
                count += agrees.to(tl.int32)
            found = tl.max(tl.where(count >= shortest, count * _PLACES + at, -1), 0)
            best = tl.maximum(best, found)

    match = tl.where(best < 0, -1, best % _PLACES)
    is_before = (lane <= match) & (lane < MOST_MATCHED)
    earlier = tl.load(text + match - lane, mask=is_before, other=-1)
    last = tl.load(text + length - 1 - lane, mask=is_before, other=-2)
    num_matched = tl.min(tl.where(earlier == last, LANES, lane), 0)
    num_matched = tl.minimum(num_matched, MOST_MATCHED)
    num_copied = tl.where(best < 0, 0, num_nodes)
    # Past the text's end a copy goes on into itself.
    from_match = (lane - 1) % (length - 1 - match)
    is_copied = (lane > 0) & (lane <= num_copied)
    copied = tl.load(text + match + 1 + from_match, mask=is_copied, other=NO_TOKEN)
    is_row = lane <= num_nodes
    num_refused = num_before - num_accepted
    slot = tl.load(told + tl.load(record + 10) + num_accepted + lane, mask=is_row, other=0)
    output += first_row + lane
    tl.store(output, tl.where(lane == 0, anchor, tl.maximum(copied, 0)), mask=is_row)
    tl.store(output + num_rows, length - 1 + lane, mask=is_row)
    tl.store(output + 2 * num_rows, slot, mask=is_row)
    tl.store(output + 3 * num_rows, num_refused + lane * 0, mask=is_row)
    tl.store(output + 4 * num_rows, copied, mask=is_row)
    tl.store(output + 5 * num_rows, num_matched + lane * 0, mask=is_row)
