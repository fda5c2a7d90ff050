"""Compiled: the places that a text may go on at, and what they are worth.

After a change an edit goes on near where copying broke off: places there are found first, and on little
evidence, while a place anywhere else has to show a match.
"""

from __future__ import annotations

from compiled.loops import callee
from compiled.records import is_nowhere
from drafters.copying.correction_loops import text_of
from drafters.copying.index_loops import NUM_LEVELS, find, num_equal_before
from drafters.copying.records import OWN_TEXT, State, Text
from drafters.copying.weights import (
    AHEAD_TOKENS,
    BEGINNING,
    BEHIND_TOKENS,
    EARLIER_TOKENS,
    FAR_AHEAD_TOKENS,
    INSTRUCTION_TOKENS,
    MAX_MATCH_LENGTH,
    NEAR_TOKENS,
    NUM_LENGTHS,
    UNMATCHED,
    UNMATCHED_EARLIER,
    Place,
)

CURRENT, NEAR, _AHEAD, _FAR_AHEAD, _BEHIND, _EARLIER = map(int, list(Place)[:6])
_PROMPT, _OUTPUT, _HISTORY, INSTRUCTION, _BESIDE = map(int, list(Place)[6:])
MAX_ENDS = 4
_MAX_OCCURRENCES = 8
_MAX_OCCURRENCES_AHEAD = 4
_MAX_INSTRUCTED = 4
FEW_CANDIDATES = 4
"""Enough to go on with a copy and for chains; trees need to see what is said next to it."""
MAX_CANDIDATES = 16
ROOM_FOR_CANDIDATES = (
    1 + _MAX_INSTRUCTED + 3 * MAX_CANDIDATES + MAX_ENDS * (_MAX_OCCURRENCES_AHEAD + NEAR_TOKENS + 1)
)


@callee
def copies_prompt(s: State) -> bool:
    """Whether the output began as a copy of the prompt, or will."""
    return s.copied_from > 0 or (not s.has_copied and s.num_ends > 0)


@callee
def place_of(s: State, serial: int, position: int) -> int:
    ahead = FAR_AHEAD_TOKENS + 1
    if s.num_ends and s.ends[0].text == serial:
        ahead = position - s.ends[0].position
        if 0 <= ahead <= AHEAD_TOKENS:
            return NEAR if ahead <= NEAR_TOKENS else _AHEAD
    for rank in range(1, s.num_ends):
        since = position - s.ends[rank].position
        if s.ends[rank].text == serial and 0 <= since <= EARLIER_TOKENS:
            return _EARLIER
    if -BEHIND_TOKENS <= ahead <= FAR_AHEAD_TOKENS:
        return _BEHIND if ahead < 0 else _FAR_AHEAD
    if serial != OWN_TEXT:
        return _BESIDE if copies_prompt(s) else _HISTORY
    if s.copied_from - INSTRUCTION_TOKENS <= position <= s.copied_from:
        return INSTRUCTION
    return _PROMPT if position < s.num_prompt_tokens else _OUTPUT


@callee
def lost_bucket(num_lost: int) -> int:
    """Returns 0..3 for so many tokens since a copy broke off, 4 for up to 8, 5 for more."""
    return num_lost if num_lost < 4 else (4 if num_lost <= 8 else 5)


@callee
def unmatched_weight(s: State, text: int, position: int, num_lost: int) -> float:
    """Returns the weight of a place right where copying broke off, if the last token is not before it:
    that token may have been put in or put instead."""
    offset = position - s.ends[0].position
    if s.ends[0].text != text or not 0 <= offset <= NEAR_TOKENS:
        return s.worth[UNMATCHED_EARLIER]
    if not s.has_copied and offset == 0:
        return s.worth[BEGINNING]
    return s.worth[UNMATCHED + lost_bucket(num_lost) * (NEAR_TOKENS + 1) + offset]


