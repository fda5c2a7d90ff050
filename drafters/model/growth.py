"""One request's draft while it grows: level by level, the draft model's candidates become nodes.

The likeliest nodes of the newest level, at most as many as the tree is wide, are run through the draft
model, and what may follow them becomes the next level; in the end the best nodes by survival are kept
(EAGLE-2, arXiv 2406.16858, with calibrated acceptance in place of the draft's own probability).

Where drafts are judged by the distribution they were sampled from, all that was sampled is kept, since
dropping nodes for what was sampled would bias the judgement. Trees then have a shape that tells nothing
of their tokens, since policies grant by it: a node's survival comes from the ranks on its path alone,
and every node that is run gets its full number of children.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from drafters.base import DraftRequest, DraftShape
from drafters.model.protocol import Candidates, DraftRows
from drafters.tree import ROOT, Branch, DraftTree, TreeBuilder, best_first, chain_length

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
NUM_LEVELS = len(_EDGES) + 1
NUM_RANKS = 4
INITIAL_ACCEPTANCE = [(low + high) / 2 for low, high in pairwise((0.0, *_EDGES, 1.0))] * NUM_RANKS
"""The draft model's own probability of each feature."""
_SAMPLED = NUM_LEVELS * NUM_RANKS
"""The first feature of nodes of sampled trees: one per rank, whatever the draft model thought."""
_SAMPLED_CONFIDENCE = 0.7
"""The acceptance that these are given until they were counted."""
_NUM_RECENT = 64
"""So many of the last tokens are looked at for some that complete a sampled node's children."""


def feature_of(confidence: float, rank: int) -> int:
    """Returns the bucket of (how sure the draft model was of a node, which sibling it is)."""
    return bisect_right(_EDGES, confidence) + NUM_LEVELS * min(rank, NUM_RANKS - 1)


def is_first_child(feature: int) -> bool:
    return feature < NUM_LEVELS or feature == _SAMPLED


Calibrate = Callable[[int, float], float]
"""``calibrate(feature, confidence)``: probability that such a node is accepted once its parent is."""


def own_opinion(feature: int, confidence: float) -> float:
    """A ``Calibrate`` that takes the draft model's word."""
    del feature
    return confidence


@dataclass(slots=True)
class DraftGrowth:
    """``base``: the position after the anchor, where the first node's slot is. ``min_survival``: no
    node less likely than this is run through the draft model."""

    ask: DraftRequest
    min_survival: float
    max_depth: int
    calibrate: Calibrate
    nodes: TreeBuilder = field(default_factory=TreeBuilder)
    """All that came up, weighed by survival."""
    frontier: list[int] = field(default_factory=list)
    """Nodes to be run next, best first."""
    _depth: int = 0
    _stored: list[int] = field(default_factory=list)
    """Nodes that were run, in the order of their slots."""
    _whole: DraftTree | None = None
    """The tree made from positions that were drafted at once."""

    @property
    def base(self) -> int:
        return len(self.ask.token_ids)

    def expected_gain(self, mean: float) -> float:
        """Returns how many more tokens are expected to be accepted if the next level is run. ``mean``:
        the chance that some child of a node is, once the node is.

        Of the nodes of a level one is accepted at most, so each adds what its children are worth, less
        the price of their row beside all nodes that are likelier, or the node that they put out of a tree
        which is full."""
        weights, most = self.nodes.weights, self.ask.max_nodes
        rising = sorted(weights)[-most:]
        put_out = [0.0] * (most - len(rising)) + rising
        total = 0.0
        for node, lost in zip(self.frontier, put_out, strict=False):
            expected = mean * weights[node]
            num_likelier = len(rising) - bisect_right(rising, expected)
            total += max(0.0, expected - max(lost, self.ask.row_price(num_likelier)))
        return total

    @property
    def num_candidates(self) -> int:
        return min(self.ask.shape.width, self.ask.max_nodes)

    @property
    def is_sampled(self) -> bool:
        return self.ask.sampling.verification != "match"

    @property
    def is_chain(self) -> bool:
        """Whether each of its levels has one node, whose place is known before its token is."""
        return self.num_candidates == 1

    @property
    def most_levels(self) -> int:
        """The most levels that a chain can have."""
        return min(self.max_depth, self.ask.max_nodes)

    def add_first(self, candidates: Sequence[Candidates]) -> None:
        """Takes what may follow the anchor; of a model that drafts several tokens at once what may stand
        at each of the positions behind it, and then the draft is whole."""
        if len(candidates) == 1:
            self.add_level([ROOT], candidates)
        else:
            ask = self.ask
            self._whole = product_tree(candidates, ask.max_nodes, ask.shape, self.calibrate)

    def add_level(self, nodes: Sequence[int], candidates: Sequence[Candidates]) -> None:
        """Hangs each node's candidates under it; ``[ROOT]`` first, then what ``frontier`` was."""
        self._depth += 1
        newest: list[int] = []
        add = self._add_sampled if self.is_sampled else self._add_best
        for node, each in zip(nodes, candidates, strict=True):
            newest += add(node, each)
        self._choose_frontier(newest)

    def next_rows(self) -> DraftRows:
        """Returns the frontier's rows; they are in the store from then on."""
        stored, run = self._stored, [*self._stored, *self.frontier]
        self._stored = run
        tokens = [self.nodes.token_ids[node] for node in self.frontier]
        num_scored, wanted = len(tokens), self.num_candidates
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(run)}
        parents = [place[self.nodes.parents[node]] for node in run]
        if num_scored == 1 and chain_length(parents) == len(run):
            return DraftRows(self.ask, tokens, self.base + len(stored), num_scored, wanted)
        return DraftRows(self.ask, tokens, self.base, num_scored, wanted, parents, len(stored))

    def tree(self) -> DraftTree:
        """Returns at most ``max_nodes`` nodes, the likeliest chain first."""
        return self.nodes.best(self.ask.max_nodes) if self._whole is None else self._whole

    # Inside

    def _add_best(self, node: int, each: Candidates) -> range:
        found = zip(each.token_ids[: self.num_candidates], each.confidences, strict=False)
        return self._add_children(
            node,
            [(token, feature_of(sure, rank), sure) for rank, (token, sure) in enumerate(found)],
        )

    def _add_sampled(self, node: int, each: Candidates) -> range:
        """All that was sampled, as far as there is room. In trees children are completed by tokens that
        the draft model rules out: a request's truncation may leave it fewer than the tree is wide."""
        wanted = min(self.num_candidates, self.ask.max_nodes - len(self.nodes))
        tokens = list(each.token_ids[:wanted])
        if tokens and each.distribution is not None:
            self.nodes.draft_probs[node] = each.distribution
        if self.is_chain:
            pairs = zip(tokens, each.confidences, strict=False)
            return self._add_children(node, [(t, feature_of(sure, 0), sure) for t, sure in pairs])
        if len(tokens) < wanted:
            recent = self.ask.token_ids[: -_NUM_RECENT - 1 : -1]
            others = dict.fromkeys((*recent, *range(self.num_candidates)))
            tokens += [token for token in others if token not in tokens][: wanted - len(tokens)]
        features = [_SAMPLED + min(rank, NUM_RANKS - 1) for rank in range(wanted)]
        sure = [_SAMPLED_CONFIDENCE] * wanted
        return self._add_children(node, list(zip(tokens, features, sure, strict=True)))

    def _add_children(self, node: int, children: Sequence[tuple[int, int, float]]) -> range:
        """``children``: (token, feature, confidence), best first."""
        first = len(self.nodes)
        reached = 1.0 if node == ROOT else self.nodes.weights[node]
        acceptance = 1.0
        for token_id, feature, confidence in children:
            # Never above its elder sibling: the first child then leads the likeliest chain.
            acceptance = min(acceptance, self.calibrate(feature, confidence))
            self.nodes.add(node, token_id, feature, reached * acceptance)
        return range(first, len(self.nodes))

    def _choose_frontier(self, newest: Sequence[int]) -> None:
        self.frontier = []
        room = self.ask.max_nodes - len(self._stored) - 1
        if self._depth >= self.max_depth or room <= 0:
            return
        full = len(self.nodes) >= self.ask.max_nodes
        if full and self.is_sampled:
            return
        if full:
            # A child of a node that just makes it into the tree would not make it itself.
            ranked = sorted(self.nodes.weights, reverse=True)
            last_kept = ranked[self.ask.max_nodes - 1]
            newest = [node for node in newest if self.nodes.weights[node] > last_kept]
        likely = [node for node in newest if self.nodes.weights[node] >= self.min_survival]
        likely.sort(key=lambda node: (-self.nodes.weights[node], node))
        self.frontier = likely[: min(self.ask.shape.width, room)]


