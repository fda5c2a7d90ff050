"""One request's grammar: the tokens that may follow its text, and any draft path after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.grammar.mask_time import MaskTime
from engine.grammar.vocabulary import error_of

Path = tuple[int, ...]
"""Draft tokens after the text."""
_LEXER_ERROR = "lexer error"
"""Copies of a compiled grammar share their lexer and its limits. Other errors come of the text alone, and
come again."""
_MAX_RENEWALS = 3
_MAX_RENEWAL_SECONDS = 0.25
_TOKENS_AT_ONCE = 16


class GrammarConstraint:
    """Walks one matcher from path to path, back to where two of them part and forward from there; what
    it finds is kept until the text grows. A mask depends on text and path alone, so a token is allowed
    with drafts if and only if it is without them.

    Where the grammar forces what is written next, only the tokens that the tokenizer itself would write
    it with are allowed: one per position. Those are ``forced``, and cost a request no choice.

    A text may come to where it cannot go on: its grammar leaves no way to an end, or the matcher reaches
    one of its limits; trials at admission see that near the start only. There the text ``is_cut``: it may
    end, and nothing else. ``time`` says what the matcher takes and may take.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        renew: Callable[[], Any],
        time: MaskTime | None = None,
    ) -> None:
        """``matcher``: an ``llguidance.LLMatcher`` of the request's own, at the start of the text. Once
        in error it stays so, and ``renew`` makes another one. ``eos_token_ids`` end a text."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._renew = renew
        self.time = time or MaskTime()
        self._num_renewals = 0
        # A copy that has stayed at the text, made before the matcher leaves it.
        self._spare: Any = None
        self._text: list[int] = []
        self._at: Path = ()
        self._masks: dict[Path, NDArray[np.uint8] | None] = {}
        self._forced: dict[Path, Path] = {}
        self._cuts: dict[Path, str] = {}
        # Why the text itself cannot be taken in any more.
        self._lost = ""

    def append(self, token_ids: Sequence[int]) -> None:
        """The text has grown. Raises ValueError where the grammar does not allow it."""
        num_rows = len(self._masks)
        self._masks.clear()
        self._forced.clear()
        self._cuts.clear()
        if not self._lost:
            with self.time.measured():
                self._take_in(tuple(token_ids))
        self._text.extend(token_ids)
        self._lost = self.time.end_step(num_rows) or self._lost

    def _take_in(self, path: Path) -> None:
        """Make ``path`` the place that paths begin at."""
        if self._move(path, comes_back=False):
            self._at, self._spare = (), None
        elif self._matcher.is_error():
            self._lost = self._lost or error_of(self._matcher)
        elif not self._lost:
            raise ValueError(f"the grammar does not allow token {path[len(self._at)]} here")

    def allowed(self, path: Path) -> NDArray[np.bool_] | None:
        """Tokens that may follow ``path``, one bool per token: ``[vocab_size]``. None where the path
        itself is not allowed, or ends the text."""
        if path not in self._masks:
            with self.time.measured():
                self._masks[path] = self._mask(path)
        mask = self._masks[path]
        if mask is None:
            return None
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accepts(self, path: Path) -> bool:
        """Returns whether the text may go on with ``path``. A token that ends the text is none of it."""
        if self._masks.get(path) is not None:
            return True
        with self.time.measured():
            return self._move(path)

    def num_maskable(self, paths: Sequence[Path]) -> int:
        """Masks one path after another while the step has time for it, the first in any case. Returns how
        many."""
        start = self.time.spent
        for num_masked, path in enumerate(paths):
            if num_masked and self.time.is_spent(start):
                return num_masked
            self.allowed(path)
        return len(paths)

    def forced(self, path: Path = ()) -> Path:
        """The tokens that have to follow an allowed ``path``, up to the next choice."""
        if path not in self._forced:
            self._forced[path] = ()
            with self.time.measured():
                if self._move(path) and not self._lost:
                    self._keep_spare()
                    self._forced[path] = tuple(self._matcher.compute_ff_tokens())
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
            self._cuts[path] = error_of(self._matcher)
            if not self._cuts[path].startswith(_LEXER_ERROR):
                if not path:
                    self._lost = self._cuts[path]
                break
        self._cuts[path] = self._lost or self._cuts[path]
        return self._only_ends()

    def _may_follow(self, path: Path, mask: NDArray[np.uint8]) -> bool:
        """Consumes a token that is the only allowed one, to distinguish such a mask from one that hit a
        limit: forced text is allowed although its end was not found, and refused when it comes."""
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

    def _move(self, path: Path, comes_back: bool = True) -> bool:
        """Take the matcher to ``path``; False where it leads nowhere."""
        for _ in range(2):
            if self._matcher.is_error() and not self._lost:
                # Another request's, since they share a lexer, or a draft's doing.
                self._restart()
            if self._lost:
                break
            if self._go_back(path):
                if path and comes_back:
                    self._keep_spare()
                if self._go_on(path):
                    return True
            if not self._matcher.is_error():
                return False
        return path == ()

    def _keep_spare(self) -> None:
        """To be called before the matcher leaves the text, or may break there."""
        if self._spare is None and not self._at:
            self._spare = self._matcher.deep_copy()

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
        """Another matcher, at the text: the spare one. Where its lexer is of no use, the text is taken in
        again, which is done a few times only, and only if it does not take long."""
        is_lexers = error_of(self._matcher).startswith(_LEXER_ERROR)
        self._at = ()
        if self._spare is not None and not is_lexers:
            self._matcher, self._spare = self._spare, None
            return
        self._num_renewals += 1
        if self._num_renewals > _MAX_RENEWALS:
            self._lost = error_of(self._matcher)
            return
        self._matcher, self._spare = self._renew(), None
        end = self.time.clock() + _MAX_RENEWAL_SECONDS
        for first in range(0, len(self._text), _TOKENS_AT_ONCE):
            part = self._text[first : first + _TOKENS_AT_ONCE]
            if self._matcher.try_consume_tokens(part) < len(part):
                self._lost = error_of(self._matcher) or "its text cannot be followed again"
            elif self.time.clock() > end:
                self._lost = "its text takes too long to be followed again"
            if self._lost:
                return


Fields = Sequence[tuple[str, str]]
"""Fields of a request, and the grammars that a grammar was made of."""
Constrain = Callable[[str, Fields], GrammarConstraint]
"""Makes the constraint of a request's grammar, as ``GrammarCompiler.constraint`` does."""
