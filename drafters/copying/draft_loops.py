"""Compiled: a draft of places that go on side by side and vote for every next token.

At each depth every place votes for what stands there; those that agree with the path go on. Where a node
is likely enough and what leads to it agrees on little, the text is searched again for the path's ending,
so that a draft may change from one place to another.
"""

from __future__ import annotations

from typing import Protocol

from numba import njit

from drafters.compiled import Integers, Loop, Many, Tokens
from drafters.copying.alignment_loops import (
    CURRENT,
    FEW_CANDIDATES,
    MAX_CANDIDATES,
    OWN_TEXT,
    SETTLED_LENGTH,
    TRUSTED_LENGTH,
    State,
    add_current,
    find_candidates,
    find_correction,
    forget_gone,
    is_settled,
    next_after,
    place_of,
    take_best,
    text_of,
)
from drafters.copying.index_loops import NUM_LEVELS, find, num_equal_before
from drafters.copying.weights import (
    CORRECTION,
    FAR_AHEAD_TOKENS,
    JOINING,
    LEADING,
    MAX_MATCH_LENGTH,
    NOTHING,
    NUM_LENGTHS,
)

_MAX_AFTER_PATH = 8
_MAX_AHEAD_AFTER_PATH = 2
_MAX_ENDS_AFTER_PATH = 2
ROOM_FOR_JOINING = _MAX_AFTER_PATH + _MAX_ENDS_AFTER_PATH * _MAX_AHEAD_AFTER_PATH
MOST_VOTING = 128
"""At one node."""
LISTS_OF_NODE = 4 * (MOST_VOTING + 1)
_NEVER = 1 << 40
_NOWHERE = -1

NUM_SHARES, NUM_RANKS = 5, 3


class Voter(Protocol):
    """A place: at depth d it says what stands at ``start + d`` of ``text``, and from depth ``switch`` on
    what stands at ``next_start + d`` of ``next_text``.

    ``match + d`` tokens before that agree. A run in the request's own text repeats itself past the text's
    end, from ``base``, where it began. ``weight``: of its vote at depth 0.
    """

    text: int
    start: int
    base: int
    switch: int
    next_text: int
    next_start: int
    next_base: int
    match: int
    place: int
    weight: float


class Child(Protocol):
    """A token that is voted for: the sum of its votes, and its ``count`` voters from ``first`` on in
    ``Desk.lists``, the longest match first."""

    token: int
    first: int
    count: int
    weight: float


class Branch(Protocol):
    """A node that may come into the tree, with its voters; ``weight`` is its survival."""

    parent: int
    token: int
    feature: int
    depth: int
    first: int
    count: int
    weight: float


class Node(Protocol):
    token: int
    parent: int
    feature: int
    place: int


class Desk(Protocol):
    """Room to draft in. ``ending``: the text's last tokens and a path; ``drafted``: token, parent and
    feature of each node."""

    voters: Many[Voter]
    lists: Integers
    children: Many[Child]
    branches: Many[Branch]
    heap: Integers
    nodes: Many[Node]
    ending: Tokens
    drafted: Tokens
    num_voters: int
    num_listed: int
    num_branches: int


@njit
def feature_of(match_length: int, share: float, rank: int) -> int:
    """Returns the bucket of (length of the match before the node, its share of the votes, its rank among
    siblings): 0..59."""
    length_bucket = (match_length >= 3) + (match_length >= 8) + (match_length >= 32)
    share_bucket = (share >= 0.1) + (share >= 0.3) + (share >= 0.6) + (share >= 0.9)
    return (length_bucket * NUM_SHARES + share_bucket) * NUM_RANKS + min(rank, NUM_RANKS - 1)


# --- voters ---


@njit
def _where(s: State, serial: int, position: int, base: int) -> int:
    """Returns the position of what a run says that has come to ``position``; ``_NOWHERE``: it is over."""
    text = text_of(s, serial)
    count = text.num_tokens
    if position >= count:
        if serial != OWN_TEXT or base >= count:
            return _NOWHERE
        position = base + (position - base) % (count - base)
    return position if text.tokens[position] >= 0 else _NOWHERE


@njit
def _said(s: State, v: Voter, depth: int) -> tuple[int, int]:
    """Returns in which text and where in it a voter's token at this depth stands."""
    if depth < v.switch:
        return v.text, _where(s, v.text, v.start + depth, v.base)
    return v.next_text, _where(s, v.next_text, v.next_start + depth, v.next_base)


@njit
def _add_voter(desk: Desk, text: int, position: int, depth: int, match: int, place: int) -> int:
    """Returns a voter for a place that takes part from ``depth`` on, where ``match`` tokens agree."""
    voter = desk.num_voters
    v = desk.voters[voter]
    v.text, v.start, v.base, v.switch = text, position - depth, position, _NEVER
    v.match, v.place, v.weight = match - depth, place, 0.0
    desk.num_voters = voter + 1
    return voter


