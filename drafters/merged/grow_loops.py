"""Compiled: one tree of what copies and top tokens say, grown best first.

A node's guesses are what the places that it is copied from vote for, what the target found likeliest
after its last tokens, and, near the anchor, what the target nearly said in the anchor's place. The
likeliest guess of all is the next node, until there are enough.
"""

from __future__ import annotations

import math

from compiled.loops import Loop, callee
from compiled.noise import hash_of, noise_of
from compiled.records import Int32s
from drafters.copying.alignment_loops import SETTLED_LENGTH
from drafters.copying.draft_loops import _begin, _pop, _push, _put_all, _write_path
from drafters.copying.records import Desk, State
from drafters.copying.vote_loops import (
    MOST_VOTING,
    ROOM_FOR_JOINING,
    copy_list,
    find_children,
    join,
)
from drafters.copying.weights import JOINING, MAX_MATCH_LENGTH, TREE_CORRECTION
from drafters.merged.chance_loops import (
    COPY,
    COPY_VALUES,
    FEATURE_BITS,
    FREQUENT,
    NEARLY,
    NOISE,
    ROW,
    believed,
    copy_bucket,
    judge,
    log_bucket,
    margin_bucket,
    noise_bucket,
    score_bucket,
    set_chances,
    share_bucket,
)
from drafters.merged.records import Merged, Seen
from drafters.merged.row_loops import (
    LEAST_LOG,
    LOG_UNITS,
    LOGS_AT,
    MOST_FREQUENT,
    NUM_LEVELS,
    NUM_TOP,
    TOKENS_AT,
    count_token,
    find_row,
    learn_rows,
    length_of,
    log_of,
    normalize,
)

MOST_GUESSES = 32
_MOST_COPIED = 6
_LEAST_SURVIVAL = 0.001
_NUM_DEPTHS = 7
MOST_NEARLY = 16
_FORGETTING = 400
"""In ``LOG_UNITS``, at each token."""
LEAST_NEARLY = -7_500
_MOST_FREQUENT_GUESSED = 16
_LEAST_FURTHER = 0.15
"""The least survival of a node after which what is seldom right is worth a thought."""


@callee
def _guess(
    m: Merged, first: int, count: int, token: int, unsaid: int, kind: int, bucket: int
) -> int:
    """Adds the ``bucket`` of a ``kind`` to the features of a token, which begins with those ``unsaid``.
    Returns which guess it is; ``MOST_GUESSES``: there is no room for another."""
    at = 0
    while at < count and m.guesses[first + at].token != token:
        at += 1
    if at < MOST_GUESSES:
        g = m.guesses[first + at]
        if at == count:
            g.token, g.features, g.next, g.first, g.count = token, unsaid, -1, 0, 0
        g.features += (1 + bucket) << (FEATURE_BITS * kind)
    return at


@callee
def _unsaid(found: tuple[int, int, int], depth: int, is_copied: bool, looks_further: bool) -> int:
    """Returns the features of a token that no source names: of each kind a base, by what else is known of
    the place, and one more where the source names other tokens."""
    features = min(depth, _NUM_DEPTHS - 1) * 2 + is_copied
    longer = 0
    for level in range(NUM_LEVELS - 1, -1, -1):
        is_found = found[level] >= 0
        features += (16 * longer + is_found) << (FEATURE_BITS * (ROW + level))
        longer = min(longer + is_found, 2)
    is_new = longer == 0
    features += (COPY_VALUES * (longer > 0) + is_copied) << (FEATURE_BITS * COPY)
    if looks_further:
        features += (33 * is_new + 11 * min(depth, 2) + 1) << (FEATURE_BITS * NEARLY)
        features += (9 * is_new + 1) << (FEATURE_BITS * FREQUENT)
    return features


@callee
def _guess_copied(
    desk: Desk, m: Merged, first: int, num_children: int, total: float, depth: int, unsaid: int
) -> int:
    """Guesses the tokens with most of the votes; returns how many there are."""
    for rank in range(num_children):
        c = desk.children[rank]
        match = desk.voters[desk.lists[c.first]].match + depth
        bucket = copy_bucket(match, c.weight / total)
        g = m.guesses[first + _guess(m, first, rank, c.token, unsaid, COPY, bucket)]
        g.first, g.count = c.first, c.count
    return num_children


