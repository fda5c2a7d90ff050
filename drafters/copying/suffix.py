"""``suffix``: copies from wherever the text's ending was seen, and finds its way back after edits.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975): candidates are the places in the request's own
text, and in the same tenant's finished requests, whose contexts agree with the last tokens. Beyond it,
the drafter remembers where copying broke off, so that after an edit it goes on there on a match of one
token or none; and what places are worth is fitted, not counted (``weights.py``).

All places go on side by side, like the branches of a trie: at each node those that agree with the path
vote for the next token, with weights that grow with the match. docs/drafters/lookup.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    ReadingState,
    drafter,
)
from drafters.contexts import cyclic_run, run_features
from drafters.copying.alignment import (
    FEW_CANDIDATES,
    MAX_CANDIDATES,
    SETTLED_LENGTH,
    TRUSTED_LENGTH,
    Alignment,
    Candidate,
)
from drafters.copying.suffix_index import MAX_MATCH_LENGTH, SEPARATOR, Histories, TenantHistory
from drafters.copying.weights import LEADING_FACTOR, NOTHING_COPYING, NOTHING_LOST, WEIGHTS, Place
from drafters.tree import ROOT, Branch, DraftTree, best_first, chain

_LEADING = tuple(LEADING_FACTOR * weight for weight in WEIGHTS[Place.CURRENT])
_LENGTH_STARTS = (3, 8, 32)
_SHARE_STARTS = (0.1, 0.3, 0.6, 0.9)
_NUM_SHARES = len(_SHARE_STARTS) + 1
_NUM_RANKS = 3
_JOINING_SURVIVAL = 0.1
CHAIN_CORRECTION = 0.5
TREE_CORRECTION = 0.3
"""The least likelihood at which a correction is drafted, in place of the original or beside it."""


def suffix_feature(match_length: int, share: float, rank: int) -> int:
    """Returns the bucket of (length of the match before the node, its share of the votes, its rank
    among siblings): 0..59."""
    length_bucket = bisect_right(_LENGTH_STARTS, match_length)
    share_bucket = bisect_right(_SHARE_STARTS, share)
    return (length_bucket * _NUM_SHARES + share_bucket) * _NUM_RANKS + min(rank, _NUM_RANKS - 1)


_ALONE = [
    suffix_feature(length, weight / (weight + NOTHING_LOST), 0)
    for length, weight in enumerate(WEIGHTS[Place.CURRENT])
]


@drafter
class SuffixDrafter(Drafter):
    """See the module. State: an ``Alignment`` per request, bounded, and a bounded ``TenantHistory``
    per cache_salt."""

    info = DrafterInfo(
        "suffix",
        "Copies what followed earlier occurrences of the last tokens, in the request or in the "
        "tenant's finished requests, as a chain or a tree of the likeliest; after an edit it goes on "
        "where copying broke off. Best where the output repeats what was seen (edits, agents, code).",
        options=(
            DrafterOption(
                "use_history",
                True,
                "Draft also from the tenant's finished requests, and keep this one for later ones.",
            ),
        ),
        cost="Per step and request some 6 microseconds while copying, 40 to 80 in between.",
    )

    def __init__(self) -> None:
        super().__init__()
        self._histories = Histories()

    def start(self, request: NewRequest) -> SuffixState:
        wanted = request.options["use_history"]
        history = self._histories.of(request.cache_salt) if wanted else None
        return SuffixState(request.token_ids, history)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        self._histories.advance()
        return super().propose(requests)

    def finish(self, request_id: str, state: SuffixState) -> None:  # noqa: ARG002
        """Hands the text to the tenant's history."""
        state.finish()


class SuffixState(ReadingState):
    """One request: what it copies from, and its drafts."""

    def __init__(self, token_ids: Sequence[int], history: TenantHistory | None) -> None:
        self._history = history
        self._token_ids = token_ids
        self._alignment = Alignment(token_ids, history)

    def read_prompt(self, num_tokens: int) -> int:
        """See ``ReadingState``."""
        return self._alignment.read(self._token_ids, num_tokens)

    def observe(self, observation: Observation) -> None:
        self._alignment.extend(observation.token_ids)

    def finish(self) -> None:
        if self._history is not None:
            self._history.add(self._alignment.token_ids)

    def propose(self, request: DraftRequest) -> DraftTree:
        alignment, shape = self._alignment, request.shape
        alignment.extend(request.token_ids)
        depth = request.depth
        is_chain = shape.width == 1 or request.max_nodes == 1
        if alignment.is_settled and (is_chain or depth == request.max_nodes):
            min_share = CHAIN_CORRECTION if is_chain else TREE_CORRECTION
            # In the midst of a long copy only what it got wrong before is worth a node.
            assert alignment.source is not None
            run = copied(
                alignment.source, alignment.position, depth, alignment.source is alignment.token_ids
            )
            if not alignment.corrections.any_in(alignment.token_ids[-1], run, min_share):
                return chain(run, run_features(_ALONE, alignment.length, len(run)))
            candidates = [alignment.current()]
        else:
            candidates = alignment.candidates(FEW_CANDIDATES if is_chain else MAX_CANDIDATES)
        is_copying = alignment.num_lost_tokens == 0 and alignment.has_copied
        nothing = NOTHING_COPYING if is_copying else NOTHING_LOST
        draft = _Draft(alignment, candidates, nothing, depth)
        return draft.chain() if is_chain else draft.tree(request.max_nodes, shape.width)