def product_tree(
    levels: Sequence[Candidates],
    max_nodes: int,
    shape: DraftShape,
    calibrate: Calibrate = own_opinion,
) -> DraftTree:
    """Returns the ``max_nodes`` paths with the largest product of acceptances, within ``shape``: the best
    tree under its budget where positions are guessed apart from each other (DDTree, arXiv 2604.12989).

    ``levels[d]`` may stand at depth ``d + 1``, best first. A path is never likelier than its
    beginning, so the best ``n`` are a tree for every ``n``: they are found by taking the best open
    node and opening its first child and its next sibling. The likeliest chain comes first.

    Candidates that were sampled keep their distribution. They all carry one confidence per depth, so the
    shape of the tree does not depend on what was sampled, and siblings are kept in the order sampled.
    """
    depth = min(len(levels), shape.depth)

    accepted = [_acceptances(level, shape.width, calibrate) for level in levels[:depth]]

    def branch(above: float, parent: int, ranks: tuple[int, ...]) -> Iterator[Branch]:
        """The node of these ranks, if there is one; ``above``: its parent's product."""
        at, rank = len(ranks), ranks[-1]
        if at <= depth and rank < len(accepted[at - 1]):
            level, share = levels[at - 1], accepted[at - 1][rank]
            feature = feature_of(level.confidences[rank], rank)
            yield Branch(above * share, parent, level.token_ids[rank], feature, (ranks, above))

    def expand(node: int, taken: Branch) -> Iterator[Branch]:
        ranks, above = taken.state
        yield from branch(taken.weight, node, (*ranks, 0))
        yield from branch(above, taken.parent, (*ranks[:-1], ranks[-1] + 1))

    tree = best_first(branch(1.0, ROOT, (0,)), expand, max_nodes)
    sampled: dict[int, Any] = {}
    for parent, at in zip(tree.parents, tree.depths(), strict=True):
        distribution = levels[at - 1].distribution
        if distribution is not None:
            sampled[parent] = distribution
    return replace(tree, draft_probs=sampled) if sampled else tree


def _acceptances(level: Candidates, width: int, calibrate: Calibrate) -> list[float]:
    """Returns how likely each candidate of a position is to be accepted, never above its elder's."""
    found, most = [], 1.0
    for rank, sure in enumerate(level.confidences[:width]):
        most = min(most, calibrate(feature_of(sure, rank), sure))
        found.append(most)
    return found
