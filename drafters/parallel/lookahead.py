"""``lookahead``: Lookahead decoding (Fu et al., arXiv 2402.02057).

Every step verifies guesses from a pool of n-grams and, in the same forward, a window that makes new
n-grams by Jacobi iteration. Both are ordinary draft nodes, merged where they begin alike, so a window's
token that turns out right is accepted like any other, and sampling is as lossless as greedy decoding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import cycle, islice

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    Options,
    TextReader,
    drafter,
)
from drafters.tree import ROOT, DraftTree, TreeBuilder

_MAX_KEYS = 4096
_MAX_PROMPT_TOKENS = 8192
"""N-grams come from this much of a prompt's end."""
_NUM_FILLERS = 61

_NUM_GUESS_FEATURES = 8
WINDOW_FEATURE = _NUM_GUESS_FEATURES
"""Guesses have their rank as a feature, 0 the newest; level 0 has this one, other levels the next."""


@lru_cache(maxsize=1024)
def fit(max_nodes: int, width: int, n: int, num_guesses: int) -> tuple[int, int]:
    """Returns the largest (width of the window, number of guesses) within ``max_nodes``: guesses give
    way first, down to one, then columns. At width 0 there is no window, and one guess, cut to what
    there is, is always left."""
    per_guess = n - 1
    for fitting_width in range(width, 0, -1):
        room = max_nodes - num_window_nodes(fitting_width, n)
        if room >= per_guess:
            return fitting_width, min(num_guesses, room // per_guess)
    return 0, max(1, min(num_guesses, max_nodes // per_guess))


@drafter
class LookaheadDrafter(Drafter):
    """See the module. State per request: a window and a pool, both bounded."""

    info = DrafterInfo(
        "lookahead",
        "Lookahead decoding: grows n-grams by Jacobi iteration in a window of guesses and verifies "
        "those that begin with the last token, in one forward. Needs no model and no repetition in "
        "the text, but some 50 rows per request and step: for few requests on a fast device.",
        drafts_trees=False,
        options=(
            DrafterOption(
                "window", 7, "W: columns, the positions ahead that are iterated on.", 1, 60
            ),
            DrafterOption("ngram", 5, "N: length of an n-gram; the window has N - 1 levels.", 2, 8),
            DrafterOption("guesses", 7, "G: n-grams kept per token and verified per step.", 1, 60),
            DrafterOption("pool_from_prompt", True, "Start the pool with the prompt's n-grams."),
        ),
        needs=DrafterNeeds(all_or_nothing=True),
        cost="no model; with the default options up to 55 rows of the target in every step",
    )

    def start(self, request: NewRequest) -> LookaheadState:
        return LookaheadState(request.token_ids, request.options)


class LookaheadState(TextReader):
    """One request's window and pool."""

    def __init__(self, token_ids: Sequence[int], options: Options) -> None:
        self._n = int(options["ngram"])
        self._width = int(options["window"])
        self._num_guesses = int(options["guesses"])
        self._pool = NgramPool(self._n, self._num_guesses, _MAX_KEYS)
        prompt = list(token_ids[-_MAX_PROMPT_TOKENS:])
        self._first_read = len(token_ids) - len(prompt)
        super().__init__(token_ids, self._first_read, bool(options["pool_from_prompt"]))
        # Of the request alone, so that a text drafts alike wherever and whenever it is written.
        rng = random.Random(hash(tuple(prompt)))
        fillers = rng.choices(prompt or [0], k=_NUM_FILLERS)
        self._window = LookaheadWindow(self._width, self._n, fillers)

    def _read(self, start: int, end: int) -> None:
        self._pool.insert_text(self._token_ids[max(self._first_read, start - self._n + 1) : end])

    def propose(self, request: DraftRequest) -> DraftTree:
        self._read_rest()
        # The last column reaches as deep as this; columns that were cut would stop the window.
        width = min(self._width, request.shape.depth - self._n + 3)
        width, num_guesses = fit(request.max_nodes, width, self._n, self._num_guesses)
        builder = TreeBuilder()
        for rank, guess in enumerate(self._pool.newest(request.token_ids[-1], num_guesses)):
            node, feature = ROOT, min(rank, _NUM_GUESS_FEATURES - 1)
            for token_id in guess:
                node = builder.add(node, token_id, feature)
        if width:
            self._window.resize(width)
            self._window.add_to(builder, WINDOW_FEATURE)
        return builder.best(request.max_nodes, depth=request.shape.depth)

    def observe(self, observation: Observation) -> None:
        """Pools the text's new n-grams and the window's, and moves the window on."""
        self._read_rest()
        token_ids = observation.token_ids
        num_new = len(observation.emitted_token_ids)
        # Those of the text last: they are what the target wrote in earnest.
        if len(token_ids) > num_new:
            anchor = token_ids[-num_new - 1]
            rows = observation.row_token_ids
            for key, *continuation in self._window.advance(anchor, observation.tree, rows):
                self._pool.insert(key, tuple(continuation))
        self._pool.insert_text(token_ids[-num_new - self._n + 1 :])


def num_window_nodes(width: int, n: int) -> int:
    """Returns the most nodes that a window has at any time, its first steps included."""
    return max((width + n - 3 - level) + level * (width + n - 2 - level) for level in range(n - 1))


class LookaheadWindow:
    """The 2-D window of Lookahead decoding: ``n - 1`` levels of guesses over ``width`` columns.

    Level 0, column 0 is the anchor; column c of level r stands for the text at position
    ``anchor + r + c``, as guessed ``n - 1 - r`` steps ago. As draft nodes, level 0 is a chain and every
    column hangs under its level-0 token:

        anchor - 0,1 - 0,2 - 0,3         level 0
          |       |     |     |
         1,0     1,1   1,2   1,3         level 1
          |       |     |     |
         2,0     2,1   2,2   2,3         level 2: the target's tokens at these rows are the next level

    so a row sees what the method's mask lets it see, and its depth is its position. A step gives every
    column one more token: level 0 is dropped, the new tokens become the last level, and the window has
    moved on by one position, whatever was accepted.

    It starts with level 0 alone, ``width + n - 3`` random tokens of the prompt; each of the first
    ``n - 2`` steps adds a level and takes the first column off.

    ``fillers`` are the tokens that level 0 starts from and that added columns are made of.
    """

    def __init__(self, width: int, n: int, fillers: Sequence[int]) -> None:
        self.n = n
        self.levels: list[list[int]] = [[]]
        """The tokens: level 0 without its column 0, then the levels above it from column 0 on."""
        self._fillers = cycle(fillers)
        self._width = 0
        self.resize(width)

    @property
    def is_full(self) -> bool:
        """All ``n - 1`` levels are there, so a step completes n-grams."""
        return len(self.levels) == self.n - 1

    def resize(self, width: int) -> None:
        """Cuts columns off the end or adds columns of fillers there."""
        if width == self._width:
            return
        self._width = width
        num_columns = width + self.n - 1 - len(self.levels)
        for rank, level in enumerate(self.levels):
            num_wanted = num_columns - (rank == 0)
            del level[num_wanted:]
            level += islice(self._fillers, num_wanted - len(level))

    def add_to(self, builder: TreeBuilder, feature: int) -> None:
        """Hangs the window under the root: level 0 with ``feature``, the others with the next."""
        column, add, upper_feature = ROOT, builder.add, feature + 1
        first, *uppers = self.levels
        for index, above in enumerate(zip(*uppers, strict=True) if uppers else [()] * len(first)):
            node = column
            for token_id in above:
                node = add(node, token_id, upper_feature)
            if index < len(first):
                column = add(column, first[index], feature)

    def advance(
        self, anchor: int, tree: DraftTree, row_token_ids: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Takes in a step: ``anchor`` it started from, what was verified and what the target said.

        Returns the n-grams of a full window, one per column whose rows were all verified. Where rows
        are missing (a shortage cut the tree, or nothing was granted) the window stays as it is.
        """
        nodes = {
            (parent, token_id): node
            for node, (token_id, parent) in enumerate(
                zip(tree.token_ids, tree.parents, strict=True)
            )
        }
        columns = [anchor, *self.levels[0]]
        newest: list[int] = []
        ngrams: list[tuple[int, ...]] = []
        for index, tip in enumerate(self._tips(nodes)):
            if tip is None:
                continue
            token_id = row_token_ids[tip + 1]
            newest.append(token_id)
            if self.is_full:
                above = (level[index] for level in self.levels[1:])
                ngrams.append((columns[index], *above, token_id))
        if len(newest) == len(columns):
            self._slide(newest)
        return ngrams

    def _tips(self, nodes: Mapping[tuple[int, int], int]) -> Iterator[int | None]:
        """Yields per column the node of its last level, None where it was not verified."""
        column: int | None = ROOT
        for index in range(len(self.levels[0]) + 1):
            if index and column is not None:
                column = nodes.get((column, self.levels[0][index - 1]))
            tip = column
            for level in self.levels[1:]:
                if tip is not None:
                    tip = nodes.get((tip, level[index]))
            yield tip

    def _slide(self, newest: list[int]) -> None:
        if self.is_full:
            self.levels = [*self.levels[1:], newest]
            del self.levels[0][0]  # the next anchor takes the place of column 0
        else:
            self.levels = [*(level[1:] for level in self.levels), newest[1:]]


class NgramPool:
    """N-grams by their first token: up to ``num_per_key`` tuples of the ``n - 1`` tokens that followed,
    newest last.

    What is inserted again counts as new; the oldest goes first, of a key's tuples as of the keys.
    Looking up refreshes nothing. At most ``max_keys`` keys.
    """

    def __init__(self, n: int, num_per_key: int, max_keys: int) -> None:
        self.n = n
        self._num_per_key = num_per_key
        self._max_keys = max_keys
        self._ngrams: dict[int, list[tuple[int, ...]]] = {}

    def insert(self, key: int, continuation: tuple[int, ...]) -> None:
        """Adds one n-gram: ``key`` and the ``n - 1`` tokens after it."""
        held = self._ngrams.pop(key, None)
        if held is None:
            if len(self._ngrams) >= self._max_keys:
                del self._ngrams[next(iter(self._ngrams))]
            held = []
        elif continuation in held:
            held.remove(continuation)
        elif len(held) >= self._num_per_key:
            del held[0]
        held.append(continuation)
        self._ngrams[key] = held  # last among the keys

    def insert_text(self, token_ids: Sequence[int]) -> None:
        """Adds every n-gram of a text, first to last."""
        for start in range(len(token_ids) - self.n + 1):
            end = start + self.n
            self.insert(token_ids[start], tuple(token_ids[start + 1 : end]))

    def newest(self, key: int, num: int) -> list[tuple[int, ...]]:
        """Returns up to ``num`` continuations of ``key``, the newest first."""
        held = self._ngrams.get(key)
        return held[: -num - 1 : -1] if held else []