@njit
def _insert(desk: Desk, first: int, count: int, voter: int) -> int:
    """Puts a voter into the list of ``count`` at ``first``, behind those that match no less; returns how
    many there are."""
    lists, match = desk.lists, desk.voters[voter].match
    at = first + count
    while at > first and desk.voters[lists[at - 1]].match < match:
        lists[at] = lists[at - 1]
        at -= 1
    lists[at] = voter
    return count + 1


@njit
def _copy_list(desk: Desk, first: int, count: int) -> int:
    """Returns where a copy of a list begins that may grow."""
    copy = desk.num_listed
    for each in range(count):
        desk.lists[copy + each] = desk.lists[first + each]
    desk.num_listed = copy + count
    return copy


@njit
def _weight_at(s: State, place: int, length: int, leads: bool) -> float:
    """Returns the weight of a place with which ``length`` tokens agree once those before the vote are
    accepted. The place that leads would then be copied from."""
    length = max(0, min(length, MAX_MATCH_LENGTH))
    weight = s.worth[NUM_LENGTHS * place + length]
    if leads:
        weight = max(weight, s.worth[LEADING] * s.worth[NUM_LENGTHS * CURRENT + length])
    return weight


# --- children ---


@njit
def _is_what_was_said(s: State, known: int, text: int, position: int) -> bool:
    """Whether a text has at ``position`` all that a correction is about."""
    c = s.corrections[known]
    there, other = text_of(s, text), text_of(s, c.original_text)
    if other.serial != c.original_text or position + c.num_original > there.num_tokens:
        return False
    end, other_end = position + c.num_original, c.original_at + c.num_original
    most = c.num_original
    return num_equal_before(there.tokens, end, other.tokens, other_end, most) == most


@njit
def _corrected(s: State, desk: Desk, leader: int, depth: int, known: int) -> int:
    """Returns a voter for what a correction says in place of the leader's next tokens, and for how the
    leader goes on; -1: it is not about them."""
    v, c = desk.voters[leader], s.corrections[known]
    text, position = _said(s, v, depth)
    num_actual, num_original = c.num_actual, c.num_original
    if num_original < 0:
        num_actual, num_original = 1, 1
    elif not _is_what_was_said(s, known, text, position):
        return -1
    goes_on = position + num_original
    if num_actual == 0 and _where(s, text, goes_on, goes_on) == _NOWHERE:
        return -1
    voter = _add_voter(desk, OWN_TEXT, c.actual_at, depth, v.match + depth, CURRENT)
    new = desk.voters[voter]
    new.switch, new.next_text = depth + num_actual, text
    new.next_start, new.next_base = goes_on - depth - num_actual, goes_on
    return voter


@njit
def _correct(s: State, desk: Desk, count: int, depth: int, previous: int, least: float) -> int:
    """Shares what the leader's token has with what came instead of it before, where that is as likely as
    ``least``; returns how many children there are."""
    children = desk.children
    leader = desk.lists[children[0].first]
    v = desk.voters[leader]
    if v.match + depth < TRUSTED_LENGTH or depth < v.switch < _NEVER:
        return count
    known = find_correction(s, previous, children[0].token)
    if known < 0:
        return count
    num_broken, num_right = s.corrections[known].num_broken, s.corrections[known].num_right
    share = num_broken / (num_broken + num_right + 1.0)
    voter = _corrected(s, desk, leader, depth, known) if share >= least else -1
    if voter < 0:
        return count
    text, position = _said(s, desk.voters[voter], depth)
    token = text_of(s, text).tokens[position]
    moved = children[0].weight * share
    children[0].weight -= moved
    child = 0
    while child < count and children[child].token != token:
        child += 1
    c = children[child]
    if child == count:
        c.token, c.first, c.count, c.weight = token, desk.num_listed, 0, 0.0
    c.first = _copy_list(desk, c.first, c.count)
    c.count = _insert(desk, c.first, c.count, voter)
    desk.num_listed += 1
    c.weight += moved
    return max(count, child + 1)


@njit
def _vote(s: State, desk: Desk, first: int, count: int, depth: int) -> tuple[int, float]:
    """Finds the tokens that the listed voters vote for, the longest match's first; returns how many there
    are and the sum of all weights."""
    lists, children = desk.lists, desk.children
    is_copying = s.num_lost == 0 and s.has_copied != 0
    total = s.worth[NOTHING + (0 if is_copying else 1)]
    num_children, leads = 0, True
    # Behind the lists is noted which child each voter is for.
    chosen = desk.num_listed
    for each in range(count):
        v = desk.voters[lists[first + each]]
        text, position = _said(s, v, depth)
        lists[chosen + each] = -1
        if position == _NOWHERE:
            continue
        weight = v.weight if depth == 0 else _weight_at(s, v.place, v.match + depth, leads)
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


