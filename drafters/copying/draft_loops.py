"""Compiled: chains and trees of the tokens that places vote for.

A tree takes the likeliest nodes under its budget, by the product of shares along the path. Where a node
is likely enough and what leads to it agrees on little, the text is searched again for the path's ending,
so that a draft may change from one place to another.
"""

from __future__ import annotations

from compiled.loops import Loop, callee
from drafters.copying.alignment_loops import (
    SETTLED_LENGTH,
    is_settled,
    take_best,
)
from drafters.copying.candidate_loops import (
    CURRENT,
    FEW_CANDIDATES,
    MAX_CANDIDATES,
    add_current,
    find_candidates,
)
from drafters.copying.correction_loops import (
    forget_gone,
)
from drafters.copying.records import (
    OWN_TEXT,
    Desk,
    State,
)
from drafters.copying.vote_loops import (
    MOST_VOTING,
    ROOM_FOR_JOINING,
    add_voter,
    copy_list,
    find_children,
    insert,
    join,
)
from drafters.copying.weights import (
    CHAIN_CORRECTION,
    JOINING,
    MAX_MATCH_LENGTH,
    NUM_LENGTHS,
    TREE_CORRECTION,
)

NUM_SHARES, NUM_RANKS = 5, 3


@callee
def feature_of(match_length: int, share: float, rank: int) -> int:
    """Returns the bucket of (length of the match before the node, its share of the votes, its rank among
    siblings): 0..59."""
    length_bucket = (match_length >= 3) + (match_length >= 8) + (match_length >= 32)
    share_bucket = (share >= 0.1) + (share >= 0.3) + (share >= 0.6) + (share >= 0.9)
    return (length_bucket * NUM_SHARES + share_bucket) * NUM_RANKS + min(rank, NUM_RANKS - 1)


@callee
def _add_correcting(s: State, desk: Desk) -> None:
    """Adds a voter for the rest of a correction that was begun."""
    c, done = s.corrections[s.correcting], s.own.num_tokens - s.broke_end
    left, goes_on = c.num_actual - done, s.broke_position + c.num_original
    match = min(s.broke_length, SETTLED_LENGTH - 1)
    v = desk.voters[add_voter(desk, OWN_TEXT, c.actual_at + done, 0, match, CURRENT)]
    v.weight = s.worth[NUM_LENGTHS * CURRENT + match]
    v.switch, v.next_text = left, s.broke_source
    v.next_start, v.next_base = goes_on - left, goes_on


@callee
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
    if s.correcting >= 0:
        _add_correcting(s, desk)
    listed = desk.num_voters
    for voter in range(listed):
        insert(desk, 0, voter, voter)
    for each in range(count):
        c = s.candidates[each]
        voter = add_voter(desk, c.text, c.position, 0, c.match, c.place)
        desk.voters[voter].weight = c.weight
        insert(desk, 0, listed + each, voter)
    desk.num_listed = listed + count
    return desk.num_listed


@callee
def _put(desk: Desk, node: int, token: int, parent: int, feature: int) -> None:
    at, drafted = 3 * node, desk.drafted
    drafted[at], drafted[at + 1], drafted[at + 2] = token, parent, feature


@callee
def _chain(s: State, desk: Desk, count: int, max_depth: int) -> int:
    """Drafts at each depth the token with most votes; returns how many nodes. Nothing joins: it would
    seldom win."""
    previous = s.own.tokens[s.own.num_tokens - 1]
    first, depth, best = 0, 0, desk.children[0]
    while depth < max_depth:
        num_children, total = find_children(
            s, desk, first, count, depth, previous, s.worth[CHAIN_CORRECTION]
        )
        if num_children == 0:
            break
        previous, count = best.token, best.count
        match = desk.voters[desk.lists[best.first]].match + depth
        _put(desk, depth, previous, depth - 1, feature_of(match, best.weight / total, 0))
        depth += 1
        # What was listed before is not needed any more.
        desk.num_listed = 0
        first = copy_list(desk, best.first, count)
    return depth


@callee
def _comes_before(desk: Desk, one: int, other: int) -> bool:
    weight, other_weight = desk.branches[one].weight, desk.branches[other].weight
    return weight > other_weight or (weight == other_weight and one < other)


@callee
def _push(desk: Desk, branch: int) -> None:
    """Puts a branch onto the heap, which begins with how many there are."""
    heap = desk.heap
    heap[0] += 1
    at = heap[0]
    while at > 1 and _comes_before(desk, branch, heap[at >> 1]):
        heap[at] = heap[at >> 1]
        at >>= 1
    heap[at] = branch


@callee
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


@callee
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
    num_children, total = find_children(
        s, desk, voters[0], voters[1], depth, previous, s.worth[TREE_CORRECTION]
    )
    for rank in range(min(width, num_children)):
        c, b = desk.children[rank], desk.branches[desk.num_branches]
        share = c.weight / total
        match = desk.voters[desk.lists[c.first]].match + depth
        b.parent, b.token, b.feature = node, c.token, feature_of(match, share, rank)
        b.depth, b.first, b.count, b.weight = depth, c.first, c.count, survival * share
        _push(desk, desk.num_branches)
        desk.num_branches += 1


@callee
def _write_path(s: State, desk: Desk, node: int, depth: int) -> None:
    """Writes the text's last tokens and the path to a node into ``ending``."""
    for at in range(MAX_MATCH_LENGTH):
        position = s.own.num_tokens - MAX_MATCH_LENGTH + at
        desk.ending[at] = s.own.tokens[position] if position >= 0 else -1
    for at in range(MAX_MATCH_LENGTH + depth - 1, MAX_MATCH_LENGTH - 1, -1):
        desk.ending[at] = desk.nodes[node].token
        node = desk.nodes[node].parent


@callee
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


@callee
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
            first = copy_list(desk, first, count)
            count = join(s, desk, first, count, depth)
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


write_draft = Loop(_draft)
