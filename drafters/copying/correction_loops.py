"""Compiled: what copies got wrong before, and what came instead.

An edit that renames something breaks a copy at every place of the name, each time in the same way. A
correction is known by the token of the original at which the copy broke off and the token before it, and
another by the first alone.
"""

from __future__ import annotations

from compiled.loops import callee
from compiled.records import is_nowhere
from drafters.copying.index_loops import num_equal_before
from drafters.copying.records import NO_TEXT, OWN_TEXT, State, Text

ANY_TOKEN = -1
MAX_CORRECTIONS = 256
_PROBED = 8
_LONGEST_CORRECTION = 16


@callee
def text_of(s: State, serial: int) -> Text:
    """Returns the text of that number; the request's own where it is gone."""
    if serial != OWN_TEXT:
        if not is_nowhere(s.young) and s.young.serial == serial:
            return s.young
        if not is_nowhere(s.old) and s.old.serial == serial:
            return s.old
    return s.own


@callee
def _is_gone(s: State, serial: int) -> bool:
    return text_of(s, serial).serial != serial


@callee
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
    if s.correcting >= 0 and _is_gone(s, s.broke_source):
        s.correcting = -1


@callee
def _probe(previous: int, original: int, probed: int) -> int:
    first = (previous * 0x2545F491 + original) * 0x1E3779B1 >> 12
    return (first + probed) & (MAX_CORRECTIONS - 1)


@callee
def find_correction(s: State, previous: int, original: int) -> int:
    """Returns which correction it is; -1: there is none."""
    for probed in range(_PROBED):
        at = _probe(previous, original, probed)
        known = s.corrections[at]
        if known.num_broken and known.original == original and known.previous == previous:
            return at
    return -1


@callee
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


@callee
def is_what_was_said(s: State, known: int, text: int, position: int) -> bool:
    """Whether a text has at ``position`` all that a correction is about."""
    c = s.corrections[known]
    there, other = text_of(s, text), text_of(s, c.original_text)
    if other.serial != c.original_text or position + c.num_original > there.num_tokens:
        return False
    end, other_end = position + c.num_original, c.original_at + c.num_original
    most = c.num_original
    return num_equal_before(there.tokens, end, other.tokens, other_end, most) == most


@callee
def _learn_after(s: State, previous: int, end: int) -> int:
    """The copy under way said something else than the text at ``end``, after ``previous``. Returns which
    correction it is."""
    at = _correction_for(s, previous, text_of(s, s.source).tokens[s.position])
    known = s.corrections[at]
    is_known = known.num_original >= 0 and s.own.tokens[known.actual_at] == s.own.tokens[end]
    known.num_broken += 1
    if not is_known:
        known.actual_at, known.num_actual = end, -1
        known.original_text, known.original_at, known.num_original = s.source, s.position, -1
    elif known.num_actual > 0 and is_what_was_said(s, at, s.source, s.position):
        s.correcting = at
    return at


@callee
def learn(s: State, end: int) -> None:
    """The copy under way said something else than the text at ``end``."""
    s.broke_source, s.broke_position, s.broke_length = s.source, s.position, s.length
    s.broke_end = end
    s.open_general = _learn_after(s, ANY_TOKEN, end)
    s.open_correction = _learn_after(s, s.own.tokens[end - 1], end)
    s.num_learnt += 1


@callee
def _close(s: State, at: int, end: int) -> None:
    if at < 0:
        return
    known = s.corrections[at]
    num_actual, num_original = end - s.broke_end, s.position - s.broke_position
    length = min(s.length, num_actual, num_original)
    num_actual -= length
    num_original -= length
    if length >= 0 and num_original <= _LONGEST_CORRECTION and num_actual <= _LONGEST_CORRECTION:
        known.actual_at, known.num_actual = s.broke_end, num_actual
        known.original_text, known.original_at = s.broke_source, s.broke_position
        known.num_original = num_original


@callee
def close_corrections(s: State, end: int) -> None:
    """A copy is trusted again: what lies between the two was put in place of what it left out."""
    if s.source == s.broke_source:
        _close(s, s.open_correction, end)
        _close(s, s.open_general, end)
    s.open_correction, s.open_general, s.correcting = -1, -1, -1


@callee
def confirm(s: State, start: int, end: int) -> None:
    """The copy said the text's tokens ``start`` .. ``end - 1``, and was right."""
    if s.num_learnt == 0:
        return
    own = s.own.tokens
    for position in range(start, end):
        for is_general in range(2):
            previous = ANY_TOKEN if is_general else own[position - 1]
            at = find_correction(s, previous, own[position])
            if at >= 0:
                s.corrections[at].num_right += 1