@njit
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


@njit
def _find_children(
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


@njit
def _join_place(s: State, desk: Desk, first: int, count: int, position: int, depth: int) -> int:
    """Appends a place in the request's text to a list, unless it is there; returns how many there are."""
    own, end = s.own, MAX_MATCH_LENGTH + depth
    if position >= own.num_tokens:
        return count
    for each in range(count):
        v = desk.voters[desk.lists[first + each]]
        is_next = depth >= v.switch
        text, start = (v.next_text, v.next_start) if is_next else (v.text, v.start)
        if text == OWN_TEXT and start + depth == position:
            return count
    length = num_equal_before(own.tokens, position, desk.ending, end, MAX_MATCH_LENGTH)
    if length == 0:
        return count
    place = place_of(s, OWN_TEXT, position)
    desk.lists[first + count] = _add_voter(desk, OWN_TEXT, position, depth, length, place)
    return count + 1


@njit
def _join(s: State, desk: Desk, first: int, count: int, depth: int) -> int:
    """Adds to a list of voters the places in the text that the path in ``ending`` leads to; returns how
    many there are."""
    own, end, num_before = s.own, MAX_MATCH_LENGTH + depth, count
    for level in range(NUM_LEVELS - 1, -1, -1):
        position = 0
        for _ in range(_MAX_AFTER_PATH):
            position = find(own, desk.ending, end, level, position)
            if position == 0 or count - num_before >= _MAX_AFTER_PATH:
                break
            count = _join_place(s, desk, first, count, position, depth)
    for rank in range(min(s.num_ends, _MAX_ENDS_AFTER_PATH)):
        if s.ends[rank].text != OWN_TEXT:
            continue
        position = s.ends[rank].position
        limit = min(own.num_tokens - 1, position + FAR_AHEAD_TOKENS)
        for _ in range(_MAX_AHEAD_AFTER_PATH):
            position = next_after(own, desk.ending[end - 1], position, limit)
            if position == 0:
                break
            count = _join_place(s, desk, first, count, position, depth)
    for each in range(num_before, count):
        _insert(desk, first, each, desk.lists[first + each])
    return count


# --- drafts ---


@njit
def _begin(s: State, desk: Desk, is_chain: bool, max_nodes: int, max_depth: int) -> int:
    """Lists voters for the candidates; returns how many there are."""
    desk.num_voters, desk.num_listed, desk.num_branches = 0, 0, 0
    end = s.own.num_tokens
    if end == 0:
        return 0
    if is_settled(s) and (is_chain or max_depth == max_nodes):
        # In the midst of a long copy only what it got wrong before is worth a node.
        count = add_current(s)
    else:
        count = find_candidates(s, end, FEW_CANDIDATES if is_chain else MAX_CANDIDATES)
        if not s.is_trusted:
            take_best(s, count, end)
    for each in range(count):
        c = s.candidates[each]
        voter = _add_voter(desk, c.text, c.position, 0, c.match, c.place)
        desk.voters[voter].weight = c.weight
        _insert(desk, 0, each, voter)
    desk.num_listed = count
    return count


@njit
def _put(desk: Desk, node: int, token: int, parent: int, feature: int) -> None:
    at, drafted = 3 * node, desk.drafted
    drafted[at], drafted[at + 1], drafted[at + 2] = token, parent, feature


@njit
def _chain(s: State, desk: Desk, count: int, max_depth: int) -> int:
    """Drafts at each depth the token with most votes; returns how many nodes. Nothing joins: it would
    seldom win."""
    previous = s.own.tokens[s.own.num_tokens - 1]
    first, depth, best = 0, 0, desk.children[0]
    while depth < max_depth:
        num_children, total = _find_children(
            s, desk, first, count, depth, previous, s.worth[CORRECTION]
        )
        if num_children == 0:
            break
        previous, count = best.token, best.count
        match = desk.voters[desk.lists[best.first]].match + depth
        _put(desk, depth, previous, depth - 1, feature_of(match, best.weight / total, 0))
        depth += 1
        # What was listed before is not needed any more.
        desk.num_listed = 0
        first = _copy_list(desk, best.first, count)
    return depth


@njit
def _comes_before(desk: Desk, one: int, other: int) -> bool:
    weight, other_weight = desk.branches[one].weight, desk.branches[other].weight
    return weight > other_weight or (weight == other_weight and one < other)


@njit
def _push(desk: Desk, branch: int) -> None:
    """Puts a branch onto the heap, which begins with how many there are."""
    heap = desk.heap
    heap[0] += 1
    at = heap[0]
    while at > 1 and _comes_before(desk, branch, heap[at >> 1]):
        heap[at] = heap[at >> 1]
        at >>= 1
    heap[at] = branch


@njit
def _pop(desk: Desk) -> int:
    """Takes the likeliest branch from the heap, the first found among equals."""
    heap = desk.heap
    best, last = heap[1], heap[heap[0]]
    heap[0] -= 1
    at, count = 1, heap[0]
    while 2 * at <= count:
        below = 2 * at
        if below < count and _comes_before(desk, heap[below + 1], heap[below]):
            below += 1
        if not _comes_before(desk, heap[below], last):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last
    return best


@njit
def _branch(
    s: State,
    desk: Desk,
    node: int,
    survival: float,
    voters: tuple[int, int],
    depth: int,
    width: int,
) -> None:
    """Puts the likeliest children of a node onto the heap. ``voters``: where they are listed, and how
    many."""
    previous = s.own.tokens[s.own.num_tokens - 1] if node < 0 else desk.nodes[node].token
    num_children, total = _find_children(
        s, desk, voters[0], voters[1], depth, previous, s.worth[CORRECTION + 1]
    )
    for rank in range(min(width, num_children)):
        c, b = desk.children[rank], desk.branches[desk.num_branches]
        share = c.weight / total
        match = desk.voters[desk.lists[c.first]].match + depth
        b.parent, b.token, b.feature = node, c.token, feature_of(match, share, rank)
        b.depth, b.first, b.count, b.weight = depth, c.first, c.count, survival * share
        _push(desk, desk.num_branches)
        desk.num_branches += 1


@njit
def _write_path(s: State, desk: Desk, node: int, depth: int) -> None:
    """Writes the text's last tokens and the path to a node into ``ending``."""
    for at in range(MAX_MATCH_LENGTH):
        position = s.own.num_tokens - MAX_MATCH_LENGTH + at
        desk.ending[at] = s.own.tokens[position] if position >= 0 else -1
    for at in range(MAX_MATCH_LENGTH + depth - 1, MAX_MATCH_LENGTH - 1, -1):
        desk.ending[at] = desk.nodes[node].token
        node = desk.nodes[node].parent


@njit
def _put_all(desk: Desk, count: int) -> None:
    """Puts all nodes, those of the likeliest chain first."""
    placed, end = 0, -1
    for node in range(count):
        n = desk.nodes[node]
        n.place = -1
        if n.parent == end:
            n.place, end = placed, node
            placed += 1
    for node in range(count):
        n = desk.nodes[node]
        if n.place < 0:
            n.place = placed
            placed += 1
        parent = -1 if n.parent < 0 else desk.nodes[n.parent].place
        _put(desk, n.place, n.token, parent, n.feature)


@njit
def _tree(s: State, desk: Desk, count: int, max_nodes: int, width: int, max_depth: int) -> int:
    """Drafts best first by the product of shares along the path; returns how many nodes."""
    desk.heap[0] = 0
    _branch(s, desk, -1, 1.0, (0, count), 0, width)
    num_nodes = 0
    while desk.heap[0] and num_nodes < max_nodes:
        b, n = desk.branches[_pop(desk)], desk.nodes[num_nodes]
        n.token, n.parent, n.feature = b.token, b.parent, b.feature
        num_nodes += 1
        depth, first, count = b.depth + 1, b.first, b.count
        if depth == max_depth or num_nodes == max_nodes:
            continue
        match = desk.voters[desk.lists[first]].match + depth
        can_join = match < SETTLED_LENGTH and count + ROOM_FOR_JOINING < MOST_VOTING
        if can_join and b.weight >= s.worth[JOINING]:
            _write_path(s, desk, num_nodes - 1, depth)
            first = _copy_list(desk, first, count)
            count = _join(s, desk, first, count, depth)
            desk.num_listed = first + count
        _branch(s, desk, num_nodes - 1, b.weight, (first, count), depth, width)
    _put_all(desk, num_nodes)
    return num_nodes


def _draft(s: State, desk: Desk, max_nodes: int, width: int, max_depth: int) -> int:
    """Writes a draft's nodes; returns how many."""
    forget_gone(s)
    is_chain = width == 1 or max_nodes == 1
    count = _begin(s, desk, is_chain, max_nodes, max_depth)
    if count == 0:
        return 0
    if is_chain:
        return _chain(s, desk, count, max_depth)
    return _tree(s, desk, count, max_nodes, width, max_depth)


write_draft = Loop(_draft, State, Desk, int, int, int)
