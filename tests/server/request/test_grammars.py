"""Tests outputs' constraints as the engine reads them."""

from __future__ import annotations

import pytest

from engine.grammar.compiler import GrammarCompiler
from engine.model.loader import bundled_path, load_tokenizer
from server.request.grammars import StructuredOutputs, grammar_of


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [(r"\d", "1"), (r"[\d.]", "1."), (r"\w", "1a"), (r"[\w１]", "1a１"), (r"\\d", "\\")],
)
def test_digits_and_letters_of_a_regex_are_of_ascii(pattern: str, allowed: str) -> None:
    tokenizer = load_tokenizer(str(bundled_path("target")))
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    grammar = grammar_of(None, StructuredOutputs.of(regex=pattern)).text
    mask = compiler.constraint(grammar).allowed(())
    assert mask is not None
    begins = {each: tokenizer.encode(each, add_special_tokens=False)[0] for each in "1a.\\１é"}
    assert "".join(each for each, token_id in begins.items() if mask[token_id]) == allowed
