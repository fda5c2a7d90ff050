"""From places to copy from to a chain or a tree: the likeliest nodes under one budget.

Owned by the ``suffix`` drafter. All places go on side by side, like the branches of a trie: at each
node those that agree with the path vote for the next token. Weights grow with the match, so a
place that is followed for a few tokens is believed more the further it goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from drafters.suffix_alignment import Candidate
from drafters.suffix_history import SEPARATOR
from drafters.suffix_index import MAX_MATCH_LENGTH
from drafters.suffix_weights import NOTHING_LOST, WEIGHTS, Place
from drafters.tree import ROOT, DraftTree

_CURRENT = WEIGHTS[Place.CURRENT]
_LENGTH_STARTS = (3, 8, 32)
_SHARE_STARTS = (0.1, 0.3, 0.6, 0.9)
_NUM_SHARES = len(_SHARE_STARTS) + 1
_NUM_RANKS = 3


def suffix_feature(match_length: int, share: float, rank: int) -> int:
    """Bucket of (length of the match before the node, its share of the votes, its rank among
    siblings): 0..59."""
    length_bucket = sum(match_length >= start for start in _LENGTH_STARTS)
    share_bucket = sum(share >= start for start in _SHARE_STARTS)
    return (length_bucket * _NUM_SHARES + share_bucket) * _NUM_RANKS + min(rank, _NUM_RANKS - 1)


_ALONE = [
    suffix_feature(length, weight / (weight + NOTHING_LOST), 0)
    for length, weight in enumerate(_CURRENT)
]


class _Voter(NamedTuple):
    """A place, and what stands there."""

    run: Sequence[int]
    match_length: int
    weight: float
    table: Sequence[float]

    def weight_at(self, depth: int, leads: bool) -> float:
        """Once its first ``depth`` tokens are accepted. Who leads would then be copied from."""
        if depth == 0:
            return self.weight
        length = min(self.match_length + depth, MAX_MATCH_LENGTH)
        return max(self.table[length], _CURRENT[length]) if leads else self.table[length]


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


class DraftBuilder:
    """Builds one draft, at most ``depth`` deep; ``nothing`` is the weight of no candidate at all."""

    def __init__(
        self,
        own_text: Sequence[int],
        candidates: Sequence[Candidate],
        nothing: float,
        depth: int,
    ) -> None:
        voters = [
            _Voter(copied(text, position, depth, text is own_text), length, weight, WEIGHTS[place])
            for text, position, length, place, weight in candidates
        ]
        # The longest match leads wherever it takes part: voters stay in this order.
        self._voters = sorted(voters, key=attrgetter("match_length"), reverse=True)
        self._nothing = nothing
        self._max_depth = depth

    def chain(self) -> DraftTree:
        """At each depth the token with most votes."""
        token_ids: list[int] = []
        features: list[int] = []
        voters = self._voters
        while len(token_ids) < self._max_depth:
            depth = len(token_ids)
            if len(voters) == 1 and depth:
                rest = voters[0].run[depth:]
                token_ids += rest
                features += _features_alone(voters[0].match_length + depth, len(rest))
                break
            children = self._children(voters, depth)
            if not children:
                break
            token_id, share, voters = children[0]
            token_ids.append(token_id)
            features.append(suffix_feature(voters[0].match_length + depth, share, 0))
        return DraftTree(token_ids, range(-1, len(token_ids) - 1), features)

    def tree(self, max_nodes: int, width: int) -> DraftTree:
        """Best first by the product of shares along the path; the likeliest chain in front."""
        chosen: list[_Waiting] = []
        waiting: list[_Waiting] = []
        serial = self._queue(waiting, self._voters, ROOT, 0, 1.0, True, width, 0)
        while waiting and len(chosen) < max_nodes:
            node = heapq.heappop(waiting)
            chosen.append(node)
            depth = node.depth + 1
            if depth < self._max_depth:
                survival, voters = -node.negative_survival, node.child.voters
                index = len(chosen) - 1
                serial = self._queue(
                    waiting, voters, index, depth, survival, node.on_spine, width, serial
                )
        return _spine_first(chosen)

    def _queue(
        self,
        waiting: list[_Waiting],
        voters: list[_Voter],
        parent: int,
        depth: int,
        survival: float,
        on_spine: bool,
        width: int,
        serial: int,
    ) -> int:
        """Queue the likeliest children of ``parent``; the next free serial number."""
        for rank, child in enumerate(self._children(voters, depth)[:width]):
            on_spine = on_spine and rank == 0
            heapq.heappush(
                waiting,
                _Waiting(-survival * child.share, serial, parent, depth, on_spine, rank, child),
            )
            serial += 1
        return serial

    def _children(self, voters: list[_Voter], depth: int) -> list[_Child]:
        """What the voters vote for, most votes first; then what the longest match says."""
        by_token: dict[int, list[_Voter]] = {}
        weights: dict[int, float] = {}
        total = self._nothing
        leads = True
        for voter in voters:
            if len(voter.run) <= depth:
                continue
            weight = voter.weight_at(depth, leads)
            leads = False
            token_id = voter.run[depth]
            if token_id in weights:
                weights[token_id] += weight
                by_token[token_id].append(voter)
            else:
                weights[token_id] = weight
                by_token[token_id] = [voter]
            total += weight
        ranked = sorted(weights.items(), key=itemgetter(1), reverse=True)
        return [_Child(token_id, weight / total, by_token[token_id]) for token_id, weight in ranked]


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
