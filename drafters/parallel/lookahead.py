"""``lookahead``: Lookahead decoding (Fu et al., arXiv 2402.02057).

Every step verifies guesses from a pool of n-grams and, in the same forward, a window that makes new
n-grams by Jacobi iteration: see ``lookahead_window`` and ``ngram_pool``. Both are ordinary draft
nodes, merged where they begin alike, so a window's token that turns out right is accepted like any
other, and a whole n-gram brings its ``n - 1`` tokens and the target's next one.

Verification is the engine's own, so sampling is as lossless as greedy decoding (the published code
has to zero and renormalise for that). EOS has no special part: a guess that contains it ends the
text where the target says so.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from drafters.base import (
    DrafterInfo,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    Observation,
    OptionValue,
)
from drafters.parallel.lookahead_window import LookaheadWindow, num_window_nodes
from drafters.parallel.ngram_pool import NgramPool
from drafters.per_request import PerRequestDrafter
from drafters.tree import EMPTY, ROOT, DraftTree
from drafters.trie import Trie

_MAX_KEYS = 4096
_MAX_PROMPT_TOKENS = 8192
"""N-grams come from this much of a prompt's end."""
_NUM_FILLERS = 61

_NUM_GUESS_FEATURES = 8
WINDOW_FEATURE = _NUM_GUESS_FEATURES
"""Guesses have their rank as a feature, 0 the newest; level 0 has this one, other levels the next."""

INFO = DrafterInfo(
    name="lookahead",
    description=(
        "Lookahead decoding: grows n-grams by Jacobi iteration in a window of guesses and verifies "
        "those that begin with the last token, in one forward. Needs no model and no repetition in "
        "the text, but some 50 rows per request and step: for few requests on a fast device."
    ),
    drafts_trees=False,
    options=(
        DrafterOption("window", 7, "W: columns, the positions ahead that are iterated on.", 1, 60),
        DrafterOption("ngram", 5, "N: length of an n-gram; the window has N - 1 levels.", 2, 8),
        DrafterOption("guesses", 7, "G: n-grams kept per token and verified per step.", 1, 60),
        DrafterOption("pool_from_prompt", True, "Start the pool with the prompt's n-grams."),
    ),
    needs=DrafterNeeds(whole_trees=True),
    cost="no model; with the default options up to 55 rows of the target in every step",
)


class LookaheadSize(NamedTuple):
    """What fits into a draft. ``width`` 0: guesses only."""

    width: int
    num_guesses: int


@lru_cache(maxsize=1024)
def fit(max_nodes: int, width: int, n: int, num_guesses: int) -> LookaheadSize:
    """The largest size within ``max_nodes``: guesses give way first, down to one, then columns.

    Without a column there is no window, and one guess, cut to what there is, is always left.
    """
    per_guess = n - 1
    for fitting_width in range(width, 0, -1):
        room = max_nodes - num_window_nodes(fitting_width, n)
        if room >= per_guess:
            return LookaheadSize(fitting_width, min(num_guesses, room // per_guess))
    return LookaheadSize(0, max(1, min(num_guesses, max_nodes // per_guess)))


class LookaheadDrafter(PerRequestDrafter):
    """See the module. State per request: a window and a pool, both bounded."""

    def __init__(self) -> None:
        super().__init__(INFO, LookaheadState)


class LookaheadState:
    """One request's window and pool."""

    num_top_tokens = 0

    def __init__(self, token_ids: Sequence[int], options: Mapping[str, OptionValue]) -> None:
        self._n = int(options["ngram"])
        self._width = int(options["window"])
        self._num_guesses = int(options["guesses"])
        self._pool = NgramPool(self._n, self._num_guesses, _MAX_KEYS)
        prompt = list(token_ids[-_MAX_PROMPT_TOKENS:])
        if options["pool_from_prompt"]:
            self._pool.insert_text(prompt)
        # Of the request alone, so that a text drafts alike wherever and whenever it is written.
        rng = random.Random(hash(tuple(prompt)))
        fillers = rng.choices(prompt or [0], k=_NUM_FILLERS)
        self._window = LookaheadWindow(self._width, self._n, fillers)

    def propose(self, request: DraftRequest) -> DraftTree:
        if min(request.max_nodes, request.shape.depth) < 1:
            return EMPTY
        # The last column reaches as deep as this; columns that were cut would stop the window.
        width = min(self._width, request.shape.depth - self._n + 3)
        size = fit(request.max_nodes, width, self._n, self._num_guesses)
        trie = Trie(request.max_nodes, request.shape.depth)
        guesses = self._pool.newest(request.token_ids[-1], size.num_guesses)
        for rank, guess in enumerate(guesses):
            node: int | None = ROOT
            for token_id in guess:
                node = trie.add(node, token_id, min(rank, _NUM_GUESS_FEATURES - 1))
        if size.width:
            self._window.resize(size.width)
            self._window.add_to(trie, WINDOW_FEATURE)
        return trie.build()

    def observe(self, observation: Observation) -> None:
        """Pool the text's new n-grams and the window's, and move the window on."""
        token_ids = observation.token_ids
        num_new = len(observation.emitted_token_ids)
        # Those of the text last: they are what the target wrote in earnest.
        if len(token_ids) > num_new:
            anchor = token_ids[-num_new - 1]
            rows = observation.row_token_ids
            for key, *continuation in self._window.advance(anchor, observation.tree, rows):
                self._pool.insert(key, tuple(continuation))
        self._pool.insert_text(token_ids[-num_new - self._n + 1 :])

    def size(self) -> int:
        """N-grams held."""
        return self._pool.size()