class _Voter(NamedTuple):
    """A place, and what stands there: ``run[depth]`` at each depth from which it takes part; ``weight``
    is that of its first vote, ``table`` holds the later ones (``_weight_at``).

    ``match_length`` is what agrees with it before the draft begins; less than 0 where it only joins
    on a path. ``start`` tells places of the request's own text apart; others have a negative one.
    """

    run: Sequence[int]
    match_length: int
    weight: float
    table: Sequence[float]
    start: int


class _Child(NamedTuple):
    token_id: int
    share: float
    voters: list[_Voter]


def copied(text: Sequence[int], position: int, num_tokens: int, is_own: bool) -> list[int]:
    """Copies what stands at ``position``: from the request's own text a ``cyclic_run``, from another what
    is left of it."""
    if is_own:
        return cyclic_run(text, position, num_tokens)
    run = list(text[position : position + num_tokens])
    if SEPARATOR in run:
        del run[run.index(SEPARATOR) :]
    return run


def _weight_at(table: Sequence[float], length: int, leads: bool) -> float:
    """Returns the weight of a place with which ``length`` tokens agree once those before the vote are
    accepted. The place that leads would then be copied from."""
    if length > MAX_MATCH_LENGTH:
        length = MAX_MATCH_LENGTH
    weight = table[length]
    return _LEADING[length] if leads and _LEADING[length] > weight else weight


_match_length = attrgetter("match_length")
_votes = itemgetter(1)


class _Draft:
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
        """Drafts at each depth the token with most votes. Nothing joins: it would seldom win."""
        self._min_share = CHAIN_CORRECTION
        voters = [self._voter(candidate, 0) for candidate in self._candidates]
        token_ids: list[int] = []
        features: list[int] = []
        while len(token_ids) < self._max_depth:
            depth = len(token_ids)
            if depth and len(voters) == 1 and not self._is_correctable(voters[0], token_ids):
                rest = voters[0].run[depth:]
                token_ids += rest
                features += run_features(_ALONE, voters[0].match_length + depth, len(rest))
                break
            children = self._children(voters, depth, token_ids)
            if not children:
                break
            token_id, share, voters = children[0]
            token_ids.append(token_id)
            features.append(suffix_feature(voters[0].match_length + depth, share, 0))
        return chain(token_ids, features)

    def tree(self, max_nodes: int, width: int) -> DraftTree:
        """Drafts best first by the product of shares along the path; the likeliest chain in front."""

        def expand(node: int, branch: Branch) -> Iterator[Branch]:
            before, child = branch.state
            path = [*before, child.token_id]
            if len(path) == self._max_depth:
                return iter(())
            voters = self._joined(child.voters, path, branch.weight)
            return self._branches(node, branch.weight, path, voters, width)

        voters = [self._voter(candidate, 0) for candidate in self._candidates]
        return best_first(self._branches(ROOT, 1.0, [], voters, width), expand, max_nodes)

    def _branches(
        self, node: int, survival: float, path: list[int], voters: list[_Voter], width: int
    ) -> Iterator[Branch]:
        """Yields the likeliest children of ``node``, to which ``path`` leads."""
        depth = len(path)
        for rank, child in enumerate(self._children(voters, depth, path)[:width]):
            match_length = child.voters[0].match_length + depth
            feature = suffix_feature(match_length, child.share, rank)
            weight = survival * child.share
            yield Branch(weight, node, child.token_id, feature, (path, child))

    def _joined(self, voters: list[_Voter], path: list[int], survival: float) -> list[_Voter]:
        """Returns ``voters``, and where it may pay the places that the whole path leads to."""
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
        """Returns a place as a voter that takes part from ``depth`` on."""
        text, position, length, place, weight = candidate
        is_own = text is self._alignment.token_ids
        run = copied(text, position, self._max_depth - depth, is_own)
        if depth:
            run = [ROOT] * depth + run
        start = position - depth if is_own else -MAX_MATCH_LENGTH - self._max_depth
        return _Voter(run, length - depth, weight, WEIGHTS[place], start)

    def _children(self, voters: list[_Voter], depth: int, path: list[int]) -> list[_Child]:
        """Returns the tokens that are voted for, most votes first, then the longest match's."""
        by_token: dict[int, list[_Voter]] = {}
        weights: dict[int, float] = {}
        total = self._nothing
        leads = True
        for voter in voters:
            run, match_length, weight, table, _ = voter
            if len(run) <= depth:
                continue
            if depth:
                weight = _weight_at(table, match_length + depth, leads)
            token_id = run[depth]
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
        ranked = sorted(weights.items(), key=_votes, reverse=True)
        return [_Child(token_id, weight / total, by_token[token_id]) for token_id, weight in ranked]

    def _correct(
        self, weights: dict[int, float], by_token: dict[int, list[_Voter]], path: list[int]
    ) -> None:
        """Shares what the leader's token has with what came instead of it before."""
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
