"""From places to copy from to a chain or a tree: the likeliest nodes under one budget.

Owned by the ``suffix`` drafter. All places go on side by side, like the branches of a trie: at each
node those that agree with the path vote for the next token. Weights grow with the match, so a
place that is followed for a few tokens is believed more the further it goes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from drafters.copying.alignment import SETTLED_LENGTH, TRUSTED_LENGTH, Alignment, Candidate
from drafters.copying.history import SEPARATOR
from drafters.copying.suffix_index import MAX_MATCH_LENGTH
from drafters.copying.weights import LEADING_FACTOR, NOTHING_LOST, WEIGHTS, Place
from drafters.tree import ROOT, DraftTree

_LEADING = tuple(LEADING_FACTOR * weight for weight in WEIGHTS[Place.CURRENT])
_LENGTH_STARTS = (3, 8, 32)
_SHARE_STARTS = (0.1, 0.3, 0.6, 0.9)
_NUM_SHARES = len(_SHARE_STARTS) + 1
_NUM_RANKS = 3
_JOINING_SURVIVAL = 0.1
CHAIN_CORRECTION = 0.5
TREE_CORRECTION = 0.3
"""How likely a correction has to be to be drafted, in place of the original or beside it."""


def suffix_feature(match_length: int, share: float, rank: int) -> int:
    """Bucket of (length of the match before the node, its share of the votes, its rank among
    siblings): 0..59."""
    length_bucket = bisect_right(_LENGTH_STARTS, match_length)
    share_bucket = bisect_right(_SHARE_STARTS, share)
    return (length_bucket * _NUM_SHARES + share_bucket) * _NUM_RANKS + min(rank, _NUM_RANKS - 1)


_ALONE = [
    suffix_feature(length, weight / (weight + NOTHING_LOST), 0)
    for length, weight in enumerate(WEIGHTS[Place.CURRENT])
]


class _Voter(NamedTuple):
    """A place, and what stands there: ``run[depth]`` at each depth from which it takes part.

    ``match_length`` is what agrees with it before the draft begins; less than 0 where it only joins
    on a path. ``start`` tells places of the request's own text apart; others have a negative one.
    """

    run: Sequence[int]
    match_length: int
    weight: float
    table: Sequence[float]
    start: int

    def weight_at(self, depth: int, leads: bool) -> float:
        """Once its first ``depth`` tokens are accepted. Who leads would then be copied from."""
        if depth == 0:
            return self.weight
        length = min(self.match_length + depth, MAX_MATCH_LENGTH)
        return max(self.table[length], _LEADING[length]) if leads else self.table[length]


class _Child(NamedTuple):
    token_id: int
    share: float
    voters: list[_Voter]


class _Waiting(NamedTuple):
    """A node that may be chosen; the smallest is the likeliest, then the one found first."""

    negative_survival: float
    serial: int
    parent: int  # index among the chosen
    depth: int  # of its parent
    on_spine: bool
    rank: int
    child: _Child


def copied(text: Sequence[int], position: int, num_tokens: int, is_own: bool) -> list[int]:
    """What stands at ``position``; past the end of the request's own text, the copy goes on into
    itself, as an overlapped copy in LZ77 does; at the end of another text it ends."""
    run = list(text[position : position + num_tokens])
    if not is_own:
        if SEPARATOR in run:
            del run[run.index(SEPARATOR) :]
    elif 0 < len(run) < num_tokens:
        run = (run * (num_tokens // len(run) + 1))[:num_tokens]
    return run


def chain_of_one(run: Sequence[int], match_length: int) -> DraftTree:
    """The chain that copies from one place alone."""
    return DraftTree(run, range(-1, len(run) - 1), _features_alone(match_length, len(run)))


def _features_alone(match_length: int, num_nodes: int) -> list[int]:
    features = _ALONE[match_length : match_length + num_nodes]
    return features + [_ALONE[-1]] * (num_nodes - len(features))


_match_length = attrgetter("match_length")


class DraftBuilder:
    """Builds one draft, at most ``depth`` deep; ``nothing`` is the weight of no candidate at all.

    Where a node is likely enough and what leads to it agrees on little, the text is searched again
    for the path's ending, so that a draft may change from one place to another.
    """

    def __init__(
        self, alignment: Alignment, candidates: Sequence[Candidate], nothing: float, depth: int
    ) -> None:
        self._alignment = alignment
        self._nothing = nothing
        self._max_depth = depth
        self._min_share = TREE_CORRECTION
        # The longest match leads wherever it takes part: voters stay in this order.
        self._candidates = sorted(candidates, key=_match_length, reverse=True)

    def chain(self) -> DraftTree:
        """At each depth the token with most votes. Nothing joins: it would seldom win."""
        self._min_share = CHAIN_CORRECTION
        voters, token_ids, features = self._first_voters()
        while len(token_ids) < self._max_depth:
            depth = len(token_ids)
            if depth and len(voters) == 1 and not self._is_correctable(voters[0], token_ids):
                rest = voters[0].run[depth:]
                token_ids += rest
                features += _features_alone(voters[0].match_length + depth, len(rest))
                break
            children = self._children(voters, depth, token_ids)
            if not children:
                break
            token_id, share, voters = children[0]
            token_ids.append(token_id)
            features.append(suffix_feature(voters[0].match_length + depth, share, 0))
        return DraftTree(token_ids, range(-1, len(token_ids) - 1), features)

    def _first_voters(self) -> tuple[list[_Voter], list[int], list[int]]:
        """The chain's first node, by token and feature, and who voted for it: only their runs are
        needed. All voters, and no node yet, where a correction may change the vote."""
        candidates = self._candidates
        may_correct = candidates and candidates[0].match_length >= TRUSTED_LENGTH
        if may_correct and self._alignment.corrections:
            return [self._voter(candidate, 0) for candidate in candidates], [], []
        weights: dict[int, float] = {}
        voting: list[tuple[int, Candidate]] = []
        total = self._nothing
        own = self._alignment.token_ids
        for candidate in candidates:
            text, position, _, _, weight = candidate
            if position >= len(text):
                continue
            token_id = text[position]
            if token_id == SEPARATOR and text is not own:
                continue
            weights[token_id] = weights.get(token_id, 0.0) + weight
            total += weight
            voting.append((token_id, candidate))
        if not voting:
            return [], [], []
        best = max(weights, key=weights.__getitem__)
        voters = [self._voter(candidate, 0) for token_id, candidate in voting if token_id == best]
        feature = suffix_feature(voters[0].match_length, weights[best] / total, 0)
        return voters, [best], [feature]

    def tree(self, max_nodes: int, width: int) -> DraftTree:
        """Best first by the product of shares along the path; the likeliest chain in front."""
        chosen: list[_Waiting] = []
        paths: list[list[int]] = []
        waiting: list[_Waiting] = []
        voters = [self._voter(candidate, 0) for candidate in self._candidates]
        root = _Waiting(-1.0, 0, ROOT, -1, True, 0, _Child(ROOT, 1.0, voters))
        serial = self._queue(waiting, root, ROOT, [], width)
        while waiting and len(chosen) < max_nodes:
            node = heapq.heappop(waiting)
            path = [node.child.token_id]
            if node.parent != ROOT:
                path = paths[node.parent] + path
            chosen.append(node)
            paths.append(path)
            if len(path) < self._max_depth:
                serial = self._queue(waiting, node, len(chosen) - 1, path, width, serial)
        return _spine_first(chosen)

    def _queue(
        self,
        waiting: list[_Waiting],
        node: _Waiting,
        index: int,
        path: list[int],
        width: int,
        serial: int = 0,
    ) -> int:
        """Queue the likeliest children of ``node``, the ``index``-th chosen; the next free serial
        number."""
        depth, survival = len(path), -node.negative_survival
        voters = node.child.voters
        if depth:
            voters = self._joined(voters, path, survival)
        on_spine = node.on_spine
        for rank, child in enumerate(self._children(voters, depth, path)[:width]):
            heapq.heappush(
                waiting,
                _Waiting(-survival * child.share, serial, index, depth, on_spine, rank, child),
            )
            on_spine = False
            serial += 1
        return serial

    def _joined(self, voters: list[_Voter], path: list[int], survival: float) -> list[_Voter]:
        """``voters``, and where it may pay the places that the whole path leads to."""
        depth = len(path)
        if survival < _JOINING_SURVIVAL or voters[0].match_length + depth >= SETTLED_LENGTH:
            return voters
        starts = {voter.start for voter in voters}
        joining = [
            self._voter(candidate, depth)
            for candidate in self._alignment.candidates_after(path)
            if candidate.position - depth not in starts
        ]
        return sorted(voters + joining, key=_match_length, reverse=True) if joining else voters

    def _voter(self, candidate: Candidate, depth: int) -> _Voter:
        """Who takes part from ``depth`` on."""
        text, position, length, place, weight = candidate
        is_own = text is self._alignment.token_ids
        run = copied(text, position, self._max_depth - depth, is_own)
        if depth:
            run = [ROOT] * depth + run
        start = position - depth if is_own else -MAX_MATCH_LENGTH - self._max_depth
        return _Voter(run, length - depth, weight, WEIGHTS[place], start)

    def _children(self, voters: list[_Voter], depth: int, path: list[int]) -> list[_Child]:
        """What the voters vote for, most votes first; then what the longest match says."""
        by_token: dict[int, list[_Voter]] = {}
        weights: dict[int, float] = {}
        total = self._nothing
        leads = True
        for voter in voters:
            if len(voter.run) <= depth:
                continue
            weight = voter.weight_at(depth, leads)
            token_id = voter.run[depth]
            if token_id in weights:
                weights[token_id] += weight
                by_token[token_id].append(voter)
            else:
                weights[token_id] = weight
                by_token[token_id] = [voter]
            total += weight
            leads = False
        if self._alignment.corrections and weights:
            self._correct(weights, by_token, path)
        ranked = sorted(weights.items(), key=itemgetter(1), reverse=True)
        return [_Child(token_id, weight / total, by_token[token_id]) for token_id, weight in ranked]

    def _correct(
        self, weights: dict[int, float], by_token: dict[int, list[_Voter]], path: list[int]
    ) -> None:
        """Share what the leader's token has with what came instead of it before."""
        depth = len(path)
        original = next(iter(weights))
        if by_token[original][0].match_length + depth < TRUSTED_LENGTH:
            return
        previous = path[-1] if path else self._alignment.token_ids[-1]
        found = self._alignment.corrections.find(previous, original, self._min_share)
        if found is None:
            return
        actual, share = found
        moved = weights[original] * share
        weights[original] -= moved
        weights[actual] = weights.get(actual, 0.0) + moved
        if actual not in by_token:
            run = [ROOT] * depth + [actual]
            by_token[actual] = [_Voter(run, -depth, 0.0, WEIGHTS[Place.OUTPUT], ROOT - depth)]

    def _is_correctable(self, voter: _Voter, path: list[int]) -> bool:
        run = voter.run[len(path) :]
        return self._alignment.corrections.any_in(path[-1], run, self._min_share)


def _spine_first(chosen: Sequence[_Waiting]) -> DraftTree:
    """The tree of these nodes (parents before children), the likeliest chain as its first nodes."""
    order = sorted(range(len(chosen)), key=lambda index: not chosen[index].on_spine)  # stable
    index_of = {ROOT: ROOT} | {old: new for new, old in enumerate(order)}
    nodes = [chosen[index] for index in order]
    return DraftTree(
        [node.child.token_id for node in nodes],
        [index_of[node.parent] for node in nodes],
        [
            suffix_feature(
                node.child.voters[0].match_length + node.depth, node.child.share, node.rank
            )
            for node in nodes
        ],
    )
