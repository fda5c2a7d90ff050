"""Compiled: the copy under way, where copies broke off, where they may go on, what they got wrong.

Texts are named by their serial numbers: ``OWN_TEXT`` is the request's, the others are those of its
tenant's history, and may go while it is open.
"""

from __future__ import annotations

from typing import Protocol

from numba import njit

from drafters.compiled import Floats, Loop, Many, is_nowhere
from drafters.copying.index_loops import NUM_LEVELS, Text, find, forget, index, num_equal_before
from drafters.copying.weights import (
    AHEAD_TOKENS,
    BEHIND_TOKENS,
    EARLIER_TOKENS,
    FAR_AHEAD_TOKENS,
    MAX_MATCH_LENGTH,
    NEAR_TOKENS,
    NUM_LENGTHS,
    UNMATCHED,
    UNMATCHED_SINCE,
    Place,
)

OWN_TEXT, NO_TEXT = 0, -1
CURRENT, _NEAR, _AHEAD, _FAR_AHEAD, _BEHIND, _EARLIER, _PROMPT, _OUTPUT, _HISTORY = map(int, Place)

TRUSTED_LENGTH = 6
SETTLED_LENGTH = 16
MAX_ENDS = 4
_ENDS_APART = 16
_MAX_OCCURRENCES = 8
_MAX_OCCURRENCES_AHEAD = 4
_INDEXED_BEFORE_BREAK = 8
_FOLLOWED_TOKENS = 16
"""A piece of text that begins outside of any copy is followed for so many of its last tokens: what is
copied now shows in those."""
FEW_CANDIDATES = 4

MAX_CANDIDATES = 16
ROOM_FOR_CANDIDATES = 1 + 3 * MAX_CANDIDATES + MAX_ENDS * (_MAX_OCCURRENCES_AHEAD + NEAR_TOKENS + 1)

MAX_CORRECTIONS = 256
_PROBED = 8
_LONGEST_CORRECTION = 16


class Candidate(Protocol):
    """The continuation at a position of a text; ``match`` tokens before it agree. ``place`` is a
    ``Place``."""

    text: int
    position: int
    match: int
    place: int
    weight: float


class End(Protocol):
    """A place where a copy broke off."""

    text: int
    position: int


class Correction(Protocol):
    """A mistake of copies so far: after the token ``previous`` they said ``original``, and the text
    the ``num_actual`` tokens at ``actual_at`` in place of the ``num_original`` at ``original_at`` of
    another. Both numbers are -1 while nobody knows where copying went on.

    ``num_broken``: how often a copy broke off there, 0 where this is free; ``num_right``: how often it
    did not after the first time.
    """

    previous: int
    original: int
    actual_at: int
    num_actual: int
    original_text: int
    original_at: int
    num_original: int
    num_broken: int
    num_right: int


class State(Protocol):
    """A request. ``young`` and ``old`` may be nowhere; ``worth`` is ``weights.WORTH``.

    The text ends with the ``length`` tokens before ``position`` of the text ``source``, or nothing is
    copied, and ``source`` is ``NO_TEXT``. ``num_lost``: tokens since a trusted copy broke off, 0 while
    there is one. ``ends``: where trusted copies broke off, the newest first. ``open_correction``: the one
    whose end is not known, -1: there is none.
    """

    own: Text
    young: Text
    old: Text
    worth: Floats
    ends: Many[End]
    candidates: Many[Candidate]
    corrections: Many[Correction]
    source: int
    position: int
    length: int
    is_trusted: int
    has_copied: int
    num_lost: int
    num_ends: int
    num_learnt: int
    open_correction: int
    num_prompt_tokens: int
    first_indexed: int
    max_indexed: int


# --- texts ---


@njit
def text_of(s: State, serial: int) -> Text:
    """Returns the text of that number; the request's own where it is gone."""
    if serial != OWN_TEXT:
        if not is_nowhere(s.young) and s.young.serial == serial:
            return s.young
        if not is_nowhere(s.old) and s.old.serial == serial:
            return s.old
    return s.own


@njit
def _is_gone(s: State, serial: int) -> bool:
    return text_of(s, serial).serial != serial


@njit
def forget_gone(s: State) -> None:
    """Forgets places in texts that are gone."""
    if s.source != NO_TEXT and _is_gone(s, s.source):
        s.source, s.length, s.is_trusted = NO_TEXT, 0, 0
    count = 0
    for rank in range(s.num_ends):
        serial, position = s.ends[rank].text, s.ends[rank].position
        if not _is_gone(s, serial):
            s.ends[count].text, s.ends[count].position = serial, position
            count += 1
    s.num_ends = count


# --- corrections ---


