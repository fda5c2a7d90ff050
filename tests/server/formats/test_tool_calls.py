"""Tool calls are found in texts, whatever the pieces in which the texts come."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.formats.parts import CallArguments, CallStart, Content, Part, content_of, joined
from server.formats.registry import format_of, tool_call_formats
from server.formats.tool_calls.parser import CallParser
from worlds.call_texts import written

ROOT = Path(__file__).resolve().parents[3]
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
}


def parse(form: str, text: str, cuts: list[int] | None = None) -> list[Part]:
    """The parts of a text that comes in pieces which begin at ``cuts``; None: each character alone."""
    parser = CallParser(tool_call_formats()[form], FUNCTIONS, "seed")
    places = sorted({min(cut, len(text)) for cut in cuts or []})
    ends = range(1, len(text)) if cuts is None else places
    found: list[Part] = []
    for start, end in pairwise([0, *ends, len(text)]):
        found += parser.feed(text[start:end])
    return list(joined([*found, *parser.finish()]))


def read(form: str, text: str) -> tuple[str, list[tuple[str, object]]]:
    """Content and calls of a text, read in one piece."""
    parts = parse(form, text, [])
    calls = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append([part.name, ""])
        elif isinstance(part, CallArguments):
            calls[part.index][1] += part.text
    return content_of(parts), [(name, json.loads(text)) for name, text in calls]


WEATHER: tuple[str, dict[str, Any]] = ("get_weather", {"city": 'Köln "}{]'})
ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1, "b": [2, {"c": None}]})


def told(form: str, text: str) -> str:
    """A text with the calls' arguments in their places."""
    for place, (_, arguments) in {"$weather": WEATHER, "$add": ADD}.items():
        text = text.replace(place, written(form, arguments))
    return text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud83d"}}</tool_call>'),
        ("hermes", r'<tool_call>{"arguments": {"a": "\ud83d"}, "name": "f"}</tool_call>'),
        ("hermes", r'<tool_call>{"arguments": "{\"a\": \"\\ud83d\"}", "name": "f"}</tool_call>'),
        ("pythonic", r'[get_weather(city="\U0000d83d\ud83d")]'),
    ],
)
def test_half_a_character_that_is_escaped_does_not_become_one(form: str, text: str) -> None:
    for part in parse(form, text):
        assert isinstance(part, CallStart) or part.text.encode()


CASES = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": $weather}\n</tool_call>',
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": $weather}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": $add}\n</tool_call>\n',
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": $weather}',
        'I look. <|python_tag|>{"type": "function", "name": "get_weather", "parameters": $weather}; '
        '{"name": "add", "parameters": $add}',
    ),
    "mistral": (
        "[TOOL_CALLS]get_weather[ARGS]$weather",
        'I look. [TOOL_CALLS] [{"name": "get_weather", "arguments": $weather, "id": "abcdefghi"}, '
        '{"name": "add", "arguments": $add}]',
    ),
    "plain_json": (
        '[{"name": "get_weather", "arguments": $weather}]',
        '[{"name": "get_weather", "arguments": $weather}, {"name": "add", "arguments": $add}]',
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>$weather"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        "```json\n$weather\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        "```json\n$add\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n$weather</function>\n</tool_call>",
        "I look.\n<tool_call>\n<function=get_weather>\n$weather</function>\n</tool_call>\n"
        "<tool_call><function=add>$add</function></tool_call>\n",
    ),
    "glm4": (
        "<tool_call>get_weather\n$weather</tool_call>",
        "I look.\n<tool_call>get_weather\n$weather</tool_call>\n<tool_call>add$add</tool_call>",
    ),
    "pythonic": (
        "[get_weather($weather)]",
        "I look. <|python_start|>[get_weather($weather), add($add)]",
    ),
    "gpt_oss": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>$weather",
        "I look.<|channel|>commentary to=functions.get_weather<|message|>$weather<|call|>"
        "<|channel|>commentary to=functions.add code<|message|> $add<|call|>",
    ),
}
CASES = {form: (told(form, one), told(form, two)) for form, (one, two) in CASES.items()}


def test_every_format_has_cases() -> None:
    assert CASES.keys() == tool_call_formats().keys()