@callee
def _add(s: State, count: int, text: Text, position: int, end: int) -> int:
    """Adds a place to the ``count`` candidates where it may be worth anything and is not among them;
    returns how many there are. ``end``: of the text so far."""
    serial, tokens = text.serial, text.tokens
    limit = end if serial == OWN_TEXT else text.num_tokens
    if position >= limit or tokens[position] < 0 or count == ROOM_FOR_CANDIDATES:
        return count
    for each in range(count):
        if s.candidates[each].position == position and s.candidates[each].text == serial:
            return count
    place = place_of(s, serial, position)
    length = num_equal_before(tokens, position, s.own.tokens, end, MAX_MATCH_LENGTH)
    if length:
        weight = s.worth[NUM_LENGTHS * place + length]
    elif place in (NEAR, _EARLIER):
        weight = unmatched_weight(s, text.serial, position, s.num_lost)
    else:
        return count
    found = s.candidates[count]
    found.text, found.position, found.match, found.place = serial, position, length, place
    found.weight = weight
    return count + 1


@callee
def add_current(s: State) -> int:
    """Makes the copy under way the one candidate there is; returns 1."""
    length, found = min(s.length, MAX_MATCH_LENGTH), s.candidates[0]
    found.text, found.position, found.match, found.place = s.source, s.position, length, CURRENT
    found.weight = s.worth[NUM_LENGTHS * CURRENT + length]
    return 1


@callee
def _add_indexed(s: State, count: int, text: Text, end: int, limit: int) -> int:
    """Adds up to ``limit`` places of a text that are indexed under the last tokens."""
    own = s.own.tokens
    most = count + limit
    for level in range(NUM_LEVELS - 1, -1, -1):
        place = 0
        for _ in range(_MAX_OCCURRENCES):
            place = find(text, own, end, level, place)
            if place == 0 or count >= most:
                break
            count = _add(s, count, text, place, end)
    return count


@callee
def next_after(text: Text, token: int, start: int, end: int) -> int:
    """Returns the first place in ``start + 1 .. end`` that follows a ``token``; 0: there is none."""
    tokens = text.tokens
    for position in range(start, end):
        if tokens[position] == token:
            return position + 1
    return 0


@callee
def _add_near_ends(s: State, count: int, end: int) -> int:
    """Adds places near where copies broke off."""
    last = s.own.tokens[end - 1]
    for rank in range(s.num_ends):
        text, broke_off = text_of(s, s.ends[rank].text), s.ends[rank].position
        limit = end - 1 if text.serial == OWN_TEXT else text.num_tokens - 1
        limit = min(limit, broke_off + FAR_AHEAD_TOKENS)
        place = broke_off
        for _ in range(_MAX_OCCURRENCES_AHEAD):
            place = next_after(text, last, place, limit)
            if place == 0:
                break
            count = _add(s, count, text, place, end)
        num_unmatched = NEAR_TOKENS + 1 if rank == 0 else 1
        for place in range(broke_off, min(broke_off + num_unmatched, limit + 1)):
            count = _add(s, count, text, place, end)
    return count


@callee
def find_candidates(s: State, end: int, limit: int) -> int:
    """Finds places to copy from, up to ``limit`` of each index and those near to where copies broke off;
    returns how many."""
    count = 0
    if s.is_trusted and s.position < text_of(s, s.source).num_tokens:
        count = add_current(s)
    count = _add_indexed(s, count, s.own, end, limit)
    count = _add_near_ends(s, count, end)
    if s.num_lost and s.copied_from:
        position = max(0, s.copied_from - INSTRUCTION_TOKENS)
        for _ in range(_MAX_INSTRUCTED):
            position = next_after(s.own, s.own.tokens[end - 1], position, s.copied_from)
            if position == 0:
                break
            count = _add(s, count, s.own, position, end)
    if not is_nowhere(s.young):
        count = _add_indexed(s, count, s.young, end, limit)
        count = _add_indexed(s, count, s.old, end, limit)
    return count
