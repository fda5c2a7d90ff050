"""``nasd_one_level`` and ``nasd``: counted n-grams, the likeliest known continuation drafted.

After the n-gram assisted decoding of romsto/Speculative-Decoding, written anew, with these changes:

- a context of ``n - 1`` tokens is learned from the first time it is complete (theirs skipped it);
- back-off reaches one-token contexts, and ``n = 2`` works (theirs never stored them);
- an order nothing was learned for yet is unknown, not an error;
- the context of an observed row is the tokens before the one that is counted, never including it;
- the first token after the prompt teaches like any other, filler included;
- filler counts only tokens that the target could have sampled;
- ties: the highest count, then the one counted last (theirs kept the first ever seen);
- random drafts, when asked for, are a function of the position, so a run can be repeated;
- memory is bounded (``drafters.tables.ngram_counts`` says how).

Verification, where the original emitted a second sample instead of the tested one, is not here.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from drafters.base import (
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    DraftShape,
    Observation,
    OptionValue,
)
from drafters.contexts import TOKEN_BITS, window_mask
from drafters.per_request import PerRequestDrafter
from drafters.tables.ngram_counts import Continuation, NgramCounts
from drafters.tree import EMPTY, ROOT, DraftTree

_MAX_VOCABULARY = 8_192
_NUM_SHARE_BUCKETS = 8
_RANDOM_FEATURE = 0
_MASK_64 = (1 << 64) - 1


def share_feature(context_length: int, share: float) -> int:
    """Bucket of (tokens of context, share of the context's counts): 8..63; 0 is a random token."""
    bucket = min(int(share * _NUM_SHARE_BUCKETS), _NUM_SHARE_BUCKETS - 1)
    return min(context_length, 7) * _NUM_SHARE_BUCKETS + bucket


_SHARED_OPTIONS = (
    DrafterOption(
        "stop_if_unknown",
        True,
        "Stop drafting at a context that was never seen; false drafts a random seen token instead.",
    ),
    DrafterOption(
        "filler_top_k",
        0,
        "Also count the target's top-k tokens at each position; 0: emitted tokens only.",
        0,
        16,
    ),
    DrafterOption(
        "max_contexts", 32_768, "Contexts remembered; the least recently used go first.", 1_024, 1e6
    ),
)

ONE_LEVEL_INFO = DrafterInfo(
    name="nasd_one_level",
    description="Counted n-grams: the likeliest token seen after exactly the last n - 1 tokens.",
    drafts_trees=True,
    options=(
        DrafterOption("n", 3, "Length of the n-gram: n - 1 tokens of context and one more.", 2, 8),
        *_SHARED_OPTIONS,
    ),
)


class NasdInfo(DrafterInfo):
    """Adds the check that spans two options."""

    def resolve(self, given: Mapping[str, Any]) -> dict[str, OptionValue]:
        options = DrafterInfo.resolve(self, given)
        if int(options["min_context"]) > int(options["n"]) - 1:
            raise ValueError("min_context must not exceed n - 1")
        return options


INFO = NasdInfo(
    name="nasd",
    description=(
        "Counted n-grams with back-off: the likeliest token seen after the last n - 1 tokens, or "
        "after the longest known ending of them. Learns from the prompt and from what is emitted."
    ),
    drafts_trees=True,
    options=(
        DrafterOption("n", 4, "Longest n-gram: up to n - 1 tokens of context and one more.", 2, 8),
        DrafterOption("min_context", 1, "Shortest context that backing off may use.", 1, 7),
        *_SHARED_OPTIONS,
    ),
)


class NasdOneLevelDrafter(PerRequestDrafter):
    """Contexts of exactly ``n - 1`` tokens."""

    def __init__(self) -> None:
        super().__init__(ONE_LEVEL_INFO, _one_level_state)


class NasdDrafter(PerRequestDrafter):
    """Contexts of ``n - 1`` down to ``min_context`` tokens, the longest known one used."""

    def __init__(self) -> None:
        super().__init__(INFO, _back_off_state)


def _one_level_state(token_ids: Sequence[int], options: Mapping[str, OptionValue]) -> NasdState:
    length = int(options["n"]) - 1
    return NasdState(token_ids, options, (length,))


def _back_off_state(token_ids: Sequence[int], options: Mapping[str, OptionValue]) -> NasdState:
    lengths = range(int(options["n"]) - 1, int(options["min_context"]) - 1, -1)
    return NasdState(token_ids, options, tuple(lengths))


class _Candidate(NamedTuple):
    """A tree node in the making; the smallest is the likeliest, then the one found first."""

    negative_weight: float
    serial: int
    parent: int  # index among the chosen
    on_spine: bool
    depth: int
    window: int  # what comes before the token
    continuation: Continuation


def _spine_first(chosen: Sequence[_Candidate]) -> DraftTree:
    """The tree of these nodes (parents before children), the likeliest chain as its first nodes."""
    order = sorted(range(len(chosen)), key=lambda index: not chosen[index].on_spine)  # stable
    index_of = {ROOT: ROOT} | {old: new for new, old in enumerate(order)}
    return DraftTree(
        [chosen[index].continuation[0] for index in order],
        [index_of[chosen[index].parent] for index in order],
        [_feature(chosen[index].continuation) for index in order],
    )


def _feature(continuation: Continuation) -> int:
    _, context_length, share = continuation
    return share_feature(context_length, share) if context_length else _RANDOM_FEATURE


def _scramble(counter: int) -> int:
    """A 64-bit mixer (the finaliser of SplitMix64, Steele et al. 2014): counters to even noise."""
    mixed = (counter + 1) * 0x9E3779B97F4A7C15 & _MASK_64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK_64
    return mixed ^ (mixed >> 31)


class NasdState:
    """One request: its counts, learned from prompt and emitted tokens, and its drafts from them."""

    def __init__(
        self,
        token_ids: Sequence[int],
        options: Mapping[str, OptionValue],
        context_lengths: tuple[int, ...],
    ) -> None:
        """``context_lengths``: longest first."""
        self.num_top_tokens = int(options["filler_top_k"])
        self._counts = NgramCounts(context_lengths, int(options["max_contexts"]))
        self._drafts_random = not options["stop_if_unknown"]
        self._mask = window_mask(context_lengths[0])
        self._window = 0
        self._num_tokens = 0
        self._vocabulary: dict[int, None] = {}
        self._vocabulary_list: list[int] = []
        self._learn(token_ids)

    def size(self) -> int:
        """Contexts held."""
        return len(self._counts)

    def observe(self, observation: Observation) -> None:
        first = len(observation.token_ids) - len(observation.emitted_token_ids)
        if (
            self.num_top_tokens == 0
            or observation.top_token_ids is None
            or first < self._num_tokens
        ):
            self._learn(observation.token_ids)
            return
        self._learn(observation.token_ids[:first])
        for row, token_id in zip(observation.path, observation.emitted_token_ids, strict=False):
            # Best last, and the emitted token after them all: among equal counts the last wins.
            for filler in reversed(observation.top_token_ids[row][: self.num_top_tokens]):
                self._counts.add(self._window, filler)
            self._learn_one(token_id)
        self._learn(observation.token_ids)

    def propose(self, request: DraftRequest) -> DraftTree:
        self._learn(request.token_ids)
        depth = min(request.max_nodes, request.shape.depth)
        if depth < 1:
            return EMPTY
        if request.shape.width == 1:
            return self._chain(depth)
        return self._tree(request.max_nodes, request.shape)

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of the request's list that were not counted yet."""
        for token_id in token_ids[self._num_tokens :]:
            self._learn_one(token_id)

    def _learn_one(self, token_id: int) -> None:
        window = self._window
        self._counts.add(window, token_id)
        self._window = ((window << TOKEN_BITS) | (token_id + 1)) & self._mask
        self._num_tokens += 1
        if (
            self._drafts_random
            and token_id not in self._vocabulary
            and len(self._vocabulary) < _MAX_VOCABULARY
        ):
            self._vocabulary[token_id] = None
            self._vocabulary_list.append(token_id)

    def _chain(self, num_nodes: int) -> DraftTree:
        """The argmax chain: each token the likeliest after those before it."""
        token_ids: list[int] = []
        features: list[int] = []
        window, mask, best = self._window, self._mask, self._counts.best
        while len(token_ids) < num_nodes:
            token_id, context_length, share = best(window)
            if context_length == 0:
                if not self._drafts_random or not self._vocabulary_list:
                    break
                token_id = self._random_token(len(token_ids))
                features.append(_RANDOM_FEATURE)
            else:
                features.append(share_feature(context_length, share))
            token_ids.append(token_id)
            window = ((window << TOKEN_BITS) | (token_id + 1)) & mask
        return DraftTree(token_ids, range(-1, len(token_ids) - 1), features)

    def _tree(self, max_nodes: int, shape: DraftShape) -> DraftTree:
        """Best first by the product of shares along the path; the argmax chain in front."""
        chosen: list[_Candidate] = []
        waiting: list[_Candidate] = []
        root = _Candidate(-1.0, 0, ROOT, True, 0, 0, (0, 0, 1.0))
        serial = self._expand(waiting, root, ROOT, self._window, shape.width)
        while waiting and len(chosen) < max_nodes:
            node = heapq.heappop(waiting)
            chosen.append(node)
            if node.depth < shape.depth:
                window = ((node.window << TOKEN_BITS) | (node.continuation[0] + 1)) & self._mask
                serial = self._expand(waiting, node, len(chosen) - 1, window, shape.width, serial)
        return _spine_first(chosen)

    def _expand(
        self,
        waiting: list[_Candidate],
        node: _Candidate,
        index: int,
        window: int,
        width: int,
        serial: int = 0,
    ) -> int:
        """Queue the children of ``node``, the ``index``-th chosen; the next free serial number."""
        found = self._counts.likeliest(window, width)
        if not found and self._drafts_random and self._vocabulary_list:
            found = [(self._random_token(node.depth), 0, 1.0 / len(self._vocabulary_list))]
        on_spine, weight, depth = node.on_spine, node.negative_weight, node.depth + 1
        for continuation in found:
            heapq.heappush(
                waiting,
                _Candidate(
                    weight * continuation[2], serial, index, on_spine, depth, window, continuation
                ),
            )
            on_spine = False
            serial += 1
        return serial

    def _random_token(self, offset: int) -> int:
        """A seen token drawn by the position it is drafted for."""
        return self._vocabulary_list[
            _scramble(self._num_tokens + offset) % len(self._vocabulary_list)
        ]
