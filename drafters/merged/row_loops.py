"""Compiled: the target's top tokens by the last tokens before them.

After Token Recycling (Luo et al., arXiv 2408.08696), which keeps them by one token; here longer contexts
have rows of their own. A row is found by the hash of its context, in one of a few places; where all of
them are taken the one that was written longest ago makes room.
"""

from __future__ import annotations

import math
from typing import Any

from compiled.loops import Loop, callee
from drafters.copying.index_loops import hash_tokens
from drafters.merged.records import Rows, Seen

NUM_LEVELS = 3
NUM_TOP = 8
TOKENS_AT, LOGS_AT = 3, 3 + NUM_TOP
ROW_CELLS = LOGS_AT + NUM_TOP
"""Two halves of the hash, when it was written, tokens, and log-probabilities in units of
1 / ``LOG_UNITS``; a token of -1 ends them."""
LOG_UNITS = 1024.0
LEAST_LOG = -20_480
_PLACES = 4
MOST_FREQUENT = 64
"""Counted; fewer are guessed."""
MOST_COUNTED = 8_192
_HALF = (1 << 31) - 1


@callee
def length_of(level: int) -> int:
    return (1, 2, 4)[level]


@callee
def log_of(log: float) -> int:
    return max(LEAST_LOG, int(log * LOG_UNITS))


@callee
def normalize(seen: Seen) -> None:
    """Makes logits of each row's top tokens their log-probabilities, as if there were no others."""
    for first in range(0, seen.num_rows * seen.num_top, seen.num_top):
        total, end = 0.0, first
        while end < first + seen.num_top and seen.tops[end] >= 0:
            total += math.exp(seen.logs[end] - seen.logs[first])
            end += 1
        likeliest = seen.logs[first] + math.log(max(total, 1.0))
        for at in range(first, end):
            seen.logs[at] -= likeliest


@callee
def find_row(rows: Rows, tokens: Any, end: int, length: int) -> int:
    """Returns where the row of the context before ``tokens[end]`` begins in ``cells``; -1: there is
    none."""
    mixed, found = hash_tokens(tokens, end, length), -1
    one, other = mixed & _HALF, (mixed >> 31) & _HALF
    for place in range(_PLACES):
        cell = ROW_CELLS * ((one + place) & (rows.size - 1))
        if rows.cells[cell + 2] > 0 and rows.cells[cell] == one and rows.cells[cell + 1] == other:
            found = cell
    return found


@callee
def _place_for(rows: Rows, one: int, other: int) -> int:
    cells, best = rows.cells, -1
    for place in range(_PLACES):
        cell = ROW_CELLS * ((one + place) & (rows.size - 1))
        if cells[cell + 2] > 0 and cells[cell] == one and cells[cell + 1] == other:
            return cell
        if best < 0 or cells[cell + 2] < cells[best + 2]:
            best = cell
    rows.num_used += cells[best + 2] == 0
    cells[best], cells[best + 1] = one, other
    return best


@callee
def _put_row(rows: Rows, tokens: Any, end: int, length: int, seen: Seen, row: int) -> None:
    if end < length:
        return
    mixed = hash_tokens(tokens, end, length)
    cell = _place_for(rows, mixed & _HALF, (mixed >> 31) & _HALF)
    rows.num_written += 1
    cells = rows.cells
    cells[cell + 2] = rows.num_written
    for rank in range(NUM_TOP):
        token = seen.tops[row * seen.num_top + rank] if rank < seen.num_top else -1
        cells[cell + TOKENS_AT + rank] = token
        if token < 0:
            break
        cells[cell + LOGS_AT + rank] = log_of(seen.logs[row * seen.num_top + rank])


@callee
def learn_rows(rows: Rows, tokens: Any, end: int, seen: Seen, context: Any) -> None:
    """Keeps the top tokens of all rows; those before ``tokens[end]`` are the text up to the anchor. What
    the text has come to is written last. ``context``: room for a context."""
    longest = length_of(NUM_LEVELS - 1)
    for on_path in range(2):
        for row in range(seen.num_rows):
            if seen.is_emitted[row] != on_path or seen.tops[row * seen.num_top] < 0:
                continue
            node, at = row - 1, longest
            while node >= 0 and at > 0:
                at -= 1
                context[at] = seen.tokens[node]
                node = seen.parents[node]
            before = end
            while at > 0 and before > 0:
                at, before = at - 1, before - 1
                context[at] = tokens[before]
            for level in range(NUM_LEVELS if on_path else 1):
                if longest - length_of(level) >= at:
                    _put_row(rows, context, longest, length_of(level), seen, row)


@callee
def count_token(rows: Rows, token: int) -> None:
    """The target said this: the more often, the nearer it stands to the front."""
    tokens, at = rows.frequent, 0
    while at < MOST_FREQUENT - 1 and tokens[at] != token and tokens[MOST_FREQUENT + at] > 0:
        at += 1
    count = tokens[MOST_FREQUENT + at] + 1 if tokens[at] == token else 1
    while at > 0 and tokens[MOST_FREQUENT + at - 1] <= count:
        tokens[at], tokens[MOST_FREQUENT + at] = tokens[at - 1], tokens[MOST_FREQUENT + at - 1]
        at -= 1
    tokens[at], tokens[MOST_FREQUENT + at] = token, count
    rows.num_counted += 1
    if rows.num_counted == MOST_COUNTED:
        rows.num_counted //= 2
        for each in range(MOST_FREQUENT):
            tokens[MOST_FREQUENT + each] //= 2


def _move(before: Rows, rows: Rows) -> None:
    """Puts what is in ``before`` into empty rows."""
    for row in range(before.size):
        cell = ROW_CELLS * row
        if before.cells[cell + 2] > 0:
            to = _place_for(rows, before.cells[cell], before.cells[cell + 1])
            for at in range(ROW_CELLS):
                rows.cells[to + at] = before.cells[cell + at]
    rows.num_written, rows.num_counted = before.num_written, before.num_counted


move_rows = Loop(_move)
