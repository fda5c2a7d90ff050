"""Describes a tokenizer to llguidance, and sets the limits within which llguidance works."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.request.errors import RequestError

_MAX_ITEMS = 50_000
"""The parser's limit for one mask or one run of forced text. It applies to one row as well, whose own
limit, 2,000 by default, is only checked when a token is consumed, after the mask has allowed it."""
_MAX_LEXER_STATES = 50_000
"""The limit for one grammar, for all requests that share it; 1 to 2 kB each."""
_MAX_GRAMMAR_SIZE = 100_000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's definition as JSON, the number of tokens that a mask covers, and the end-of-text
    tokens."""

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Raises RequestError where the tokenizer does not fit."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(
                "grammar", "this model's tokenizer is not a fast one; grammars need one"
            )
        size = len(tokenizer)
        # A model's configuration may name some that its tokenizer does not have.
        ends = tuple(token_id for token_id in eos_token_ids if token_id < size)
        if not ends:
            raise RequestError("grammar", "this model's tokenizer has no end-of-sequence token")
        return cls(backend.to_str(), max(vocab_size, size), ends)

    def build(self) -> Any:
        """Returns an ``llguidance.LLTokenizer``. Raises RequestError where it takes no such one."""
        from llguidance import LLTokenizer  # loaded where grammars are wanted

        ends = list(self.eos_token_ids)
        try:
            return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=ends)
        except ValueError as error:
            reason = f"grammars do not work with this model's tokenizer: {error}"
            raise RequestError("grammar", reason) from error


def new_matcher(vocabulary: Any, grammar: str, log_level: int = 0) -> Any:
    """Returns an ``llguidance.LLMatcher``, which may be in error. ``vocabulary``: what ``build`` gave."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=_MAX_ITEMS,
        step_max_items=_MAX_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary, grammar, log_level=log_level, limits=limits)


def error_of(matcher: Any) -> str:
    """Returns what is wrong with a matcher, in one line."""
    text = str(matcher.get_error()).strip()
    # Below an expression stands where it is at fault, then why.
    reason = re.search("^error: (.*)", text, re.MULTILINE)
    text = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", text)
    line = text.partition("\n")[0] + (f" {reason[1]}" if reason else "")
    return line if len(line) <= 300 else f"{line[:200]} ... {line[-90:]}"
