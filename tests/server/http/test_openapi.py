"""The schema says what is sent: every status with its shape, streams as well, and no 422."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter

from server.apis.ollama.reply import OllamaChatReply, OllamaGenerateReply
from server.apis.openai.chat_reply import ChatChunk, ChatCompletion
from server.apis.openai.completion_reply import Completion, CompletionChunk
from server.request.speculative import SpeculativeCaps
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import events, serve

USER = {"role": "user", "content": "a"}
GENERATING = {
    "/v1/completions": (Completion, CompletionChunk, {"prompt": "a"}),
    "/v1/chat/completions": (ChatCompletion, ChatChunk, {"messages": [USER]}),
}
IN_LINES = {
    "/api/chat": (OllamaChatReply, {"messages": [USER]}),
    "/api/generate": (OllamaGenerateReply, {"prompt": "a"}),
}
ALL_FIELDS = {
    "logprobs": 1,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "prediction": {"type": "content", "content": "hello"},
    "speculative": {"return_drafted": True},
}


@pytest.fixture
async def schema(client: httpx.AsyncClient) -> dict[str, Any]:
    return dict((await client.get("http://test/openapi.json")).json())


async def test_every_status_is_told_and_422_is_none(schema: dict[str, Any]) -> None:
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers
            assert ("401" in answers) == path.startswith(
                ("/v1", "/api", "/tokenize", "/detokenize", "/admin")
            )
            assert ({"400", "413"} <= answers.keys()) == ("requestBody" in operation)
            for status, answer in answers.items():
                if int(status) >= 400 and path not in ("/health", "/ready"):
                    shape = answer["content"]["application/json"]["schema"]
                    name = "AnthropicErrorReply" if "/messages" in path else "ErrorReply"
                    name = "OllamaError" if path.startswith("/api") else name
                    assert shape == {"$ref": f"#/components/schemas/{name}"}
    for path in (*GENERATING, *IN_LINES):
        statuses = schema["paths"][path]["post"]["responses"].keys()
        told = {"200", "400", "401", "404", "408", "413", "414", "429", "431", "500", "503", "504"}
        assert statuses == told
    assert "422" not in json.dumps(schema["paths"])
    assert "HTTPValidationError" not in schema["components"]["schemas"]


async def test_all_that_is_referred_to_is_there(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= schema["components"]["schemas"].keys()
    assert "$defs" not in text


@pytest.mark.parametrize("path", GENERATING)
async def test_replies_and_events_have_the_shape_that_is_told(path: str) -> None:
    whole, chunk, base = GENERATING[path]
    body = base | ALL_FIELDS | ({"logprobs": True, "top_logprobs": 1} if "chat" in path else {})
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve(ScriptedEngine("hello")) as client:
        url = f"http://test{path}"
        reply = (await client.post(url, json=body)).json()
        streamed = {"stream": True, "stream_options": options}
        *chunks, _ = events((await client.post(url, json=body | streamed)).text)
        schema = (await client.get("http://test/openapi.json")).json()
    TypeAdapter(whole).validate_python(reply, strict=True)
    for each in chunks:
        TypeAdapter(chunk).validate_python(each, strict=True)
    answer = schema["paths"][path]["post"]["responses"]["200"]["content"]
    assert answer["application/json"]["schema"]["$ref"].endswith(f"/{whole.__name__}")
    data, done = answer["text/event-stream"]["itemSchema"]["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    refs = [each["$ref"].split("/")[-1] for each in data["contentSchema"]["anyOf"]]
    assert refs == [chunk.__name__, "ErrorReply"]


@pytest.mark.parametrize("path", IN_LINES)
async def test_lines_have_the_shape_that_is_told(path: str) -> None:
    kind, base = IN_LINES[path]
    async with serve(ScriptedEngine("hello")) as client:
        url = f"http://test{path}"
        body = base | {"logprobs": True, "top_logprobs": 1}
        reply = (await client.post(url, json=body | {"stream": False})).json()
        lines = (await client.post(url, json=body)).text.splitlines()
        schema = (await client.get("http://test/openapi.json")).json()
    for each in (reply, *map(json.loads, lines)):
        TypeAdapter(kind).validate_python(each, strict=True)
    answer = schema["paths"][path]["post"]["responses"]["200"]["content"]
    refs = answer["application/x-ndjson"]["itemSchema"]["anyOf"]
    names = [each["$ref"].split("/")[-1] for each in refs]
    assert names == [kind.__name__, "OllamaError"]


def _chat(message: dict[str, Any], **body: Any) -> tuple[str, dict[str, Any]]:
    asked = {"role": "assistant", "tool_calls": [CALL]}
    return "/v1/chat/completions", {"messages": [asked, message], **body}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "n", "schema": {"type": "object"}}
TAKEN = [
    _chat({"role": "system", "content": [{"type": "text", "text": "a"}]}),
    _chat({"role": "assistant", "reasoning_content": "a"}),
    _chat({"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"}),
    _chat(USER, logprobs=True, top_logprobs=1),
    _chat(USER | {"name": "b"}, top_logprobs=0, n=1.0, repeat_penalty=1.1, tools=[], seed=-1),
    _chat({"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, max_tokens=-1, num_ctx=8),
    _chat(USER, response_format={"type": "json_schema", "json_schema": SCHEMA}),
    _chat(USER, structured_outputs={"json_object": True, "disable_any_whitespace": False}),
    _chat(USER, speculative={"adaptive_depth": False, "draft_strategy": "nasd"}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", **SCHEMA}}}),
    ("/v1/completions", {"prompt": [[1], [2]], "stop": ["a"], "truncate_prompt_tokens": -1}),
    ("/api/chat", {"messages": [USER], "format": "json", "options": {"num_predict": -2}}),
    ("/api/generate", {"prompt": "a", "keep_alive": "5m", "format": {"type": "object"}}),
    ("/api/show", {"model": "test/scripted"}),
    ("/tokenize", {"prompt": "a", "messages": None}),
    ("/tokenize", {"messages": [USER], "add_generation_prompt": False}),
]
REFUSED = [
    _chat({"role": "user"}),
    _chat({"role": "user", "content": None}),
    _chat({"role": "user", "content": []}),
    _chat({"role": "user", "content": [{"type": "image_url"}]}),
    _chat({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}),
    _chat({"role": "user", "content": "a", "tool_calls": [CALL]}),
    _chat({"role": "assistant", "content": "a", "tool_call_id": "1"}),
    _chat({"role": "assistant", "tool_calls": []}),
    _chat({"role": "tool", "content": "a"}),
    _chat({"role": "tool", "content": "a", "tool_call_id": "1", "reasoning": "a"}),
    _chat(USER, top_logprobs=1),
    _chat(
        USER, tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]
    ),
    _chat(USER, response_format={"type": "json_schema"}),
    _chat(USER, response_format={"type": "text", "json_schema": SCHEMA}),
    _chat(USER, structured_outputs={"json_object": True, "regex": "a"}),
    _chat(USER, structured_outputs={"regex": "a", "whitespace_pattern": "a"}),
    _chat(USER, speculative={"adaptive_depth": "guess"}),
    _chat(USER, speculative={"verification": "guess"}),
    _chat(USER, speculative={"draft_strategy": "guess"}),
    _chat(USER, speculative={"options": {"a": []}}),
    ("/v1/responses", {"input": []}),
    ("/v1/responses", {"input": [{"role": "user"}]}),
    ("/v1/responses", {"input": [{"type": "guess", "content": "a"}]}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "name": "n"}}}),
    ("/v1/completions", {"prompt": []}),
    ("/api/chat", {"messages": [USER], "options": {"num_predict": -3}}),
    ("/api/chat", {"messages": [USER], "format": "xml"}),
    ("/api/chat", {"messages": [USER], "think": "much"}),
    ("/api/generate", {"prompt": "a", "keep_alive": "soon"}),
    ("/api/show", {"model": "test/scripted", "colour": 1}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": "a", "stop": ""}),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}),
    ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}),
    ("/tokenize", {"prompt": "a", "messages": [USER]}),
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [-1]}),
]


async def test_what_the_schema_lets_through_is_what_is_taken(schema: dict[str, Any]) -> None:
    async with serve(ScriptedEngine(), tool_call_parser="hermes") as client:
        for cases, status in ((TAKEN, 200), (REFUSED, 400)):
            for path, body in cases:
                content = schema["paths"][path]["post"]["requestBody"]["content"]
                told = content["application/json"]["schema"] | {"components": schema["components"]}
                reply = await client.post(f"http://test{path}", json=body)
                assert reply.status_code == status, (path, body, reply.text)
                is_valid = Draft202012Validator(told).is_valid(body)
                assert is_valid == (status == 200), (path, body)


async def test_caps_have_the_bounds_of_the_settings(schema: dict[str, Any]) -> None:
    caps = schema["components"]["schemas"]["SpeculativeCaps"]["properties"]
    assert caps["max_tree_width"]["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "null"}]
    assert caps.keys() == SpeculativeCaps.model_fields.keys()