@njit
def _probe(previous: int, original: int, probed: int) -> int:
    first = (previous * 0x2545F491 + original) * 0x1E3779B1 >> 12
    return (first + probed) & (MAX_CORRECTIONS - 1)


@njit
def find_correction(s: State, previous: int, original: int) -> int:
    """Returns which correction it is; -1: there is none."""
    for probed in range(_PROBED):
        at = _probe(previous, original, probed)
        known = s.corrections[at]
        if known.num_broken and known.original == original and known.previous == previous:
            return at
    return -1


@njit
def _correction_for(s: State, previous: int, original: int) -> int:
    """Returns which correction it is, a new one where there is none; the one that broke least of those it
    may stand in place of makes room."""
    found = find_correction(s, previous, original)
    if found >= 0:
        return found
    best = _probe(previous, original, 0)
    for probed in range(1, _PROBED):
        at = _probe(previous, original, probed)
        if s.corrections[at].num_broken < s.corrections[best].num_broken:
            best = at
    new = s.corrections[best]
    new.previous, new.original, new.num_broken, new.num_right = previous, original, 0, 0
    return best


@njit
def _learn(s: State, end: int) -> None:
    """The copy under way said something else than the text at ``end``."""
    original = text_of(s, s.source).tokens[s.position]
    at = _correction_for(s, s.own.tokens[end - 1], original)
    known = s.corrections[at]
    known.num_broken += 1
    known.actual_at, known.num_actual = end, -1
    known.original_text, known.original_at, known.num_original = s.source, s.position, -1
    s.open_correction = at
    s.num_learnt += 1


@njit
def _close_correction(s: State, end: int) -> None:
    """A copy is trusted again: what lies between the two was put in place of what it left out."""
    at = s.open_correction
    s.open_correction = -1
    if at < 0 or s.corrections[at].original_text != s.source:
        return
    known = s.corrections[at]
    num_actual, num_original = end - known.actual_at, s.position - known.original_at
    length = min(s.length, num_actual, num_original)
    num_actual -= length
    num_original -= length
    if length >= 0 and num_original <= _LONGEST_CORRECTION and num_actual <= _LONGEST_CORRECTION:
        known.num_actual, known.num_original = num_actual, num_original


@njit
def _confirm(s: State, start: int, end: int) -> None:
    """The copy said the text's tokens ``start`` .. ``end - 1``, and was right."""
    if s.num_learnt == 0:
        return
    for position in range(start, end):
        at = find_correction(s, s.own.tokens[position - 1], s.own.tokens[position])
        if at >= 0:
            s.corrections[at].num_right += 1


# --- the copy under way ---


@njit
def _bound(s: State, end: int) -> None:
    if end - s.first_indexed > s.max_indexed:
        s.first_indexed = end - s.max_indexed // 2
        forget(s.own, s.first_indexed)


@njit
def index_up_to(s: State, end: int) -> None:
    """Indexes the text's tokens before ``end``, but for the inner part of a long copy."""
    _bound(s, end)
    own = s.own
    start = own.num_indexed
    if start >= s.num_prompt_tokens and end - start > 2 * _INDEXED_BEFORE_BREAK:
        start = end - _INDEXED_BEFORE_BREAK
    if end > start:
        index(own, start, end)


@njit
def is_settled(s: State) -> bool:
    """Whether a copy is under way that is too long for anything else to be likelier."""
    return (
        s.source != NO_TEXT
        and s.length >= SETTLED_LENGTH
        and s.position < text_of(s, s.source).num_tokens
    )


@njit
def _remember(s: State, end: int) -> None:
    """Keeps the end of a trusted copy, and of the last few before it that lie elsewhere."""
    if s.source == NO_TEXT or s.length < TRUSTED_LENGTH:
        return
    if not s.is_trusted:
        s.is_trusted, s.has_copied = 1, 1
        _close_correction(s, end)
        count = 0
        for rank in range(s.num_ends):
            serial, position = s.ends[rank].text, s.ends[rank].position
            if serial != s.source or abs(position - s.position) > _ENDS_APART:
                s.ends[count].text, s.ends[count].position = serial, position
                count += 1
        count = min(count, MAX_ENDS - 1)
        for rank in range(count, 0, -1):
            s.ends[rank].text = s.ends[rank - 1].text
            s.ends[rank].position = s.ends[rank - 1].position
        s.num_ends = count + 1
    s.ends[0].text, s.ends[0].position = s.source, s.position


@njit
def take_best(s: State, count: int, end: int) -> None:
    """Copies from the likeliest of the first ``count`` candidates from now on."""
    best = 0
    for each in range(1, count):
        if s.candidates[each].weight > s.candidates[best].weight:
            best = each
    found = s.candidates[best]
    if count == 0 or found.match == 0:
        return
    s.source, s.position, s.length = found.text, found.position, found.match
    _remember(s, end)
    if s.is_trusted:
        s.num_lost = 0


