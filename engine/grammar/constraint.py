"""One request's grammar: the tokens that may follow its text, and any draft path after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Path = tuple[int, ...]
"""Draft tokens after the text."""


class GrammarConstraint:
    """Walks one matcher from path to path, back to where two of them part and forward from there; what
    it finds is kept until the text grows. A mask depends on text and path alone, so a token is allowed
    with drafts if and only if it is without them.

    Where the grammar forces what is written next, only the tokens that the tokenizer itself would write
    it with are allowed: one per position. Those are ``forced``, and cost a request no choice.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """``matcher``: an ``llguidance.LLMatcher`` of the request's own, at the start of the text."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._at: Path = ()
        self._masks: dict[Path, NDArray[np.uint8] | None] = {}
        self._forced: dict[Path, Path] = {}

    def append(self, token_ids: Sequence[int]) -> None:
        """The text has grown. Raises ValueError where the grammar does not allow it."""
        self._masks.clear()
        self._forced.clear()
        self._move(())
        num_taken = self._matcher.try_consume_tokens(list(token_ids))
        if num_taken < len(token_ids):
            raise ValueError(f"the grammar does not allow token {token_ids[num_taken]} here")

    def allowed(self, path: Path) -> NDArray[np.bool_] | None:
        """Tokens that may follow ``path``, one bool per token: ``[vocab_size]``. None where the path
        itself is not allowed, or ends the text. Raises ValueError where the grammar has become too
        complex to go on."""
        if path not in self._masks:
            self._masks[path] = self._read_mask() if self._move(path) else None
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
            may_come = self._move(path)
            self._forced[path] = tuple(self._matcher.compute_ff_tokens()) if may_come else ()
        return self._forced[path]

    def _read_mask(self) -> NDArray[np.uint8]:
        """One bit per token, lowest first."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(f"the grammar gave up: {self._matcher.get_error()[:300]}")
        return mask[: -(-self._vocab_size // 8)]

    def _move(self, path: Path) -> bool:
        """Take the matcher to ``path``; False where it leads nowhere."""
        num_shared = 0
        for ours, theirs in zip(self._at, path, strict=False):
            if ours != theirs:
                break
            num_shared += 1
        if num_shared < len(self._at):
            self._matcher.rollback(len(self._at) - num_shared)
            self._at = path[:num_shared]
        rest = path[num_shared:]
        if rest:
            num_taken = self._matcher.try_consume_tokens(list(rest))
            self._at = path[: num_shared + num_taken]
        return len(self._at) == len(path)
