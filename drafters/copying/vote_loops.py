"""Compiled: places that go on side by side and vote for every next token.

At each depth every place votes for what stands there, with a weight by what it is and how much agrees.
"""

from __future__ import annotations

from compiled.loops import callee
from compiled.records import is_nowhere
from drafters.copying.alignment_loops import TRUSTED_LENGTH
from drafters.copying.candidate_loops import (
    CURRENT,
    INSTRUCTION,
    NEAR,
    copies_prompt,
    next_after,
    place_of,
)
from drafters.copying.correction_loops import (
    ANY_TOKEN,
    find_correction,
    is_what_was_said,
    text_of,
)
from drafters.copying.index_loops import (
    NUM_LEVELS,
    find,
    num_equal_before,
)
from drafters.copying.records import (
    OWN_TEXT,
    Desk,
    State,
    Text,
    Voter,
)
from drafters.copying.weights import (
    DOUBT,
    FAR_AHEAD_TOKENS,
    LEADING,
    MAX_MATCH_LENGTH,
    NOTHING_COPYING,
    NOTHING_LOST,
    NUM_LENGTHS,
    RESUMED,
    RESUMING,
)

_MAX_AFTER_PATH = 8
_MAX_AHEAD_AFTER_PATH = 2
_MAX_ENDS_AFTER_PATH = 2
ROOM_FOR_JOINING = RESUMED + 3 * _MAX_AFTER_PATH + _MAX_ENDS_AFTER_PATH * _MAX_AHEAD_AFTER_PATH
MOST_VOTING = 128
"""At one node."""
LISTS_OF_NODE = 4 * (MOST_VOTING + 1)
_NEVER = 1 << 40
_NOWHERE = -1


# --- voters ---


@callee
def _where(s: State, serial: int, position: int, base: int) -> int:
    """Returns the position of what a run says that has come to ``position``; ``_NOWHERE``: it is over."""
    text = text_of(s, serial)
    count = text.num_tokens
    if position >= count:
        if serial != OWN_TEXT or base >= count:
            return _NOWHERE
        position = base + (position - base) % (count - base)
    return position if text.tokens[position] >= 0 else _NOWHERE


@callee
def _said(s: State, v: Voter, depth: int) -> tuple[int, int]:
    """Returns in which text and where in it a voter's token at this depth stands."""
    if depth < v.switch:
        return v.text, _where(s, v.text, v.start + depth, v.base)
    return v.next_text, _where(s, v.next_text, v.next_start + depth, v.next_base)


@callee
def add_voter(desk: Desk, text: int, position: int, depth: int, match: int, place: int) -> int:
    """Returns a voter for a place that takes part from ``depth`` on, where ``match`` tokens agree."""
    voter = desk.num_voters
    v = desk.voters[voter]
    v.text, v.start, v.base, v.switch = text, position - depth, position, _NEVER
    v.match, v.place, v.weight = match - depth, place, 0.0
    desk.num_voters = voter + 1
    return voter


@callee
def insert(desk: Desk, first: int, count: int, voter: int) -> int:
    """Inserts a voter into the list of ``count`` at ``first``, after voters with at least its match
    length; returns the new count."""
    lists, match = desk.lists, desk.voters[voter].match
    at = first + count
    while at > first and desk.voters[lists[at - 1]].match < match:
        lists[at] = lists[at - 1]
        at -= 1
    lists[at] = voter
    return count + 1


@callee
def copy_list(desk: Desk, first: int, count: int) -> int:
    """Returns where a copy of a list begins that may grow."""
    copy = desk.num_listed
    for each in range(count):
        desk.lists[copy + each] = desk.lists[first + each]
    desk.num_listed = copy + count
    return copy


@callee
def _weight_at(s: State, place: int, length: int, leads: bool) -> float:
    """Returns the weight of a place with which ``length`` tokens agree once those before the vote are
    accepted. The place that leads would then be copied from."""
    length = max(0, min(length, MAX_MATCH_LENGTH))
    weight = s.worth[NUM_LENGTHS * place + length]
    if leads and place != INSTRUCTION:
        weight = max(weight, s.worth[LEADING] * s.worth[NUM_LENGTHS * CURRENT + length])
    return weight