OTHER_SPELLINGS = [
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]$weather"),
    ("mistral", "[TOOL_CALLS]get_weather$weather"),
    ("mistral", '[TOOL_CALLS][{"arguments": $weather, "name": "get_weather"}]'),
    ("hermes", '<tool_call>{"arguments": $weather, "name": "get_weather"}</tool_call>'),
    # The end of the text closes what is open.
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": $weather}'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": $weather'),
    ("llama3", '<|python_tag|>{"parameters": $weather, "name": "get_weather"}'),
]
EMPTY, NOTHING = '<tool_call>{"name": "add", "arguments": {}}</tool_call>', ("add", {})
IN_JSON = json.dumps({"name": "add", "arguments": json.dumps(ADD[1])})


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        *((form, one, "", [WEATHER]) for form, (one, _) in CASES.items()),
        *(
            (form, two, "I look." if "I look." in two else "", [WEATHER, ADD])
            for form, (_, two) in CASES.items()
        ),
        *((form, told(form, text), "", [WEATHER]) for form, text in OTHER_SPELLINGS),
        ("hermes", f"{EMPTY}\n\nDone.", "Done.", [NOTHING]),
        ("hermes", f"A\n{EMPTY}\nB ", "A\n\nB", [NOTHING]),
        ("hermes", f"<tool_call>oh {EMPTY}", "<tool_call>oh", [NOTHING]),
        ("hermes", EMPTY.replace("}}", '}, "x": 1}'), ', "x": 1}</tool_call>', [NOTHING]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("hermes", f"<tool_call>{IN_JSON}</tool_call>", "", [ADD]),
    ],
)
def test_calls_are_read_and_what_is_around_them_is_content(
    form: str, text: str, content: str, calls: list[Any]
) -> None:
    assert read(form, text) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "just text, \n\n with spaces \n"),
        ("hermes", "<tool_call> is how it begins"),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call> after"),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 7}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", "<tool_ca"),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", "<tool_call>" + " " * 70 + '{"name": "f", "arguments": {}}</tool_call>'),
        # Any JSON may be an answer: without a mark it has to name a function.
        ("llama3", '{"name": "Bob", "parameters": {"age": 7}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", 'so: {"name": "add", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[TOOL_CALLS]name without brackets"),
        ("mistral", '{"name": "add", "arguments": {}}'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>and so on"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>none"),
        ("qwen3_coder", "<tool_call>\n<function=>"),
        ("qwen3_coder", '<tool_call>{"name": "add", "arguments": 7}</tool_call>'),
        ("qwen3_coder", "<function=add></function>"),
        ("glm4", "<tool_call> a b <arg_key>"),
        # Without a mark it has to name a function, and to look like a call.
        ("pythonic", "[1, 2]"),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[add(1)]"),
        ("pythonic", "so: [add(a=1)]"),
        ("pythonic", "<|python_start|>print(1)"),
        ("gpt_oss", "to=functions.add"),
        ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>none"),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(form: str, text: str) -> None:
    assert read(form, text) == (text, [])


FRAGMENTS = [
    *(text for pair in CASES.values() for text in pair),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "add", "<|python_tag|>", "[add(a="),
    *('{"name": "add", "arguments": {', '{"name": "add", "parameters": {"a": "'),
    *('{"arguments": {}, "name": "f"}', "'\\u00e9\\'"),
    *("<function=add>", "<parameter=a>\n", "\n</parameter>", "</function>"),
    *("<arg_key>a</arg_key>", "<arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *("<|channel|>commentary to=functions.add", "<|message|>"),
    *'{}[]",;: \n\\aé',
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@pytest.mark.parametrize("form", tool_call_formats())
@given(text=texts, cuts=st.lists(st.integers(0, 300), max_size=12), data=st.data())
def test_how_the_text_comes_changes_nothing(
    form: str, text: str, cuts: list[int], data: st.DataObject
) -> None:
    text = text[: data.draw(st.integers(0, len(text)))]
    alone = parse(form, text)
    assert parse(form, text, cuts) == alone
    assert parse(form, text, []) == alone
    if not any(isinstance(part, CallStart) for part in alone):
        assert content_of(alone) == text


def test_arguments_go_out_as_they_come() -> None:
    parser = CallParser(tool_call_formats()["hermes"], FUNCTIONS, "seed")
    assert parser.feed("Hm <tool") == [Content("Hm")]
    start, piece = parser.feed('_call>{"name": "add", "arguments": {"a"')
    assert isinstance(start, CallStart)
    assert piece == CallArguments(0, '{"a"')
    assert parser.feed(": 1") == [CallArguments(0, ": 1")]
    assert parser.feed("}}</tool_call>") == [CallArguments(0, "}")]


def test_ids_differ_between_calls_and_requests_and_suit_the_templates() -> None:
    text = CASES["mistral"][1]
    ids = [part.call_id for part in parse("mistral", text) if isinstance(part, CallStart)]
    other = CallParser(tool_call_formats()["mistral"], FUNCTIONS, "other").feed(text)
    ids += [part.call_id for part in other if isinstance(part, CallStart)]
    assert len(set(ids)) == 4
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call></tool_call> ...", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=one>", "qwen3_coder"),
        ("<tool_call>\n<function=example>", ""),
        ("<tool_call>{name}\n<arg_key>", "glm4"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[func_name1(params_name1=params_value1)] <|python_start|>", "pythonic"),
        ('<|python_start|> {"name": "f", "parameters": {}}', "llama3"),
        ("<|channel|>commentary to=functions.", "gpt_oss"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("{{ messages }}", ""),
    ],
)
def test_the_template_says_which_format(template: str, form: str) -> None:
    assert format_of(tool_call_formats(), template) == form


def test_the_documented_file_is_a_new_format() -> None:
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    (source,) = re.findall(r'```python title="arrow.py"\n(.*?)```', page, re.DOTALL)
    module: dict[str, Any] = {}
    exec(source, module)
    form = module["FORMAT"]
    parser = CallParser(form, {}, "seed")
    parts = [*parser.feed('Look.\n=> add {"a": 1}\n=> f {}'), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, CallStart)] == ["add", "f"]
    assert content_of(parts) == "Look."


ANY: dict[str, Any] = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "size": {"type": "integer"},
            "flag": {"type": "boolean"},
            "either": {"type": ["string", "null"]},
            "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "number_or_text": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        }
    }
}


