"""From the text of a grammar to constraints of requests, by llguidance.

Chosen over xgrammar by measurement on trees (docs/structured_output.md): at a vocabulary of 128,000 it
masks a tree in half the time and needs 5 ms for a new schema where xgrammar takes 140, and its masks
leave the one canonical token where the grammar forces bytes, which is what drafts of forced tokens
live on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from engine.grammar.constraint import GrammarConstraint
from engine.request.errors import RequestError

_MAX_CACHED = 64
"""Compiled grammars: clients send the same few over and over."""


class GrammarCompiler:
    """For one tokenizer. Callable from any thread.

    ``vocab_size``: of the model's logits, never less than the tokenizer's; what the tokenizer does not
    know is never allowed. ``eos_token_ids`` end a text that may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled = lru_cache(_MAX_CACHED)(self._compile)

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A constraint at the start of a text. ``grammar``: as llguidance's ``grammar_from_*`` give it.

        Raises RequestError where it cannot be compiled, or the tokenizer does not fit.
        """
        with self._lock:
            return GrammarConstraint(self._compiled(grammar).deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher  # loaded with the first grammar

        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            reason = str(matcher.get_error()).strip().split("\n", 1)[0][:300]
            raise RequestError("grammar", f"the grammar cannot be used: {reason}")
        # The lexer's tables are built by the first mask, once for all copies.
        matcher.compute_bitmask()
        return matcher

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError(
                "grammar", "this model's tokenizer is not a fast one; grammars need one"
            )
        size = len(self._tokenizer)
        # A model's configuration may name some that its tokenizer does not have.
        ends = [token_id for token_id in self._eos_token_ids if token_id < size]
        if not ends:
            raise RequestError("grammar", "this model's tokenizer has no end-of-sequence token")
        wide = max(self._vocab_size, size)
        return LLTokenizer(backend.to_str(), n_vocab=wide, eos_token=ends)