# --- children ---


@callee
def _corrected(s: State, desk: Desk, leader: int, depth: int, known: int) -> int:
    """Returns a voter for what a correction says in place of the leader's next tokens, and for how the
    leader goes on; -1: it is not about them."""
    v, c = desk.voters[leader], s.corrections[known]
    text, position = _said(s, v, depth)
    num_actual, num_original = c.num_actual, c.num_original
    if num_original < 0:
        num_actual, num_original = 1, 1
    elif not is_what_was_said(s, known, text, position):
        return -1
    goes_on = position + num_original
    if num_actual == 0 and _where(s, text, goes_on, goes_on) == _NOWHERE:
        return -1
    voter = add_voter(desk, OWN_TEXT, c.actual_at, depth, v.match + depth, CURRENT)
    new = desk.voters[voter]
    new.switch, new.next_text = depth + num_actual, text
    new.next_start, new.next_base = goes_on - depth - num_actual, goes_on
    return voter


@callee
def _correct(s: State, desk: Desk, count: int, depth: int, previous: int, least: float) -> int:
    """Shares what the leader's token has with what came instead of it before, where that is as likely as
    ``least``; returns how many children there are."""
    children = desk.children
    leader = desk.lists[children[0].first]
    v = desk.voters[leader]
    if v.match + depth < TRUSTED_LENGTH or depth < v.switch < _NEVER:
        return count
    voter, share = -1, 0.0
    for is_general in range(2):
        known = find_correction(s, ANY_TOKEN if is_general else previous, children[0].token)
        if known >= 0 and voter < 0:
            c = s.corrections[known]
            share = c.num_broken / (c.num_broken + c.num_right + s.worth[DOUBT + is_general])
            if share >= least:
                voter = _corrected(s, desk, leader, depth, known)
    if voter < 0:
        return count
    text, position = _said(s, desk.voters[voter], depth)
    token = text_of(s, text).tokens[position]
    moved = children[0].weight * share
    children[0].weight -= moved
    child = 0
    while child < count and children[child].token != token:
        child += 1
    to = children[child]
    if child == count:
        to.token, to.first, to.count, to.weight = token, desk.num_listed, 0, 0.0
    to.first = copy_list(desk, to.first, to.count)
    to.count = insert(desk, to.first, to.count, voter)
    desk.num_listed += 1
    to.weight += moved
    return max(count, child + 1)


@callee
def _vote(s: State, desk: Desk, first: int, count: int, depth: int) -> tuple[int, float]:
    """Finds the tokens that the listed voters vote for, the longest match's first; returns how many there
    are and the sum of all weights."""
    lists, children = desk.lists, desk.children
    is_copying = s.num_lost == 0 and s.has_copied != 0
    total = s.worth[NOTHING_COPYING if is_copying else NOTHING_LOST]
    num_children, leads = 0, True
    # Behind the lists is noted which child each voter is for.
    chosen = desk.num_listed
    for each in range(count):
        v = desk.voters[lists[first + each]]
        text, position = _said(s, v, depth)
        lists[chosen + each] = -1
        if position == _NOWHERE:
            continue
        weight = v.weight
        if depth > 0 and v.match + depth > 0:
            weight = _weight_at(s, v.place, v.match + depth, leads)
        token = text_of(s, text).tokens[position]
        child = 0
        while child < num_children and children[child].token != token:
            child += 1
        c = children[child]
        if child == num_children:
            c.token, c.count, c.weight = token, 0, 0.0
            num_children += 1
        c.weight += weight
        c.count += 1
        lists[chosen + each] = child
        total += weight
        leads = False
    written = chosen + count
    for child in range(num_children):
        children[child].first = written
        for each in range(count):
            if lists[chosen + each] == child:
                lists[written] = lists[first + each]
                written += 1
    desk.num_listed = written
    return num_children, total


@callee
def _rank(desk: Desk, count: int) -> None:
    """Sorts the children, most votes first."""
    children = desk.children
    for child in range(1, count):
        c = children[child]
        token, first, num_voters, weight = c.token, c.first, c.count, c.weight
        at = child
        while at > 0 and children[at - 1].weight < weight:
            c, before = children[at], children[at - 1]
            c.token, c.first = before.token, before.first
            c.count, c.weight = before.count, before.weight
            at -= 1
        c = children[at]
        c.token, c.first, c.count, c.weight = token, first, num_voters, weight


