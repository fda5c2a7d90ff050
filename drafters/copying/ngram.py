"""``ngram``: prompt lookup. What followed the last tokens the last time they were seen?

After Saxena's prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding), in the
request's own tokens. The longest match of ``ngram_min``..``ngram_max`` tokens wins, then the most
recent one. A draft that reaches the end of the text goes on into itself, as an overlapped copy in LZ77
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    Options,
    ReadingState,
    drafter,
    in_order,
)
from drafters.contexts import (
    advanced,
    cyclic_run,
    num_equal_before,
    pack,
    run_features,
    window_mask,
    windows,
)
from drafters.tree import EMPTY, ROOT, DraftTree, TreeBuilder, chain

MAX_INDEXED_TOKENS = 32_768
MAX_MATCH_LENGTH = 32
_BULK_MIN_TOKENS = 64
# How far a tree looks for alternatives: past occurrences per branch point, and branch points.
_MAX_OCCURRENCES = 16
_MAX_BRANCH_POINTS = 4

_NUM_RANKS = 4
_BUCKET_STARTS = (1, 2, 3, 4, 5, 6, 8, 12, 20, MAX_MATCH_LENGTH)


def match_feature(match_length: int, sibling_rank: int) -> int:
    """Returns the bucket of (length of the match before the node, rank among siblings): 0..39.

    A node ``j`` deeper in a copied run is preceded by ``j`` more matching tokens if it is reached
    at all, so the length grows along the run.
    """
    bucket = sum(match_length >= start for start in _BUCKET_STARTS) - 1
    return max(bucket, 0) * _NUM_RANKS + min(sibling_rank, _NUM_RANKS - 1)


_RUN_FEATURES = [match_feature(length, 0) for length in range(MAX_MATCH_LENGTH + 1)]


def _likely(match_length: int) -> float:
    """Returns a rough chance that a copy goes on for one more token; only ranks nodes inside one tree."""
    return (match_length + 1) / (match_length + 3)


@drafter
class NgramDrafter(Drafter):
    """See the module. State per request: an ``NgramIndex``, which is bounded."""

    info = DrafterInfo(
        "ngram",
        "Prompt lookup: copies what followed the longest, then most recent, earlier occurrence of "
        "the request's last tokens. Best where the output repeats its prompt (edits, quotes, code).",
        options=(
            DrafterOption(
                "ngram_min", 2, "Shortest match, in tokens, that is worth a draft.", 1, 16
            ),
            DrafterOption("ngram_max", 8, "Longest match, in tokens, that is searched for.", 1, 16),
        ),
        check=partial(in_order, "ngram_min", "ngram_max"),
    )

    def start(self, request: NewRequest) -> NgramState:
        return NgramState(request.token_ids, request.options)

    def copies(self, request_id: str, num_tokens: int) -> tuple[int, int] | None:
        """See ``Drafter``."""
        state: NgramState = self._states[request_id]
        return state.orders if num_tokens <= MAX_INDEXED_TOKENS else None

    def copied(self, token_ids: Sequence[int], match_length: int) -> DraftTree:
        """See ``Drafter``."""
        return chain(token_ids, run_features(_RUN_FEATURES, match_length, len(token_ids)))


class NgramState(ReadingState):
    """One request: its index, and how to turn matches into chains and trees."""

    def __init__(self, token_ids: Sequence[int], options: Options) -> None:
        self.orders = int(options["ngram_min"]), int(options["ngram_max"])
        self._index = NgramIndex(*self.orders)
        self._token_ids = token_ids

    def read_prompt(self, num_tokens: int) -> int:
        """See ``ReadingState``."""
        return self._index.extend(self._token_ids, num_tokens)

    def observe(self, observation: Observation) -> None:
        self._index.extend(observation.token_ids)

    def propose(self, request: DraftRequest) -> DraftTree:
        token_ids = request.token_ids
        self._index.extend(token_ids)
        match = self._index.match
        if match < 0:
            return EMPTY
        tail = list(token_ids[-MAX_MATCH_LENGTH:])
        length = num_equal_before(token_ids, match + 1, tail, len(tail), MAX_MATCH_LENGTH)
        run = cyclic_run(token_ids, match + 1, request.depth)
        if request.shape.width > 1 and request.max_nodes > 1:
            return self._tree(request, tail, run, length)
        return chain(run, run_features(_RUN_FEATURES, length, len(run)))

    def _tree(
        self, request: DraftRequest, tail: list[int], run: list[int], length: int
    ) -> DraftTree:
        """Drafts the copied run as the spine, other known continuations as branches, the likeliest
        kept.

        Branches leave the spine at its first positions: the distinct tokens that followed recent
        occurrences of the shortest gram there, longest match first, each with its own copied run.
        ``tail``: the text's last tokens; ``length`` of them match.
        """
        builder = TreeBuilder()
        _add_run(builder, run, ROOT, _likely(length), length, 0)
        for spine_depth in range(min(len(run), _MAX_BRANCH_POINTS)):
            parent = spine_depth - 1
            reached = builder.weights[parent] if spine_depth else 1.0
            chance = reached * (1.0 - _likely(length + spine_depth))
            num_tokens = request.shape.depth - spine_depth
            before = (tail + run[:spine_depth])[-MAX_MATCH_LENGTH:]
            found = self._alternatives(request, before, run[spine_depth])
            for rank, (end, match_length) in enumerate(found, start=1):
                chance /= 2
                other = cyclic_run(request.token_ids, end + 1, num_tokens)
                _add_run(builder, other, parent, chance, match_length, rank)
        return builder.best(request.max_nodes)

    def _alternatives(
        self, request: DraftRequest, tail: list[int], taken: int
    ) -> list[tuple[int, int]]:
        """Returns (end of the occurrence, match length) of up to ``width - 1`` continuations of ``tail``
        other than the token ``taken``."""
        token_ids = request.token_ids
        best: dict[int, tuple[int, int]] = {}
        for end in self._index.earlier(pack(tail[-16:]), _MAX_OCCURRENCES):
            token_id = token_ids[end + 1]
            if token_id == taken:
                continue
            length = num_equal_before(token_ids, end + 1, tail, len(tail), MAX_MATCH_LENGTH)
            if token_id not in best or length > best[token_id][1]:
                best[token_id] = (end, length)
        # Stable: among equal lengths the most recently seen stays first.
        ranked = sorted(best.values(), key=lambda found: found[1], reverse=True)
        return ranked[: request.shape.width - 1]


def _add_run(
    builder: TreeBuilder, run: list[int], parent: int, weight: float, length: int, rank: int
) -> None:
    """Adds a run of nodes under ``parent``; ``weight`` is that of the first."""
    features = [match_feature(length, rank), *run_features(_RUN_FEATURES, length + 1, len(run) - 1)]
    for offset, (token_id, feature) in enumerate(zip(run, features, strict=True), start=1):
        parent = builder.add(parent, token_id, feature, weight)
        weight *= _likely(length + offset)


class NgramIndex:
    """Newest occurrence of every n-gram of ``ngram_min``..``ngram_max`` tokens of a growing text.

    ``extend`` makes one dictionary lookup and one store per order and token, whatever the length of
    the text. The walk that stores the grams ending at a token is also the search for that token's
    match, because a gram's newest earlier occurrence is what the store overwrites. ``match`` is the
    last token of the longest earlier gram that also ends the text, the most recent one where there
    are several; -1: none. ``links`` chains the occurrences of the shortest order, newest first.

    Memory: at most ``MAX_INDEXED_TOKENS`` tokens are indexed (about 130 bytes per token and order);
    beyond that the index starts again from the last half of them, so the oldest text is forgotten.
    """

    __slots__ = ("_base", "_levels", "_links", "_mask", "_window", "match", "num_tokens")

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        orders = range(ngram_min, ngram_max + 1)
        self._levels: list[tuple[int, dict[int, int]]] = [(window_mask(n), {}) for n in orders]
        self._mask = window_mask(ngram_max)
        self._window = 0
        self._base = 0
        self._links: list[int] = []
        self.match = -1
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int], most: int | None = None) -> int:
        """Indexes what ``token_ids`` has beyond ``num_tokens``, up to ``most`` of it, and finds the match
        of its end. Returns how many tokens it was."""
        num_tokens = len(token_ids)
        if num_tokens - self._base > MAX_INDEXED_TOKENS:
            self._restart(num_tokens - MAX_INDEXED_TOKENS // 2)
        start = self.num_tokens
        end = num_tokens if most is None else min(num_tokens, start + most)
        if end - start > _BULK_MIN_TOKENS:
            self._extend_in_bulk(token_ids[start : end - 1])
        for position in range(self.num_tokens, end):
            self._append(token_ids[position])
        return end - start

    def earlier(self, window: int, steps: int) -> list[int]:
        """Returns up to ``steps`` positions where the shortest gram of ``window`` ends, newest first.

        Only positions that have a next token: the end of the text is left out.
        """
        mask, newest = self._levels[0]
        position = newest.get(window & mask, -1)
        found: list[int] = []
        while position >= 0 and len(found) < steps:
            if position != self.num_tokens - 1:
                found.append(position)
            position = self._links[position - self._base]
        return found

    def _append(self, token_id: int) -> None:
        window = self._window = advanced(self._window, token_id, self._mask)
        position = self.num_tokens
        link = match = -1
        # Orders ascend, and a gram that occurred implies its shorter endings did: the last hit is
        # the longest. Grams that reach before the text's start pack zeros and so match nothing.
        for mask, newest in self._levels:
            key = window & mask
            previous = newest.get(key)
            newest[key] = position
            if previous is not None:
                match = previous
                if link < 0:
                    link = previous
        self._links.append(link)
        self.match = match
        self.num_tokens = position + 1

    def _extend_in_bulk(self, token_ids: Sequence[int]) -> None:
        """As ``_append`` for each, ``match`` aside, with the stores in C: a prompt opens faster."""
        rolled = list(windows(self._window, token_ids, self._mask))
        positions = range(self.num_tokens, self.num_tokens + len(rolled))
        shortest_mask, shortest = self._levels[0]
        for position, window in zip(positions, rolled, strict=True):
            key = window & shortest_mask
            self._links.append(shortest.get(key, -1))
            shortest[key] = position
        for level_mask, newest in self._levels[1:]:
            newest.update(zip(map(level_mask.__and__, rolled), positions, strict=True))
        self._window = rolled[-1]
        self.num_tokens = positions.stop

    def _restart(self, start: int) -> None:
        for _, newest in self._levels:
            newest.clear()
        self._links.clear()
        self._base = self.num_tokens = start
        self._window = 0
        self.match = -1