def arguments_of(form: str, text: str, *, whole: bool = True) -> str:
    """Returns the arguments of the only call in a text, which comes letter by letter."""
    parser = CallParser(tool_call_formats()[form], ANY, "seed")
    parts = [part for char in text for part in parser.feed(char)]
    parts += parser.finish() if whole else []
    return "".join(part.text for part in parts if isinstance(part, CallArguments))


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("text", "7", "7"),
        ("text", "\n a\n", "\n a\n"),
        ("text", 'say "<b>\\n</b>"', 'say "<b>\\n</b>"'),
        ("size", "7", 7),
        ("size", " 7\n", 7),
        ("size", "many", "many"),
        ("size", "NaN", "NaN"),
        ("size", "[" * 5_000, "[" * 5_000),
        ("flag", "True", True),
        ("flag", "false", False),
        ("either", "null", None),
        ("either", "7", "7"),
        ("optional", "null", None),
        ("optional", "7", "7"),
        ("optional", '"a b"', "a b"),
        ("number_or_text", "7", 7),
        ("number_or_text", "7.5", "7.5"),
        ("unknown", "7", 7),
        ("unknown", "a b", "a b"),
        ("unknown", '{"a": [1, null]}', {"a": [1, None]}),
    ],
)
@pytest.mark.parametrize("form", ["qwen3_coder", "glm4"])
def test_tagged_values_are_what_the_schema_says(
    form: str, name: str, value: str, meant: object
) -> None:
    arguments = written(form, {name: value, "text": "x"} if name != "text" else {name: value})
    spelling = tool_call_formats()[form].spelling("")
    call = spelling.before.replace("NAME", "f") + arguments + spelling.after
    assert json.loads(arguments_of(form, call))[name] == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("""'it\\'s "so"'""", """it's "so\""""),
        (r'"\u00e9\x41\U0001f600\n\/\q"', "éA\U0001f600\n/\\q"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        ("-1.5e3", -1500.0),
        ("True", True),
        ("none", "none"),
        ("None", None),
        ("[1, (2, 3,), {'a': True, }, ]", [1, [2, 3], {"a": True}]),
        ("{'a': {'b': []}}", {"a": {"b": []}}),
    ],
)
def test_pythons_values_become_json(written: str, meant: object) -> None:
    found = arguments_of("pythonic", f"[f( size = {written} , text='')]")
    assert json.loads(found) == {"size": meant, "text": ""}


@pytest.mark.parametrize(
    ("form", "text", "begin"),
    [
        ("qwen3_coder", "<tool_call><function=f><parameter=text>\nlong te", '{"text": "long te'),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>\nlong\n</para", '{"text": "long'),
        ("glm4", "<tool_call>f<arg_key>text</arg_key><arg_value>long te", '{"text": "long te'),
        ("pythonic", "[f(text='long te", '{"text": "long te'),
        ("pythonic", "[f(size=7, text='long te", '{"size": 7, "text": "long te'),
    ],
)
def test_long_texts_go_out_as_they_come(form: str, text: str, begin: str) -> None:
    assert arguments_of(form, text, whole=False) == begin
