"""Each format's grammar allows what its parser reads, and nothing else where calls are required."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from server.errors import ApiError, refused
from server.formats.format import Spelling
from server.formats.message import MessageParser
from server.formats.parts import CallArguments, CallStart
from server.formats.registry import reasoning_formats, tool_call_formats
from server.formats.tool_calls.parser import CallParser
from server.plan import TextOptions
from server.request.grammars import json_grammar
from server.request.message_formats import CallRules, MessageGrammar, spelt
from worlds.call_texts import written
from worlds.scripted_engine import EOS, byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = [("f", SCHEMA), ("g", {"type": "object"})]
# A format, and what in its template decides how it is spelt.
SPELLINGS = [
    *((form, "") for form in tool_call_formats() if form != "gpt_oss"),
    ("mistral", "[ARGS]"),
    ("deepseek_v3", "```json"),
]
MARKERS = {
    *("<think>", "</think>", "<|end|>", "<|return|>"),
    *(marker for each in tool_call_formats().values() for marker in each.markers),
}
ANSWER = json_grammar(
    {"type": "object", "properties": {"name": {"type": "integer"}}, "additionalProperties": False},
    "response_format",
).text


@cache
def vocabulary(has_markers: bool) -> tuple[Any, LLTokenizer, dict[str, int]]:
    """(tokenizer, the same for llguidance, ids of markers that are special tokens)."""
    tokenizer = byte_tokenizer()
    if has_markers:
        tokenizer.add_tokens([AddedToken(marker, special=True) for marker in sorted(MARKERS)])
    special = {each: tokenizer.convert_tokens_to_ids(each) for each in MARKERS if has_markers}
    backend = tokenizer.backend_tokenizer.to_str()
    return tokenizer, LLTokenizer(backend, n_vocab=len(tokenizer), eos_token=[EOS]), special


class World:
    """A format's grammar, and texts against it."""

    def __init__(self, form: str, template: str, has_markers: bool) -> None:
        self.form = tool_call_formats()[form]
        self.spelling = self.form.spelling(template)
        self.tokenizer, self.vocabulary, self.special = vocabulary(has_markers)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        text = written(self.form.name, arguments)
        return self.spelling.before.replace("NAME", name) + text + self.spelling.after

    def calls(self, *calls: str) -> str:
        return self.spelling.begin + (self.spelling.between or "").join(calls) + self.spelling.end

    def allows(
        self,
        text: str,
        *,
        must: bool,
        answer: str = "",
        parallel: bool = True,
        thinks: str = "",
        functions: Any = FUNCTIONS,
    ) -> bool:
        rules = CallRules(functions, self.form, self.spelling, must, parallel)
        reasoning = reasoning_formats()[thinks] if thinks else None
        grammar = MessageGrammar(self.special, rules, answer).write(reasoning, False)
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("has_markers", [False, True])
@pytest.mark.parametrize(("form", "template"), SPELLINGS)
def test_what_may_be_written_is_what_is_read(form: str, template: str, has_markers: bool) -> None:
    world = World(form, template, has_markers)
    good = world.calls(world.call("f", {"a": 1}), world.call("g", {"x": [1]}))
    one = world.calls(world.call("f", {"a": 1}))
    bad = world.calls(world.call("f", {"a": "x"}))
    other = world.calls(world.call("h", {}))
    parser = CallParser(world.form, dict(FUNCTIONS), "seed")
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
        assert world.allows(f"<think>{thought} or so</think>\n\n{good}", must=must, thinks="qwen3")
        assert world.allows(good, must=must, thinks="qwen3")
        assert not world.allows(f"<think>hm</think>{bad}", must=must, thinks="qwen3")
        assert world.allows("<think>hm</think>text", must=must, thinks="qwen3") is not must
    if world.form.in_text:
        assert world.allows(f"a text <tool {good}", must=False)


