"""``jacobi``: parallel fixed-point iteration over the next tokens (Santilli et al., arXiv 2305.10427).

A chain of guessed tokens is verified, and the target's tokens at its rows are the next guesses:

    y_i <- the target's token after the text and y_1 .. y_(i-1), for all i in one forward

What was accepted slides out at the front, and the row behind the last guess adds one at the end. The
verifier's noise belongs to positions, which makes the iteration deterministic at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.base import (
    Drafter,
    DrafterInfo,
    DrafterNeeds,
    DrafterOption,
    DraftRequest,
    NewRequest,
    Observation,
    OptionError,
    Options,
    RequestState,
    drafter,
)
from drafters.tree import DraftTree, chain

FRESH, CHANGED, UNCHANGED = 0, 1, 2
"""Features: never refined; the last step changed it; the last step confirmed it, given the guesses
before it."""

_FIRST_GUESSES = ("text", "last")


def _check(options: Options) -> OptionError | None:
    known = options["first_guess"] in _FIRST_GUESSES
    message = f"first_guess must be one of: {', '.join(_FIRST_GUESSES)}"
    return None if known else OptionError(message, "first_guess")


@drafter
class JacobiDrafter(Drafter):
    """See the module. State per request: its guesses, and one successor per distinct token."""

    info = DrafterInfo(
        "jacobi",
        "Jacobi decoding: guesses a run of tokens and refines all of them in every step, with no "
        "model and no memory. Seldom faster than plain decoding; the base that `lookahead` builds on.",
        drafts_trees=False,
        options=(
            DrafterOption("window", 8, "Tokens guessed ahead.", 1, 64),
            DrafterOption(
                "first_guess",
                "text",
                "What a guess starts from: `text`, the token that last followed the one before it; "
                "`last`, that one repeated.",
            ),
        ),
        check=_check,
        # A refused row is not lost: it improves the next step's guess.
        needs=DrafterNeeds(all_or_nothing=True),
        cost="no model; `window` rows of the target in every step",
    )

    def start(self, request: NewRequest) -> JacobiState:
        return JacobiState(request.token_ids, request.options)


class JacobiState(RequestState):
    """One request's iteration."""

    def __init__(self, token_ids: Sequence[int], options: Options) -> None:
        self._window = int(options["window"])
        self._uses_text = options["first_guess"] == "text"
        self._successors: dict[int, int] = {}
        self._num_read = 0
        self._guesses: list[int] = []
        self._features: list[int] = []
        self._read(token_ids)

    def propose(self, request: DraftRequest) -> DraftTree:
        num_nodes = min(self._window, request.depth)
        self._fill(request.token_ids[-1], num_nodes)
        return chain(self._guesses[:num_nodes], self._features[:num_nodes])

    def observe(self, observation: Observation) -> None:
        """Refines what was verified, which may be less than was proposed, and slides on."""
        self._read(observation.token_ids)
        refined = observation.row_token_ids
        num_emitted = len(observation.emitted_token_ids)
        features = [
            UNCHANGED if new == old else CHANGED
            for new, old in zip(refined, observation.tree.token_ids, strict=False)
        ]
        features.append(CHANGED)  # the row behind the last guess had nothing to confirm
        self._guesses = [*refined, *self._guesses[len(refined) :]][num_emitted:]
        self._features = [*features, *self._features[len(refined) :]][num_emitted:]

    def _read(self, token_ids: Sequence[int]) -> None:
        if self._uses_text:
            new = token_ids[max(0, self._num_read - 1) :]
            self._successors.update(zip(new, new[1:], strict=False))
        self._num_read = len(token_ids)

    def _fill(self, anchor: int, num_nodes: int) -> None:
        """Fills in first guesses up to the window's end."""
        previous = self._guesses[-1] if self._guesses else anchor
        while len(self._guesses) < num_nodes:
            previous = self._successors.get(previous, previous)
            self._guesses.append(previous)
            self._features.append(FRESH)