@callee
def _guess_row(m: Merged, first: int, count: int, kind: int, cell: int, unsaid: int) -> int:
    """Guesses a row's tokens, best first; returns how many guesses there are."""
    cells, tokens, logs, temperature = m.rows.cells, cell + TOKENS_AT, cell + LOGS_AT, m.temperature
    total = 0.0
    if temperature > 0.0:
        for rank in range(NUM_TOP):
            if cells[tokens + rank] < 0:
                break
            total += math.exp(cells[logs + rank] / (LOG_UNITS * temperature))
        total = math.log(total)
    second = cells[logs + 1] if cells[tokens + 1] >= 0 else LEAST_LOG
    for rank in range(NUM_TOP):
        if cells[tokens + rank] < 0:
            break
        log = cells[logs + rank]
        if temperature > 0.0:
            bucket = log_bucket(log / (LOG_UNITS * temperature) - total)
        else:
            bucket = margin_bucket(rank, log, cells[logs], second)
        at = _guess(m, first, count, cells[tokens + rank], unsaid, kind, bucket)
        if at == MOST_GUESSES:
            break
        count = max(count, at + 1)
    return count


@callee
def _guess_nearly(m: Merged, first: int, count: int, unsaid: int) -> int:
    """Guesses what the target nearly said of late; returns how many guesses there are."""
    for rank in range(m.num_nearly):
        bucket = score_bucket(m.nearly[MOST_NEARLY + rank])
        at = _guess(m, first, count, m.nearly[rank], unsaid, NEARLY, bucket)
        if at == MOST_GUESSES:
            break
        count = max(count, at + 1)
    return count


@callee
def _guess_frequent(m: Merged, first: int, count: int, unsaid: int) -> int:
    """Guesses what the target says most often; returns how many guesses there are."""
    said = m.rows.frequent
    for rank in range(_MOST_FREQUENT_GUESSED):
        num_said = said[MOST_FREQUENT + rank]
        if num_said < 2:
            break
        bucket = share_bucket(num_said / m.rows.num_counted)
        at = _guess(m, first, count, said[rank], unsaid, FREQUENT, bucket)
        if at == MOST_GUESSES:
            break
        count = max(count, at + 1)
    return count


@callee
def _find_guesses(
    s: State, desk: Desk, m: Merged, first: int, copied: tuple[int, int], depth: int, above: float
) -> int:
    """Writes the guesses that may follow the path in ``desk.ending``; returns how many."""
    end = MAX_MATCH_LENGTH + depth
    num_children, total = find_children(
        s, desk, copied[0], copied[1], depth, desk.ending[end - 1], s.worth[TREE_CORRECTION]
    )
    num_children = min(num_children, _MOST_COPIED)
    found = (
        find_row(m.rows, desk.ending, end, length_of(0)),
        find_row(m.rows, desk.ending, end, length_of(1)),
        find_row(m.rows, desk.ending, end, length_of(2)),
    )
    looks_further = above >= _LEAST_FURTHER
    unsaid = _unsaid(found, depth, num_children > 0, looks_further)
    count = _guess_copied(desk, m, first, num_children, total, depth, unsaid)
    for level in range(NUM_LEVELS - 1, -1, -1):
        if found[level] >= 0:
            count = _guess_row(m, first, count, ROW + level, found[level], unsaid)
    if looks_further:
        count = _guess_nearly(m, first, count, unsaid)
        count = _guess_frequent(m, first, count, unsaid)
    if m.temperature > 0.0:
        state = hash_of(m.key, s.own.num_tokens + depth)
        for g in range(first, first + count):
            noise = noise_of(state, m.guesses[g].token)
            m.guesses[g].features += noise_bucket(noise) << (FEATURE_BITS * NOISE)
    set_chances(m, first, count)
    return count


@callee
def _expand(
    s: State, desk: Desk, m: Merged, node: int, copied: tuple[int, int], depth: int, above: float
) -> None:
    """Puts the likeliest guesses after a node onto the heap."""
    first = MOST_GUESSES * m.num_expanded
    count = _find_guesses(s, desk, m, first, copied, depth, above)
    m.counts[m.num_expanded] = count
    m.num_expanded += 1
    for at in range(first, first + count):
        g = m.guesses[at]
        survival = above * believed(m, g.chance)
        if survival >= _LEAST_SURVIVAL:
            b = desk.branches[desk.num_branches]
            b.parent, b.token, b.feature, b.depth = node, g.token, at, depth
            b.first, b.count, b.weight = g.first, g.count, survival
            _push(desk, desk.num_branches)
            desk.num_branches += 1


