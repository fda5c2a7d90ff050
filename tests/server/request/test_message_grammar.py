"""Each format's grammar allows what its parser reads, and nothing else where calls are required."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from server.formats.parts import CallArguments, CallStart
from server.formats.reasoning import reasoning_formats
from server.formats.tool_calls import tool_call_formats
from server.formats.tool_calls.parser import CallParser
from server.request.grammars import json_grammar
from server.request.message_grammar import CallRules, MessageGrammar
from worlds.scripted_engine import EOS, byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = [("f", SCHEMA), ("g", {"type": "object"})]
MARKERS = ("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<tool_call>", "</tool_call>")
# A format, and what in its template decides how it is spelt.
SPELLINGS = [("hermes", ""), ("llama3", ""), ("mistral", ""), ("mistral", "[ARGS]")]
ANSWER = json_grammar(
    {"type": "object", "properties": {"name": {"type": "integer"}}, "additionalProperties": False},
    "response_format",
)


@cache
def vocabulary(has_markers: bool) -> tuple[Any, LLTokenizer, dict[str, int]]:
    """(tokenizer, the same for llguidance, ids of markers that are special tokens)."""
    tokenizer = byte_tokenizer()
    if has_markers:
        tokenizer.add_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    special = {each: tokenizer.convert_tokens_to_ids(each) for each in MARKERS if has_markers}
    backend = tokenizer.backend_tokenizer.to_str()
    return tokenizer, LLTokenizer(backend, n_vocab=len(tokenizer), eos_token=[EOS]), special


class World:
    """A format's grammar, and texts against it."""

    def __init__(self, form: str, template: str, has_markers: bool) -> None:
        self.form = tool_call_formats()[form]
        self.spelling = self.form.spelling(template)
        self.tokenizer, self.vocabulary, self.special = vocabulary(has_markers)

    def call(self, name: str, arguments: str) -> str:
        return self.spelling.before.replace("NAME", name) + arguments + self.spelling.after

    def calls(self, *calls: str) -> str:
        return self.spelling.begin + self.spelling.between.join(calls) + self.spelling.end

    def allows(
        self,
        text: str,
        *,
        must: bool,
        answer: str = "",
        parallel: bool = True,
        thinks: bool = False,
    ) -> bool:
        opener = "" if self.form.bare else self.form.markers[0]
        rules = CallRules(FUNCTIONS, self.spelling, opener, must, parallel)
        reasoning = reasoning_formats()["qwen3"] if thinks else None
        grammar = MessageGrammar(self.special).write(rules, answer, reasoning, False)
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("has_markers", [False, True])
@pytest.mark.parametrize(("form", "template"), SPELLINGS)
def test_what_may_be_written_is_what_is_read(form: str, template: str, has_markers: bool) -> None:
    world = World(form, template, has_markers)
    good = world.calls(world.call("f", '{"a": 1}'), world.call("g", '{"x": [1]}'))
    one = world.calls(world.call("f", '{"a": 1}'))
    bad = world.calls(world.call("f", '{"a": "x"}'))
    other = world.calls(world.call("h", "{}"))
    parser = CallParser(world.form, ("f", "g"), "seed")
    parts = [*parser.feed(good), *parser.finish()]
    assert [each.name for each in parts if isinstance(each, CallStart)] == ["f", "g"]
    arguments = [each.text for each in parts if isinstance(each, CallArguments)]
    assert [json.loads(each) for each in arguments] == [{"a": 1}, {"x": [1]}]
    assert len(parts) == 4
    for must in (True, False):
        assert world.allows(good, must=must)
        assert world.allows(one, must=must, parallel=False)
        assert not world.allows(good, must=must, parallel=False)
        assert not world.allows(bad, must=must)
        assert not world.allows(other, must=must)
        assert world.allows("a text", must=must) is not must
        assert world.allows(good, must=must, answer=ANSWER)
        assert world.allows('{"name": 1}', must=must, answer=ANSWER) is not must
        assert not world.allows("a text", must=must, answer=ANSWER)
        # A thought is any text, but for special tokens.
        thought = "" if has_markers else one
        assert world.allows(f"<think>{thought} or so</think>\n\n{good}", must=must, thinks=True)
        assert world.allows(good, must=must, thinks=True)
        assert not world.allows(f"<think>hm</think>{bad}", must=must, thinks=True)
        assert world.allows("<think>hm</think>text", must=must, thinks=True) is not must
    if not world.form.bare:
        assert world.allows(f"a text <tool {good}", must=False)
