"""``ngram``: prompt lookup. What followed the last tokens the last time they were seen?

After Saxena's prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding). The
longest match of ``ngram_min``..``ngram_max`` tokens wins, then the most recent one. A draft that
reaches the end of the text goes on into itself, as an overlapped copy in LZ77 does, so text with a
short period drafts as deep as any other. Text is looked up in the request's own tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafters.base import DrafterInfo, DrafterOption, DraftRequest, Observation, OptionValue
from drafters.contexts import pack
from drafters.copying.ngram_index import MAX_MATCH_LENGTH, NgramIndex, common_suffix_length
from drafters.per_request import PerRequestDrafter
from drafters.tree import EMPTY, DraftTree

# How far a tree looks for alternatives: past occurrences per branch point, and branch points.
_MAX_OCCURRENCES = 16
_MAX_BRANCH_POINTS = 4

_NUM_RANKS = 4
_BUCKET_STARTS = (1, 2, 3, 4, 5, 6, 8, 12, 20, MAX_MATCH_LENGTH)


def match_feature(match_length: int, sibling_rank: int) -> int:
    """Bucket of (length of the match before the node, rank among siblings): 0..39.

    A node ``j`` deeper in a copied run is preceded by ``j`` more matching tokens if it is reached
    at all, so the length grows along the run.
    """
    bucket = sum(match_length >= start for start in _BUCKET_STARTS) - 1
    return max(bucket, 0) * _NUM_RANKS + min(sibling_rank, _NUM_RANKS - 1)


_RUN_FEATURES = [match_feature(length, 0) for length in range(MAX_MATCH_LENGTH)]


def _run_features(match_length: int, num_nodes: int) -> list[int]:
    features = _RUN_FEATURES[match_length : match_length + num_nodes]
    return features + [match_feature(MAX_MATCH_LENGTH, 0)] * (num_nodes - len(features))


def _likely(match_length: int) -> float:
    """A rough chance that a copy goes on for one more token; only ranks nodes inside one tree."""
    return (match_length + 1) / (match_length + 3)


class NgramInfo(DrafterInfo):
    """Adds the check that spans two options."""

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        options = DrafterInfo.resolve(self, given)
        if int(options["ngram_min"]) > int(options["ngram_max"]):
            raise ValueError("ngram_min must not exceed ngram_max")
        return options


INFO = NgramInfo(
    name="ngram",
    description=(
        "Prompt lookup: copies what followed the longest, then most recent, earlier occurrence of "
        "the request's last tokens. Best where the output repeats its prompt (edits, quotes, code)."
    ),
    drafts_trees=True,
    options=(
        DrafterOption("ngram_min", 2, "Shortest match, in tokens, that is worth a draft.", 1, 16),
        DrafterOption("ngram_max", 8, "Longest match, in tokens, that is searched for.", 1, 16),
    ),
)


class NgramDrafter(PerRequestDrafter):
    """See the module. State per request: an ``NgramIndex``, which is bounded."""

    def __init__(self) -> None:
        super().__init__(INFO, NgramState)


class NgramState:
    """One request: its index, and how to turn matches into chains and trees."""

    num_top_tokens = 0

    def __init__(self, token_ids: Sequence[int], options: Mapping[str, OptionValue]) -> None:
        self._index = NgramIndex(int(options["ngram_min"]), int(options["ngram_max"]))
        self._index.extend(token_ids)

    def observe(self, observation: Observation) -> None:
        self._index.extend(observation.token_ids)

    def size(self) -> int:
        """Entries held."""
        return self._index.size()

    def propose(self, request: DraftRequest) -> DraftTree:
        token_ids = request.token_ids
        self._index.extend(token_ids)
        match = self._index.match
        depth = min(request.shape.depth, request.max_nodes)
        if match < 0 or depth < 1:
            return EMPTY
        tail = list(token_ids[-MAX_MATCH_LENGTH:])
        length = common_suffix_length(token_ids, match, tail)
        run = _copy(token_ids, match, depth)
        if request.shape.width > 1 and request.max_nodes > 1:
            return _TreeBuilder(self._index, request, tail, run, length).build()
        return DraftTree(run, range(-1, len(run) - 1), _run_features(length, len(run)))


def _copy(token_ids: Sequence[int], end: int, num_tokens: int) -> list[int]:
    """``num_tokens`` tokens that follow position ``end``, cyclic past the end of the text."""
    run = list(token_ids[end + 1 : end + 1 + num_tokens])
    if len(run) < num_tokens:
        run = (run * (num_tokens // len(run) + 1))[:num_tokens]
    return run


class _TreeBuilder:
    """The copied run as the spine, other known continuations as branches, the likeliest kept.

    Branches leave the spine at its first positions: the distinct tokens that followed recent
    occurrences of the shortest gram there, longest match first, each with its own copied run.
    """

    def __init__(
        self,
        index: NgramIndex,
        request: DraftRequest,
        tail: list[int],
        run: list[int],
        length: int,
    ) -> None:
        self._index = index
        self._request = request
        self._tail = tail  # the text's last tokens, for match lengths
        self._run = run
        self._length = length
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._features: list[int] = []
        self._weights: list[float] = []

    def build(self) -> DraftTree:
        self._add_run(self._run, -1, 1.0, self._length, _likely(self._length), 0)
        for spine_depth in range(min(len(self._run), _MAX_BRANCH_POINTS)):
            self._branch(spine_depth)
        tree = DraftTree(self._token_ids, self._parents, self._features)
        # Weights never grow downward and the sort is stable, so what is kept is parent-closed.
        order = sorted(range(len(tree)), key=self._weights.__getitem__, reverse=True)
        return tree.subtree(sorted(order[: self._request.max_nodes]))

    def _branch(self, spine_depth: int) -> None:
        """Hang alternatives beside spine node ``spine_depth``."""
        parent = spine_depth - 1
        reached = self._weights[parent] if spine_depth else 1.0
        chance = reached * (1.0 - _likely(self._length + spine_depth))
        num_tokens = self._request.shape.depth - spine_depth
        for rank, (end, length) in enumerate(self._alternatives(spine_depth), start=1):
            chance /= 2
            run = _copy(self._request.token_ids, end, num_tokens)
            self._add_run(run, parent, chance, length, 1.0, rank)

    def _alternatives(self, spine_depth: int) -> list[tuple[int, int]]:
        """(end of the occurrence, match length) of up to ``width - 1`` continuations."""
        token_ids = self._request.token_ids
        tail = (self._tail + self._run[:spine_depth])[-MAX_MATCH_LENGTH:]
        taken = self._run[spine_depth]
        best: dict[int, tuple[int, int]] = {}
        for end in self._index.earlier(pack(tail[-16:]), _MAX_OCCURRENCES):
            token_id = token_ids[end + 1]
            if token_id == taken:
                continue
            length = common_suffix_length(token_ids, end, tail)
            if token_id not in best or length > best[token_id][1]:
                best[token_id] = (end, length)
        # Stable: among equal lengths the most recently seen stays first.
        ranked = sorted(best.values(), key=lambda found: found[1], reverse=True)
        return ranked[: self._request.shape.width - 1]

    def _add_run(
        self, run: list[int], parent: int, reached: float, length: int, first: float, rank: int
    ) -> None:
        """Append a run of nodes under ``parent``; ``first`` is the chance of its first token."""
        weight = reached * first
        features = [match_feature(length, rank), *_run_features(length + 1, len(run) - 1)]
        for offset, (token_id, feature) in enumerate(zip(run, features, strict=True)):
            self._token_ids.append(token_id)
            self._parents.append(parent)
            self._features.append(feature)
            self._weights.append(weight)
            parent = len(self._token_ids) - 1
            weight *= _likely(length + offset + 1)
