"""``nasd_one_level`` and ``nasd``: counted n-grams, the likeliest known continuation drafted.

After the n-gram assisted decoding of romsto/Speculative-Decoding, written anew. Unlike there, a context
is learned from the first time it is complete, and its own tokens are those before the one that is
counted; back-off reaches contexts of one token; what was not learned yet is unknown, not an error;
filler counts only tokens that the target could have sampled; among equal counts the token counted last
wins; random drafts are a function of the position; memory is bounded; and verification is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compiled.noise_numbers import hashed
from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    OptionError,
    Options,
    TextReader,
    drafter,
)
from drafters.contexts import advanced, levels, window_mask
from drafters.tables.sharing import Generations
from drafters.tree import ROOT, Branch, DraftTree, best_first

MAX_CONTINUATIONS = 16
_MAX_VOCABULARY = 8_192
_NUM_SHARE_BUCKETS = 8


Continuation = tuple[int, int, float]
"""Token id, tokens of context it was counted under (0: unknown), share of that context's counts."""


def share_feature(context_length: int, share: float) -> int:
    """Returns the bucket of (tokens of context, share of its counts): 8..63; 0 for a random token."""
    if not context_length:
        return 0
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


@drafter
class NasdOneLevelDrafter(Drafter):
    """Contexts of exactly ``n - 1`` tokens."""

    info = DrafterInfo(
        "nasd_one_level",
        "Counted n-grams: the likeliest token seen after exactly the last n - 1 tokens.",
        options=(
            DrafterOption(
                "n", 3, "Length of the n-gram: n - 1 tokens of context and one more.", 2, 8
            ),
            *_SHARED_OPTIONS,
        ),
    )

    def start(self, request: NewRequest) -> NasdState:
        length = int(request.options["n"]) - 1
        return NasdState(request.token_ids, request.options, (length,))


def _check(options: Options) -> OptionError | None:
    wrong = int(options["min_context"]) > int(options["n"]) - 1
    message = "min_context must not exceed n - 1"
    return OptionError(message, "min_context", "n") if wrong else None


@drafter
class NasdDrafter(Drafter):
    """Contexts of ``n - 1`` down to ``min_context`` tokens, the longest known one used."""

    info = DrafterInfo(
        "nasd",
        "Counted n-grams with back-off: the likeliest token seen after the last n - 1 tokens, or "
        "after the longest known ending of them. Learns from the prompt and from what is emitted.",
        options=(
            DrafterOption(
                "n", 4, "Longest n-gram: up to n - 1 tokens of context and one more.", 2, 8
            ),
            DrafterOption("min_context", 1, "Shortest context that backing off may use.", 1, 7),
            *_SHARED_OPTIONS,
        ),
        check=_check,
    )

    def start(self, request: NewRequest) -> NasdState:
        options = request.options
        lengths = range(int(options["n"]) - 1, int(options["min_context"]) - 1, -1)
        return NasdState(request.token_ids, options, tuple(lengths))


class NasdState(TextReader):
    """One request: its counts, learned from prompt and emitted tokens, and its drafts from them."""

    def __init__(
        self, token_ids: Sequence[int], options: Options, context_lengths: tuple[int, ...]
    ) -> None:
        """``context_lengths``: longest first."""
        super().__init__(token_ids)
        self.num_top_tokens = int(options["filler_top_k"])
        self._counts = NgramCounts(context_lengths, int(options["max_contexts"]))
        self._drafts_random = not options["stop_if_unknown"]
        self._mask = window_mask(context_lengths[0])
        self._window = 0
        self._vocabulary: dict[int, None] = {}
        self._vocabulary_list: list[int] = []

    def _read(self, start: int, end: int) -> None:
        del start
        self._learn(self._token_ids[:end])

    def observe(self, observation: Observation) -> None:
        self._read_rest()
        first = len(observation.token_ids) - len(observation.emitted_token_ids)
        if self.num_top_tokens == 0 or observation.top_token_ids is None or first < self._num_read:
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
        self._read_rest()
        self._learn(request.token_ids)
        return self._tree(request.max_nodes, request.shape.width, request.shape.depth)

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens of the request's list that were not counted yet."""
        for token_id in token_ids[self._num_read :]:
            self._learn_one(token_id)

    def _learn_one(self, token_id: int) -> None:
        self._counts.add(self._window, token_id)
        self._window = advanced(self._window, token_id, self._mask)
        self._num_read += 1
        if (
            self._drafts_random
            and token_id not in self._vocabulary
            and len(self._vocabulary) < _MAX_VOCABULARY
        ):
            self._vocabulary[token_id] = None
            self._vocabulary_list.append(token_id)

    def _tree(self, max_nodes: int, width: int, max_depth: int) -> DraftTree:
        """Drafts the best by the product of shares along the path; the argmax chain in front."""

        def branches(node: int, weight: float, window: int, depth: int) -> Iterator[Branch]:
            counts = self._counts
            found = counts.likeliest(window, width) if width > 1 else counts.best(window)
            if not found and self._drafts_random and self._vocabulary_list:
                found = [(self._random_token(depth), 0, 1.0 / len(self._vocabulary_list))]
            for token_id, length, share in found:
                feature = share_feature(length, share)
                yield Branch(weight * share, node, token_id, feature, (window, depth + 1))

        def expand(node: int, branch: Branch) -> Iterator[Branch]:
            window, depth = branch.state
            if depth == max_depth:
                return iter(())
            window = advanced(window, branch.token_id, self._mask)
            return branches(node, branch.weight, window, depth)

        return best_first(branches(ROOT, 1.0, self._window, 0), expand, max_nodes)

    def _random_token(self, offset: int) -> int:
        """Returns a seen token picked by the position it is drafted for."""
        seen = self._vocabulary_list
        return seen[hashed(0, self._num_read + offset) % len(seen)]


