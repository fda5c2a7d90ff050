"""Bodies that are no JSON object, or hold half characters: a 400 that says what is wrong, and where."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from server.apis.ollama.request import OllamaChatRequest, OllamaEmbedRequest
from server.apis.openai.request import ChatRequest, CompletionRequest
from server.apis.openai.tokens import TokenizeRequest
from server.apis.responses.request import ResponsesRequest
from server.errors import ApiError
from server.request.parsing import check_content_type, parse

HALF = r"\ud83d"
TRAILING_COMMA = (
    "line 3, column 1 (character 18): expecting property name"
    if sys.version_info < (3, 13)
    else "line 2, column 15 (character 16): illegal trailing comma before end of object"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The body is empty"),
        (b'{"prompt": "a"', "line 1, column 15 (character 14): expecting ',' delimiter"),
        (b'{\n "prompt": "a",\n}', TRAILING_COMMA),
        (b'{\n "prompt": "a",\n1}', "line 3, column 1 (character 18): expecting property name"),
        (b'{"prompt": "a"} {}', "line 1, column 17 (character 16): extra data"),
        (b'{"prompt": "a\nb"}', "line 1, column 14 (character 13): invalid control character."),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12 (0xff): invalid start byte"),
        (b'{"prompt": "\xed\xa0\xbd"}', "not UTF-8: byte 12 (0xed): invalid continuation byte"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n": ' + b"1" * 5000 + b"}", "too many digits"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"null", "must be a JSON object, not null"),
        (b'"a"', "must be a JSON object, not a string"),
        (b"1.5", "must be a JSON object, not a number"),
        (b"true", "must be a JSON object, not a boolean"),
    ],
)
def test_what_does_not_parse_says_why_and_where(content: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(CompletionRequest, content)
    assert (refused.value.status, refused.value.code) == (400, "unreadable_body")
    assert message in refused.value.message


@pytest.mark.parametrize("field", ["prompt", "max_tokens", "input", "tools", "nothing"])
@pytest.mark.parametrize("depth", [200, 300, 600, 900])
def test_what_json_can_nest_and_a_field_cannot_is_refused(field: str, depth: int) -> None:
    nested = '[{"type": "web_search", "a": ' * (depth // 2) + "1" + "}]" * (depth // 2)
    for kind in (CompletionRequest, ResponsesRequest):
        with pytest.raises(ApiError, match="nested too deeply"):
            parse(kind, f'{{"{field}": {nested}}}'.encode())


CHAT = '"messages": [{"role": "user", "content": "a"}]'
REASONING_5 = '{"messages": [{"role": "assistant", "reasoning": 5}]}'


@pytest.mark.parametrize(
    ("kind", "content", "param"),
    [
        (OllamaChatRequest, '{"keep_alive": []}', "keep_alive"),
        (OllamaChatRequest, '{"think": 5}', "think"),
        (OllamaEmbedRequest, '{"input": [1]}', "input"),
        (
            ChatRequest,
            f'{{{CHAT}, "chat_template_kwargs": {{"a": [NaN]}}}}',
            "chat_template_kwargs.a.0",
        ),
        (
            ChatRequest,
            f'{{{CHAT}, "response_format": {{"type": "json_schema", "json_schema": '
            '{"name": "a", "schema": "b"}}}',
            "response_format.json_schema.schema",
        ),
        (ChatRequest, f'{{{CHAT}, "metadata": {{"float": 5}}}}', "metadata.float"),
        (ChatRequest, f'{{{CHAT}, "think": [NaN]}}', "thinking.0"),
        (ChatRequest, REASONING_5, "messages.0.reasoning_content"),
    ],
)
def test_a_field_that_may_have_several_types_has_one_name(
    kind: type[Any], content: str, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse(kind, content.encode())
    assert refused.value.param == param
    assert "[" not in refused.value.message.partition(": ")[0]


@pytest.mark.parametrize(
    ("content_type", "part"),
    [("text/plain; charset=utf-8", "not as 'text/plain'"), ("", "names none"), ("json", "'json'")],
)
def test_what_is_not_said_to_be_json_is_not_read(content_type: str, part: str) -> None:
    with pytest.raises(ApiError, match=part):
        check_content_type(content_type)
    for known in ("application/json", "Application/JSON; charset=utf-8", "application/ld+json"):
        check_content_type(known)


def test_whole_characters_and_a_mark_at_the_begin_are_taken() -> None:
    content = '\ufeff{"prompt": "\\ud83d\\ude00\\\\ud83d \U0001f600"}'.encode()
    assert parse(CompletionRequest, content).prompt == ["\U0001f600\\ud83d \U0001f600"]


HALVES: list[tuple[type[Any], str, str | None]] = [
    (CompletionRequest, '"prompt": "a %s"', "prompt"),
    (CompletionRequest, '"prompt": ["a", "%s"]', "prompt.1"),
    (CompletionRequest, '"prompt": "a", "model": "%s"', "model"),
    (CompletionRequest, '"%s": 1', None),
    (CompletionRequest, '"prompt": "a", "logit_bias": {"%s": 1}', "logit_bias"),
    (CompletionRequest, '"prompt": "a", "unheard_of": [{"a": "%s"}]', "unheard_of.0.a"),
    (ChatRequest, '"messages": [{"role": "user", "content": "%s"}]', "messages.0.content"),
    (ChatRequest, '"chat_template_kwargs": {"%s": 1}', "chat_template_kwargs"),
    (ChatRequest, '"chat_template_kwargs": {"a": [{"b": "%s"}]}', "chat_template_kwargs.a.0.b"),
    (TokenizeRequest, '"prompt": "%s"', "prompt"),
]


@pytest.mark.parametrize(("kind", "body", "field"), HALVES)
@pytest.mark.parametrize("half", [HALF, r"\uDe00x", r"\ude00\ud83d"])
def test_half_a_character_is_a_400_that_names_the_field(
    kind: type[Any], body: str, field: str | None, half: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse(kind, f"{{{body % half}}}".encode())
    assert refused.value.param == field
    assert "half a character" in refused.value.message
    refused.value.message.encode()  # can be sent