@njit
def _follow(s: State, position: int, end: int) -> int:
    """Walks the copy along the text's tokens ``position`` .. ``end - 1``; how many were dealt with."""
    own = s.own.tokens
    num_same = 0
    if s.source != NO_TEXT:
        source = text_of(s, s.source)
        tokens = source.tokens
        limit = min(end - position, source.num_tokens - s.position)
        while num_same < limit and tokens[s.position + num_same] == own[position + num_same]:
            num_same += 1
        if s.is_trusted and num_same:
            _confirm(s, position, position + num_same)
        s.position += num_same
        s.length += num_same
        _remember(s, position + num_same)
    if position + num_same == end:
        s.num_lost = 0 if s.is_trusted else s.num_lost + num_same
        return num_same
    was_trusted = s.is_trusted
    end = position + num_same
    if was_trusted and s.position < text_of(s, s.source).num_tokens:
        _learn(s, end)
    s.source, s.length, s.is_trusted = NO_TEXT, 0, 0
    s.num_lost = 1 if was_trusted else s.num_lost + num_same + 1
    index_up_to(s, end + 1)
    return num_same + 1


def _extend(s: State, end: int) -> int:
    """Follows the tokens of the text from ``NUM_TOKENS`` up to ``end``."""
    forget_gone(s)
    own = s.own
    position = own.num_tokens
    if own.num_indexed < s.num_prompt_tokens:
        _bound(s, position)
        if own.num_indexed < position:
            index(own, own.num_indexed, position)
    own.num_tokens = end
    if s.source == NO_TEXT and end - position > _FOLLOWED_TOKENS:
        # Nobody asks any more about what comes before.
        s.num_lost += end - _FOLLOWED_TOKENS - position
        position = end - _FOLLOWED_TOKENS
        _bound(s, position)
        if position > own.num_indexed:
            index(own, own.num_indexed, position)
    while position < end:
        if s.source == NO_TEXT and position > 0:
            take_best(s, find_candidates(s, position, FEW_CANDIDATES), position)
        position += _follow(s, position, end)
    if not is_settled(s):
        index_up_to(s, end)
    return 0


# --- where it may go on ---


@njit
def place_of(s: State, serial: int, position: int) -> int:
    ahead = FAR_AHEAD_TOKENS + 1
    if s.num_ends and s.ends[0].text == serial:
        ahead = position - s.ends[0].position
        if 0 <= ahead <= AHEAD_TOKENS:
            return _NEAR if ahead <= NEAR_TOKENS else _AHEAD
    for rank in range(1, s.num_ends):
        since = position - s.ends[rank].position
        if s.ends[rank].text == serial and 0 <= since <= EARLIER_TOKENS:
            return _EARLIER
    if -BEHIND_TOKENS <= ahead <= FAR_AHEAD_TOKENS:
        return _BEHIND if ahead < 0 else _FAR_AHEAD
    if serial != OWN_TEXT:
        return _HISTORY
    return _PROMPT if position < s.num_prompt_tokens else _OUTPUT


@njit
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
    elif place in (_NEAR, _EARLIER):
        weight = s.worth[UNMATCHED + (1 if s.num_lost > UNMATCHED_SINCE else 0)]
    else:
        return count
    found = s.candidates[count]
    found.text, found.position, found.match, found.place = serial, position, length, place
    found.weight = weight
    return count + 1


@njit
def add_current(s: State) -> int:
    """Makes the copy under way the one candidate there is; returns 1."""
    length, found = min(s.length, MAX_MATCH_LENGTH), s.candidates[0]
    found.text, found.position, found.match, found.place = s.source, s.position, length, CURRENT
    found.weight = s.worth[NUM_LENGTHS * CURRENT + length]
    return 1


@njit
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


@njit
def next_after(text: Text, token: int, start: int, end: int) -> int:
    """Returns the first place in ``start + 1 .. end`` that follows a ``token``; 0: there is none."""
    tokens = text.tokens
    for position in range(start, end):
        if tokens[position] == token:
            return position + 1
    return 0


@njit
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


@njit
def find_candidates(s: State, end: int, limit: int) -> int:
    """Finds places to copy from, up to ``limit`` of each index and those near to where copies broke off;
    returns how many."""
    count = 0
    if s.is_trusted and s.position < text_of(s, s.source).num_tokens:
        count = add_current(s)
    count = _add_indexed(s, count, s.own, end, limit)
    count = _add_near_ends(s, count, end)
    if not is_nowhere(s.young):
        count = _add_indexed(s, count, s.young, end, limit)
        count = _add_indexed(s, count, s.old, end, limit)
    return count


extend_alignment = Loop(_extend, State, int)
