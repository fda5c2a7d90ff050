"""The schema says what is sent: every status with its shape, streams as well, and no 422."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.reply.writers import ChatChunk, ChatCompletion, Completion, CompletionChunk
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import Connect, events

pytestmark = pytest.mark.anyio
GENERATING = {
    "/v1/completions": (Completion, CompletionChunk, {"prompt": "a"}),
    "/v1/chat/completions": (
        ChatCompletion,
        ChatChunk,
        {"messages": [{"role": "user", "content": "a"}]},
    ),
}
ALL_FIELDS = {
    "logprobs": 1,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "prediction": {"type": "content", "content": "hello"},
    "speculative": {"return_drafted": True},
}


async def schema_of(connect: Connect) -> dict[str, Any]:
    async with connect(ScriptedEngine()) as client:
        return dict((await client.get("http://test/openapi.json")).json())


async def test_every_status_is_told_and_422_is_none(connect: Connect) -> None:
    schema = await schema_of(connect)
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers
            assert ("401" in answers) == path.startswith(
                ("/v1", "/tokenize", "/detokenize", "/admin")
            )
            assert ({"400", "413"} <= answers.keys()) == ("requestBody" in operation)
            for status, answer in answers.items():
                if int(status) >= 400 and path not in ("/health", "/ready"):
                    shape = answer["content"]["application/json"]["schema"]
                    assert shape == {"$ref": "#/components/schemas/ErrorReply"}
    for path in GENERATING:
        statuses = schema["paths"][path]["post"]["responses"].keys()
        assert statuses == {"200", "400", "401", "404", "408", "413", "429", "500", "503", "504"}
    assert "422" not in json.dumps(schema["paths"])
    assert "HTTPValidationError" not in schema["components"]["schemas"]


async def test_all_that_is_referred_to_is_there(connect: Connect) -> None:
    schema = await schema_of(connect)
    text = json.dumps(schema)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= schema["components"]["schemas"].keys()
    assert "$defs" not in text


@pytest.mark.parametrize("path", GENERATING)
async def test_replies_and_events_have_the_shape_that_is_told(connect: Connect, path: str) -> None:
    whole, chunk, base = GENERATING[path]
    body = base | ALL_FIELDS | ({"logprobs": True, "top_logprobs": 1} if "chat" in path else {})
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with connect(ScriptedEngine("hello")) as client:
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
    data = answer["text/event-stream"]["itemSchema"]["properties"]["data"]
    refs = [each["$ref"].split("/")[-1] for each in data["contentSchema"]["anyOf"]]
    assert refs == [chunk.__name__, "ErrorReply"]
    assert {"$ref": "#/components/schemas/ErrorReply"} in data["contentSchema"]["anyOf"]


async def test_errors_have_the_shape_that_is_told(connect: Connect) -> None:
    schema = await schema_of(connect)
    told = schema["components"]["schemas"]["ErrorDetails"]["properties"].keys()
    async with connect(ScriptedEngine()) as client:
        error = (await client.post("/completions", json={})).json()["error"]
    assert error.keys() == told