@callee
def _more_copies(
    s: State, desk: Desk, first: int, count: int, depth: int, survival: float
) -> tuple[int, int]:
    """Returns where the voters are listed after a node, and how many: those before it and, where they
    agree on little, what else in the text the path leads to."""
    match = desk.voters[desk.lists[first]].match + depth if count else 0
    can_join = match < SETTLED_LENGTH and count + ROOM_FOR_JOINING < MOST_VOTING
    if can_join and survival >= s.worth[JOINING]:
        first = copy_list(desk, first, count)
        count = join(s, desk, first, count, depth)
        desk.num_listed = first + count
    return first, count


def _grow(s: State, desk: Desk, m: Merged, max_nodes: int, width: int, max_depth: int) -> int:
    """Writes a draft's nodes, and their survivals; returns how many. Of those that are of no use the
    likeliest is the last one: whoever grants sees that there is more."""
    m.num_expanded = 0
    listed = _begin(s, desk, width == 1, max_nodes, max_depth)
    desk.heap[0], desk.num_branches = 0, 0
    _write_path(s, desk, -1, 0)
    _expand(s, desk, m, -1, (0, listed), 0, 1.0)
    num_nodes, num_under_root = 0, 0
    while desk.heap[0] and num_nodes < max_nodes:
        b = desk.branches[_pop(desk)]
        if b.parent >= 0:
            if desk.nodes[b.parent].place >= width:
                continue
            desk.nodes[b.parent].place += 1
        else:
            if num_under_root >= width:
                continue
            num_under_root += 1
        n = desk.nodes[num_nodes]
        n.token, n.parent, n.feature, n.place = b.token, b.parent, b.feature, 0
        num_nodes += 1
        if b.weight < m.least:
            break
        depth = b.depth + 1
        if depth == max_depth or num_nodes == max_nodes:
            continue
        m.guesses[b.feature].next = m.num_expanded
        survival, first, count = b.weight, b.first, b.count
        _write_path(s, desk, num_nodes - 1, depth)
        copied = _more_copies(s, desk, first, count, depth, survival)
        _expand(s, desk, m, num_nodes - 1, copied, depth, survival)
    _put_all(desk, num_nodes)
    for node in range(num_nodes):
        n = desk.nodes[node]
        above = 1.0 if n.parent < 0 else m.survivals[desk.nodes[n.parent].place]
        m.survivals[n.place] = above * believed(m, m.guesses[n.feature].chance)
    return num_nodes


@callee
def _note_nearly(m: Merged, seen: Seen, row: int, said: int) -> None:
    """Keeps, for a while, the other likely tokens of a row whose token was ``said``."""
    scores = MOST_NEARLY
    count = 0
    for at in range(m.num_nearly):
        score = m.nearly[scores + at] - _FORGETTING
        if m.nearly[at] != said and score > LEAST_NEARLY:
            m.nearly[count], m.nearly[scores + count] = m.nearly[at], score
            count += 1
    for rank in range(seen.num_top):
        token = seen.tops[row * seen.num_top + rank]
        if token < 0:
            break
        score = log_of(seen.logs[row * seen.num_top + rank])
        if token == said or score <= LEAST_NEARLY:
            continue
        at = 0
        while at < count and m.nearly[at] != token:
            at += 1
        if at < count:
            score = max(score, m.nearly[scores + at])
        elif count < MOST_NEARLY:
            count += 1
        elif m.nearly[scores + at - 1] < score:
            at -= 1
        else:
            continue
        while at > 0 and m.nearly[scores + at - 1] < score:
            m.nearly[at], m.nearly[scores + at] = m.nearly[at - 1], m.nearly[scores + at - 1]
            at -= 1
        m.nearly[at], m.nearly[scores + at] = token, score
    m.num_nearly = count


def _hear(m: Merged, seen: Seen, tokens: Int32s, before: int, context: Int32s) -> None:
    """Learns from a step, of whose tokens the text had those before ``tokens[before]``."""
    if m.num_expanded:
        judge(m, MOST_GUESSES, tokens, before, before + seen.num_emitted)
    m.num_expanded = 0
    for at in range(before, before + seen.num_emitted):
        count_token(m.rows, tokens[at])
    if seen.num_top:
        normalize(seen)
        learn_rows(m.rows, tokens, before, seen, context)
        node, position = -1, before
        # Rows of the path, one below the other.
        for row in range(seen.num_rows):
            is_next = row == 0 or seen.parents[row - 1] == node
            if seen.is_emitted[row] and is_next and position < before + seen.num_emitted:
                _note_nearly(m, seen, row, tokens[position])
                node, position = row - 1, position + 1


grow = Loop(_grow)
hear = Loop(_hear)
