"""One request's grammar: the tokens that may follow its text, and any draft path after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.grammar.vocabulary import error_of

Path = tuple[int, ...]
"""Draft tokens after the text."""


class GrammarConstraint:
    """Walks one matcher from path to path, back to where two of them part and forward from there; what
    it finds is kept until the text grows. A mask depends on text and path alone, so a token is allowed
    with drafts if and only if it is without them.

    Where the grammar forces what is written next, only the tokens that the tokenizer itself would write
    it with are allowed: one per position. Those are ``forced``, and cost a request no choice.

    A text may come to where it cannot go on: its grammar leaves no way to an end, or the matcher reaches
    one of its limits; trials at admission see that near the start only. There the text ``is_cut``: it may
    end, and nothing else.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        renew: Callable[[], Any],
    ) -> None:
        """``matcher``: an ``llguidance.LLMatcher`` of the request's own, at the start of the text. Once
        in error it stays so, and ``renew`` makes another one. ``eos_token_ids`` end a text."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._renew = renew
        self._text: list[int] = []
        self._at: Path = ()
        self._masks: dict[Path, NDArray[np.uint8] | None] = {}
        self._forced: dict[Path, Path] = {}
        self._cuts: dict[Path, str] = {}
        # Why the text itself cannot be taken in any more.
        self._lost = ""

    def append(self, token_ids: Sequence[int]) -> None:
        """The text has grown. Raises ValueError where the grammar does not allow it."""
        self._masks.clear()
        self._forced.clear()
        self._cuts.clear()
        if not self._lost:
            self._take_in(tuple(token_ids))
        self._text.extend(token_ids)

    def _take_in(self, path: Path) -> None:
        """Make ``path`` the place that paths begin at."""
        for _ in range(2):
            if self._go_back(path) and self._go_on(path):
                self._at = ()
                return
            if not self._matcher.is_error():
                raise ValueError(f"the grammar does not allow token {path[len(self._at)]} here")
            reason = error_of(self._matcher)
            self._restart()
            if self._lost:
                return
        self._lost = reason

    def allowed(self, path: Path) -> NDArray[np.bool_] | None:
        """Tokens that may follow ``path``, one bool per token: ``[vocab_size]``. None where the path
        itself is not allowed, or ends the text."""
        if path not in self._masks:
            self._masks[path] = self._mask(path)
        mask = self._masks[path]
        if mask is None:
            return None
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accepts(self, path: Path) -> bool:
        """Returns whether the text may go on with ``path``. A token that ends the text is none of it."""
        return self._masks.get(path) is not None or self._move(path)

    def forced(self, path: Path = ()) -> Path:
        """The tokens that have to follow an allowed ``path``, up to the next choice."""
        if path not in self._forced:
            may_come = not self._lost and self._move(path)
            self._forced[path] = tuple(self._matcher.compute_ff_tokens()) if may_come else ()
        return self._forced[path]

    def is_cut(self, path: Path) -> str:
        """Returns why the text cannot go on after a ``path`` that ``allowed`` was asked about, and is not
        whole either; "" where it can, or is."""
        return self._cuts.get(path, "")

    # --- the matcher ---

    def _mask(self, path: Path) -> NDArray[np.uint8] | None:
        """One bit per token, lowest first."""
        for _ in range(2):
            if not self._move(path):
                return None
            if self._lost:
                break
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if not self._matcher.is_error() and self._may_follow(path, mask):
                return mask[: -(-self._vocab_size // 8)]
            # It may have been a draft that used up what the matcher has: the second one has seen none.
            self._cuts[path] = error_of(self._matcher)
            self._restart()
        self._cuts[path] = self._lost or self._cuts[path]
        return self._only_ends()

    def _may_follow(self, path: Path, mask: NDArray[np.uint8]) -> bool:
        """Takes in a token that is the only one, which is how a mask is told from one that ran into a
        limit: forced text is allowed though its end was not found, and refused when it comes."""
        self._cuts.pop(path, None)
        places = mask.nonzero()[0]
        if len(places) != 1 or (bits := int(mask[places[0]])).bit_count() != 1:
            return True
        token_id = int(places[0]) * 8 + bits.bit_length() - 1
        if token_id in self._eos_token_ids:
            return True
        self._at = (*path, token_id)
        taken: bool = self._matcher.consume_token(token_id)
        return taken

    def _only_ends(self) -> NDArray[np.uint8]:
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[[each for each in self._eos_token_ids if each < self._vocab_size]] = True
        return np.packbits(bits, bitorder="little")

    def _move(self, path: Path) -> bool:
        """Take the matcher to ``path``; False where it leads nowhere."""
        for _ in range(2):
            if self._lost:
                break
            if self._go_back(path) and self._go_on(path):
                return True
            if not self._matcher.is_error():
                return False
            # Another request's, since they share a lexer, or a draft's doing: the second one is unharmed.
            self._restart()
        return path == ()

    def _go_back(self, path: Path) -> bool:
        """To where ``path`` parts from where the matcher is."""
        num_shared = 0
        for ours, theirs in zip(self._at, path, strict=False):
            if ours != theirs:
                break
            num_shared += 1
        num_back = len(self._at) - num_shared
        self._at = path[:num_shared]
        return num_back == 0 or bool(self._matcher.rollback(num_back))

    def _go_on(self, path: Path) -> bool:
        rest = path[len(self._at) :]
        if rest:
            num_taken = self._matcher.try_consume_tokens(list(rest))
            self._at = path[: len(self._at) + num_taken]
        return len(self._at) == len(path)

    def _restart(self) -> None:
        """Another matcher, at the text."""
        self._matcher = self._renew()
        self._at = ()
        if self._matcher.try_consume_tokens(self._text) < len(self._text):
            self._lost = error_of(self._matcher) or "its text cannot be followed again"