@pytest.mark.parametrize("has_markers", [False, True])
def test_a_model_of_channels_reasons_first_and_calls_once(has_markers: bool) -> None:
    world = World("gpt_oss", "", has_markers)
    good, bad = world.call("f", {"a": 1}), world.call("f", {"a": "x"})
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>"
    for must in (True, False):
        assert world.allows(thought + good, must=must, thinks="gpt_oss")
        assert not world.allows(thought + bad, must=must, thinks="gpt_oss")
        assert not world.allows(thought + good + good, must=must, thinks="gpt_oss")
        assert not world.allows(good, must=must, thinks="gpt_oss")
        text = f"{thought}{final}a text"
        assert world.allows(text, must=must, thinks="gpt_oss") is not must
        text = f'{thought}{final}{{"name": 1}}'
        assert world.allows(text, must=must, answer=ANSWER, thinks="gpt_oss") is not must
    parser = MessageParser(
        TextOptions(tool_calls="gpt_oss", functions=dict(FUNCTIONS), reasoning="gpt_oss"), "seed"
    )
    parts = [*parser.feed(thought + good), *parser.finish()]
    assert [each.text for each in parts if isinstance(each, CallArguments)] == ['{"a": 1}']


RICH = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 4},
        "unit": {"enum": ["c", "f"]},
        "code": {"type": "string", "pattern": "^[a-z]/[0-9]+$"},
        "flag": {"type": "boolean"},
        "list": {"$ref": "#/$defs/list"},
    },
    "required": ["text", "list"],
    "$defs": {"list": {"type": "array", "items": {"type": "integer"}}},
}


@pytest.mark.parametrize("form", ["qwen3_coder", "glm4", "pythonic", "hermes"])
def test_every_argument_is_held_to_its_own_schema(form: str) -> None:
    world = World(form, "", has_markers=False)

    def allows(**arguments: object) -> bool:
        call = world.calls(world.call("f", arguments))
        return world.allows(call.replace("'", '"'), must=True, functions=[("f", RICH)])

    rest = {"flag": True} if form != "pythonic" else {}
    first = {"text": "ab"} if form != "pythonic" else {"text": "ab", "list": [1, 2]}
    last = {} if "list" in first else {"list": [1, 2]}
    assert allows(**first, **last)
    assert allows(**first, unit="c", code="a/1", **rest, **last)
    assert not allows(**first, unit="k", **last)
    assert not allows(**first, code="a/", **last)
    assert not allows(**first, code="xa/1", **last)
    assert not allows(**first, flag=7, **last)
    assert not allows(**(first | {"text": "a"}), **last)
    assert not allows(**(first | {"text": "abcde"}), **last)
    assert not allows(text="ab")
    assert not allows(text="ab", list=["a"])


@pytest.mark.parametrize("form", ["qwen3_coder", "glm4", "pythonic"])
def test_without_a_schema_any_argument_may_be_given(form: str) -> None:
    world = World(form, "", has_markers=False)
    functions = [("f", {"type": "object", "properties": {}})]
    for arguments in ({}, {"a": 1}, {"a": 1, "b": [2]}):
        call = world.calls(world.call("f", arguments))
        assert world.allows(call, must=True, functions=functions)
    optional = [("f", {"properties": {"a": {}, "b": {}}, "additionalProperties": False})]
    for arguments in ({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}):
        call = world.calls(world.call("f", arguments))
        assert world.allows(call, must=True, functions=optional)
    other = world.calls(world.call("f", {"c": 1}))
    assert not world.allows(other, must=True, functions=optional)


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ("qwen3_coder", {"anyOf": [{"required": ["a"]}]}),
        ("qwen3_coder", {"properties": {"a b": {}}}),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "format": "date"}}}),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}),
        ("glm4", {"properties": {"a": False}, "required": ["a"]}),
        ("pythonic", {"properties": {"a-b": {}}}),
        ("pythonic", {"minProperties": 1}),
    ],
)
def test_what_a_format_cannot_be_held_to_is_a_400(form: str, schema: dict[str, Any]) -> None:
    """The field's own grammars show it, which the engine tries where the whole message's cannot be
    used."""
    spelling = tool_call_formats()[form].spelling("")
    with pytest.raises(ApiError) as caught:
        refuse_as_the_engine_does({"type": "object", **schema}, spelling)
    assert caught.value.param == "tools.0"


def refuse_as_the_engine_does(schema: dict[str, Any], spelling: Spelling) -> None:
    for field, grammar in spelt(schema, spelling, "tools.0").fields:
        if LLMatcher.validate_grammar(grammar):
            raise refused(field, "cannot be used")