class NgramCounts:
    """Counts of (context, next token) for the given context lengths; contexts are packed windows.

    Shares are ``count / (total + 1)``: a context seen once is believed by half. Within a context
    the highest count wins, then the token counted last.

    Memory: ``Generations`` of at most ``max_contexts`` contexts, all lengths together. A context keeps
    ``MAX_CONTINUATIONS`` tokens; the one counted least, then longest ago, makes room.
    """

    __slots__ = ("_contexts", "_levels")

    def __init__(self, context_lengths: tuple[int, ...], max_contexts: int) -> None:
        """``context_lengths``: longest first."""
        self._levels = levels(context_lengths)
        # Insertion order inside a context is the order of counting: the last one is the newest.
        self._contexts: Generations[dict[int, int]] = Generations(max_contexts)

    def __len__(self) -> int:
        return len(self._contexts)

    def add(self, window: int, token_id: int) -> None:
        """Counts ``token_id`` after every known length of ``window``'s ending."""
        contexts = self._contexts
        for _, mask, smallest in self._levels:
            key = window & mask
            if key < smallest:
                continue
            counts = contexts.young.get(key)
            if counts is None:
                counts = contexts.renewed(key, {})
            counts[token_id] = counts.pop(token_id, 0) + 1
            if len(counts) > MAX_CONTINUATIONS:
                _drop_least(counts)

    def best(self, window: int) -> list[Continuation]:
        """Returns the likeliest continuation under the longest known context, if there is one."""
        known = self._contexts.get
        for length, mask, smallest in self._levels:
            key = window & mask
            counts = known(key)
            if counts is None or key < smallest:
                continue
            if len(counts) == 1:
                ((token_id, count),) = counts.items()
                return [(token_id, length, count / (count + 1))]
            token_id = max(reversed(counts), key=counts.__getitem__)
            return [(token_id, length, counts[token_id] / (sum(counts.values()) + 1))]
        return []

    def likeliest(self, window: int, num_tokens: int) -> list[Continuation]:
        """Returns up to ``num_tokens`` distinct continuations, likeliest first; the first is ``best``'s.

        Those of the longest known context first; what their shares leave over is shared out in the
        same way under the shorter ones.
        """
        found: list[Continuation] = []
        seen: set[int] = set()
        left = 1.0
        for length, mask, smallest in self._levels:
            key = window & mask
            counts = self._contexts.get(key)
            if counts is None or key < smallest:
                continue
            scale = left / (sum(counts.values()) + 1)
            newest_first = list(counts)[::-1]
            for token_id in sorted(newest_first, key=counts.__getitem__, reverse=True):
                if token_id not in seen:
                    seen.add(token_id)
                    found.append((token_id, length, counts[token_id] * scale))
                    if len(found) == num_tokens:
                        return found
            left = scale
        return found


def _drop_least(counts: dict[int, int]) -> None:
    """The newest token is exempt: otherwise a full context could never learn another one."""
    newest = next(reversed(counts))
    del counts[min((token_id for token_id in counts if token_id != newest), key=counts.__getitem__)]