@callee
def find_children(
    s: State, desk: Desk, first: int, count: int, depth: int, previous: int, least: float
) -> tuple[int, float]:
    """Finds the tokens that may come after ``previous``, most votes first; returns how many there are and
    the sum of all weights."""
    num_children, total = _vote(s, desk, first, count, depth)
    if num_children and s.num_learnt and count < MOST_VOTING:
        num_children = _correct(s, desk, num_children, depth, previous, least)
    _rank(desk, num_children)
    return num_children, total


# --- joining ---


@callee
def _join_place(
    s: State, desk: Desk, first: int, count: int, text: Text, position: int, depth: int
) -> int:
    """Appends a place to a list, unless it is there; returns how many there are."""
    end, serial = MAX_MATCH_LENGTH + depth, text.serial
    if position >= text.num_tokens:
        return count
    for each in range(count):
        v = desk.voters[desk.lists[first + each]]
        is_next = depth >= v.switch
        other, start = (v.next_text, v.next_start) if is_next else (v.text, v.start)
        if other == serial and start + depth == position:
            return count
    length = num_equal_before(text.tokens, position, desk.ending, end, MAX_MATCH_LENGTH)
    if length == 0:
        return count
    place = place_of(s, serial, position)
    desk.lists[first + count] = add_voter(desk, serial, position, depth, length, place)
    return count + 1


@callee
def _join_indexed(
    s: State, desk: Desk, first: int, count: int, text: Text, depth: int, limit: int
) -> int:
    """Appends up to ``limit`` places of a text that are indexed under the path's last tokens."""
    most = count + limit
    for level in range(NUM_LEVELS - 1, -1, -1):
        position = 0
        for _ in range(_MAX_AFTER_PATH):
            position = find(text, desk.ending, MAX_MATCH_LENGTH + depth, level, position)
            if position == 0 or count >= most:
                break
            count = _join_place(s, desk, first, count, text, position, depth)
    return count


@callee
def _resume(s: State, desk: Desk, first: int, count: int, depth: int) -> int:
    """Appends the places where copying broke off to a list, unless they lead it; returns how many there
    are."""
    broke = s.ends[0]
    leader = desk.voters[desk.lists[first]]
    if leader.place in (CURRENT, NEAR):
        return count
    least = _weight_at(s, leader.place, leader.match + depth, True)
    for position in range(broke.position, broke.position + RESUMED):
        voter = add_voter(desk, broke.text, position, depth, 0, NEAR)
        desk.voters[voter].weight = s.worth[RESUMING + position - broke.position] * least
        desk.lists[first + count] = voter
        count += 1
    return count


@callee
def join(s: State, desk: Desk, first: int, count: int, depth: int) -> int:
    """Adds to a list of voters the places in the text that the path in ``ending`` leads to; returns how
    many there are."""
    own, end, num_before = s.own, MAX_MATCH_LENGTH + depth, count
    count = _join_indexed(s, desk, first, count, own, depth, _MAX_AFTER_PATH)
    if not is_nowhere(s.young) and not copies_prompt(s):
        count = _join_indexed(s, desk, first, count, s.young, depth, _MAX_AFTER_PATH)
        count = _join_indexed(s, desk, first, count, s.old, depth, _MAX_AFTER_PATH)
    for rank in range(min(s.num_ends, _MAX_ENDS_AFTER_PATH)):
        if s.ends[rank].text != OWN_TEXT:
            continue
        position = s.ends[rank].position
        limit = min(own.num_tokens - 1, position + FAR_AHEAD_TOKENS)
        for _ in range(_MAX_AHEAD_AFTER_PATH):
            position = next_after(own, desk.ending[end - 1], position, limit)
            if position == 0:
                break
            count = _join_place(s, desk, first, count, own, position, depth)
    if count and s.num_lost and s.num_ends and s.correcting < 0 and s.worth[RESUMING] > 0.0:
        count = _resume(s, desk, first, count, depth)
    for each in range(num_before, count):
        insert(desk, first, each, desk.lists[first + each])
    return count
