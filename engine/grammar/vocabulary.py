"""Describes a tokenizer to llguidance, and sets the limits within which llguidance works."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.request.errors import RequestError

_MAX_ITEMS = 50_000
"""The parser's limit for one mask or one run of forced text. It applies to one row as well, whose own
limit, 2,000 by default, is only checked when a token is consumed, after the mask has allowed it."""
_MAX_LEXER_STATES = 50_000
"""The limit for one grammar, for all requests that share it; 1 to 2 kB each."""
_MAX_GRAMMAR_SIZE = 100_000
_HIDDEN = "\ufdd0"
"""Before a special token's spelling: no character, which no text has."""
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|//.*|/(?:\\.|[^/\\\n])+/|<[^<>\[\]\s]+>')
"""Strings, comments, regular expressions, and special tokens by their spelling."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's definition as JSON, the number of tokens that a mask covers, the end-of-text tokens,
    and special tokens by their spelling.

    The definition hides these spellings: llguidance tokenizes text that a grammar forces, and what spells
    a special token there is text, too, which an end-of-text token would end.
    """

    tokenizer: str
    size: int
    eos_token_ids: tuple[int, ...]
    special: Mapping[str, int] = field(default_factory=dict)

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
        definition = json.loads(backend.to_str())
        special = _hide_special(definition)
        return cls(json.dumps(definition), max(vocab_size, size), ends, special)

    def with_ids(self, grammar: str) -> str:
        """Returns a grammar in Lark's notation with special tokens by their ids."""
        return _LARK.sub(self._with_id, grammar)

    def _with_id(self, found: re.Match[str]) -> str:
        token_id = self.special.get(found[0])
        return found[0] if token_id is None else f"<[{token_id}]>"

    def build(self) -> Any:
        """Returns an ``llguidance.LLTokenizer``. Raises RequestError where it takes no such one."""
        from llguidance import LLTokenizer  # loaded where grammars are wanted

        ends = list(self.eos_token_ids)
        try:
            return LLTokenizer(self.tokenizer, n_vocab=self.size, eos_token=ends)
        except ValueError as error:
            reason = f"grammars do not work with this model's tokenizer: {error}"
            raise RequestError("grammar", reason) from error


def _hide_special(definition: dict[str, Any]) -> dict[str, int]:
    """Spells special tokens as no text does. Returns them as they were spelled."""
    special = {
        each["content"]: each["id"] for each in definition["added_tokens"] if each["special"]
    }
    for each in definition["added_tokens"]:
        if each["special"]:
            each["content"] = _HIDDEN + each["content"]
    model = definition["model"]
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    for spelling, token_id in special.items():
        if isinstance(vocabulary, list):  # of pieces and their scores, as SentencePiece has it
            if token_id < len(vocabulary) and vocabulary[token_id][0] == spelling:
                vocabulary[token_id][0] = _HIDDEN + spelling
        elif spelling in vocabulary:
            vocabulary[_HIDDEN + spelling] = vocabulary.pop(spelling)
        if spelling == unknown:
            model["unk_token"] = _HIDDEN + spelling
    definition["post_processor"] = None
    return special


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
