"""Errors have the shape of the API that their path belongs to, whoever refuses, and its names of fields,
whoever reads the body."""

from __future__ import annotations

import json
import pickle
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.request.errors import UnsupportedModelError
from engine.tokenizer import naming
from server.errors import SAME, ApiError, OwnNames, bad_request, from_validation, refused
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import fault, serve

KEY = {"x-api-key": "s3cret"}


def check(reply: httpx.Response, status: int, kind: str, code: str) -> None:
    assert reply.status_code == status
    body = reply.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert body["error"]["message"]
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_whoever_refuses_does_so_in_the_shape_of_the_path() -> None:
    async with serve(ScriptedEngine(), api_key="s3cret", max_body_bytes=2000) as client:

        async def post(path: str, headers: dict[str, str], **body: Any) -> httpx.Response:
            return await client.post(path, json=body, headers=headers)

        check(await post("/messages", {}), 401, "authentication_error", "invalid_api_key")
        check(await post("/messages/x", KEY), 404, "not_found_error", "not_found")
        too_long = await post("/messages", KEY, text="a" * 3000)
        check(too_long, 413, "request_too_large", "body_too_large")
        client.app.state.models.state = "draining"  # type: ignore[attr-defined]
        ending = await post("/messages", KEY)
        check(ending, 503, "overloaded_error", "shutting_down")
        assert ending.headers["retry-after"] == "5"


async def test_other_paths_keep_openais_shape(client: Any) -> None:
    for path in ("/messagesx", "/nowhere", "/models/messages"):
        reply = await client.get(path)
        assert reply.status_code == 404
        assert reply.json().keys() == {"error"}
        assert reply.json()["error"].keys() == {"message", "type", "param", "code"}


ODD = [{"SpecialToken": {"id": "[X]", "type_id": 0}}]
ODD_TEMPLATE = {"type": "TemplateProcessing", "single": ODD, "pair": ODD, "special_tokens": {}}
PANICS: dict[str, dict[str, Any]] = {
    "post_processor": ODD_TEMPLATE,
    "decoder": {"type": "Strip", "content": "h", "start": 5, "stop": 5},
}


@pytest.mark.parametrize("part", PANICS)
async def test_a_tokenizer_that_panics_fails_the_request_alone(part: str) -> None:
    """Its file is from outside, and a panic in Rust is no ``Exception``."""
    tokenizer = byte_tokenizer()
    description = json.loads(tokenizer.backend_tokenizer.to_str()) | {part: PANICS[part]}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(description))
    async with serve(ScriptedEngine("hi"), tokenizer=tokenizer) as client:
        for stream in (False, True):
            reply = await client.post("/completions", json={"prompt": "hello", "stream": stream})
            assert fault(reply) == (500, "request_failed")
        assert (await client.get("/models")).status_code == 200
    with pytest.raises(UnsupportedModelError, match="cannot load 'it': .*panicked"), naming("it"):
        tokenizer.decode(tokenizer.encode("hello"))


PATHS = {"stop": "stop_sequences", "format": "text.format", "format.schema": "text"}
NAMES = OwnNames(PATHS | {"messages": "input", "messages.*": "input"})


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("stop", "stop_sequences"),
        ("stop.0", "stop_sequences.0"),
        ("stopped", "stopped"),
        ("a.stop", "a.stop"),
        ("format.name", "text.format.name"),
        ("format.schema.type", "text.type"),
        ("messages", "input"),
        ("messages.3.content.0", "input"),
        ("", ""),
    ],
)
def test_the_longest_known_path_says_the_clients(path: str, own: str) -> None:
    assert NAMES.of(path) == own
    assert SAME.of(path) == path


def test_a_refusal_names_the_clients_fields_in_its_message_too() -> None:
    error = from_validation(
        [
            {"loc": ("stop", 0), "type": "value_error", "msg": "Value error, Is stop too long"},
            {"loc": ("colour",), "type": "extra_forbidden", "msg": ""},
        ]
    )
    with pytest.raises(ApiError) as caught, NAMES.in_refusals():
        raise error
    for found in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        told = (found.status, found.code, found.param)
        assert told == (400, "invalid_value", "stop_sequences.0")
        said = "stop_sequences.0: is stop too long; colour: this server knows no such field"
        assert found.message == said


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (refused("format", "needs 'a'", "odd"), "text.format", "text.format needs 'a'"),
        (refused("messages.0", ": no"), "input", "input: no"),
        (bad_request("messages", "no messages here"), "input", "no messages here"),
        (bad_request(None, "no"), None, "no"),
    ],
)
def test_what_a_message_says_beside_the_path_stays(
    error: ApiError, param: str | None, message: str
) -> None:
    found = error.renamed(NAMES.of)
    assert (found.param, found.message, found.code) == (param, message, error.code)
