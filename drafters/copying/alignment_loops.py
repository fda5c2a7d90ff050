"""Compiled: the copy under way, and where copies broke off."""

from __future__ import annotations

from compiled.loops import Loop, callee
from drafters.copying.candidate_loops import FEW_CANDIDATES, MAX_ENDS, find_candidates
from drafters.copying.correction_loops import (
    close_corrections,
    confirm,
    forget_gone,
    learn,
    text_of,
)
from drafters.copying.index_loops import forget, index
from drafters.copying.records import NO_TEXT, OWN_TEXT, State

TRUSTED_LENGTH = 6
SETTLED_LENGTH = 16
_ENDS_APART = 16
_INDEXED_BEFORE_BREAK = 8
_FOLLOWED_TOKENS = 16
"""A piece of text that begins outside of any copy is followed for so many of its last tokens: what is
copied now shows in those."""
_FIRST_TOKENS = 8
"""An output that copies before it has more tokens began as a copy."""
_TOKENS_BEFORE = 3
"""A copy that more tokens of the prompt's end belong to goes on with the prompt."""


@callee
def _bound(s: State, end: int) -> None:
    if end - s.first_indexed > s.max_indexed:
        s.first_indexed = end - s.max_indexed // 2
        forget(s.own, s.first_indexed)


@callee
def index_up_to(s: State, end: int) -> None:
    """Indexes the text's tokens before ``end``, but for the inner part of a long copy."""
    _bound(s, end)
    own = s.own
    start = own.num_indexed
    if start >= s.num_prompt_tokens and end - start > 2 * _INDEXED_BEFORE_BREAK:
        start = end - _INDEXED_BEFORE_BREAK
    if end > start:
        index(own, start, end)


@callee
def is_settled(s: State) -> bool:
    """Whether a copy is under way that is too long for anything else to be likelier."""
    return (
        s.source != NO_TEXT
        and s.length >= SETTLED_LENGTH
        and s.position < text_of(s, s.source).num_tokens
    )


@callee
def _remember(s: State, end: int) -> None:
    """Keeps the end of a trusted copy, and of the last few before it that lie elsewhere."""
    if s.source == NO_TEXT or s.length < TRUSTED_LENGTH:
        return
    if not s.is_trusted:
        s.is_trusted, s.has_copied = 1, 1
        close_corrections(s, end)
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
    num_written = end - s.length - s.num_prompt_tokens
    is_first = s.copied_from == 0 and s.source == OWN_TEXT
    if is_first and -_TOKENS_BEFORE <= num_written <= _FIRST_TOKENS:
        s.copied_from = s.position - s.length - min(num_written, 0)


@callee
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


@callee
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
            confirm(s, position, position + num_same)
        s.position += num_same
        s.length += num_same
        _remember(s, position + num_same)
    if position + num_same == end:
        s.num_lost = 0 if s.is_trusted else s.num_lost + num_same
        return num_same
    was_trusted = s.is_trusted
    end = position + num_same
    if was_trusted and s.position < text_of(s, s.source).num_tokens:
        learn(s, end)
    s.source, s.length, s.is_trusted = NO_TEXT, 0, 0
    s.num_lost = 1 if was_trusted else s.num_lost + num_same + 1
    index_up_to(s, end + 1)
    return num_same + 1


@callee
def _walk_correction(s: State, position: int, end: int) -> int:
    """Walks a correction that was begun along the text's tokens ``position`` .. ``end - 1``; how many
    were dealt with. Where it is through, the copy goes on as if it had never broken off."""
    c, done = s.corrections[s.correcting], position - s.broke_end
    num_same = 0
    while (
        position + num_same < end
        and done + num_same < c.num_actual
        and s.own.tokens[c.actual_at + done + num_same] == s.own.tokens[position + num_same]
    ):
        num_same += 1
    s.num_lost += num_same
    if done + num_same == c.num_actual:
        s.source, s.position = s.broke_source, s.broke_position + c.num_original
        s.length = 0
        close_corrections(s, position + num_same)
        s.length, s.num_lost = min(s.broke_length, SETTLED_LENGTH - 1), 0
        _remember(s, position + num_same)
        index_up_to(s, position + num_same)
    elif position + num_same < end:
        s.correcting = -1
    return num_same


def _extend(s: State, end: int) -> None:
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
        if s.correcting >= 0:
            position += _walk_correction(s, position, end)
            continue
        if s.source == NO_TEXT and position > 0:
            take_best(s, find_candidates(s, position, FEW_CANDIDATES), position)
        position += _follow(s, position, end)
    if s.correcting >= 0:
        _walk_correction(s, end, end)
    if not is_settled(s):
        index_up_to(s, end)


extend_alignment = Loop(_extend)
