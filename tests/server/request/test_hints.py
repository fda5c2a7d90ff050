"""Hints are taken, and the answer's header names those that nothing comes of."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from server.reply.streaming import IGNORED_HEADER
from server.request.large_bodies import LARGE
from worlds import request_bodies
from worlds.request_bodies import (
    CHAT_IGNORED,
    ENDPOINTS,
    MESSAGES_IGNORED,
    RESPONSE_IGNORED,
    TEXT,
)
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import Connect, openai_client

pytestmark = pytest.mark.anyio

IGNORED = {
    "/completions": request_bodies.IGNORED,
    "/chat/completions": CHAT_IGNORED,
    "/responses": RESPONSE_IGNORED,
    "/messages": MESSAGES_IGNORED,
}


def with_values(body: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
    """The body with these values at these paths, in a list's every part."""
    body = deepcopy(body)
    for path, value in paths.items():
        *parts, name = path.split(".")
        insides = [body]
        for part in parts:
            found = [inside.setdefault(part, {}) for inside in insides]
            insides = list(chain(*(each if isinstance(each, list) else [each] for each in found)))
        for inside in insides:
            inside[name] = value
    return body


@pytest.mark.parametrize(
    ("path", "stream", "large"),
    [
        *((path, stream, False) for path in ENDPOINTS for stream in (False, True)),
        # Another process reads it.
        ("/responses", False, True),
    ],
)
async def test_the_header_names_the_hints_without_effect_and_no_others(
    connect: Connect, path: str, stream: bool, large: bool
) -> None:
    base = ENDPOINTS[path][1]
    ignored = {
        each: IGNORED[path][each] for each in IGNORED[path] if stream or "stream" not in each
    }
    effective: dict[str, Any] = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    effective |= {"metadata": {"a": "b"}, "stream": stream}
    if large:
        effective["metadata"] = {str(number): "\u20ac" * 512 for number in range(16)}
        assert len(str(effective).encode()) > LARGE
    engine = ScriptedEngine(TEXT)
    async with connect(engine, body_processes=1) as client:
        body = base | effective
        plain = await client.post(path, json=body)
        assert IGNORED_HEADER not in plain.headers
        told = await client.post(path, json=with_values(body, ignored))
    assert told.status_code == 200, told.text
    assert set(told.headers[IGNORED_HEADER].split(", ")) == set(ignored)
    first, second = (each.prompt_token_ids for each in engine.requests)
    assert first == second


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_hint_is_tried_here(path: str) -> None:
    # The scripted tokenizer's template reads the effort.
    found = {
        name
        for name, _, hint in ENDPOINTS[path][0].hint_fields()
        if not hint.effect and hint.variable != "reasoning_effort"
    }
    # Told by rules of their own.
    assert found == set(IGNORED[path]) - {"thinking.type"}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/chat/completions", {"verbosity": "low"}, "verbosity"),
        ("/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
async def test_a_hint_goes_to_a_template_that_reads_it_and_is_told_with_others(
    connect: Connect, path: str, body: dict[str, Any], name: str
) -> None:
    variable = name.replace(".", "_").removeprefix("text_")
    # As templates that have a value of their own write it.
    reads = f"{{%- if {variable} is not defined %}}{{%- set {variable} = 'medium' %}}{{%- endif %}}"
    reads += f"<{{{{ {variable} }}}}>{{{{ messages[0].content }}}}"
    for template, told, prompt in (
        (reads, None, b"<low>ab"),
        ("{{ messages[0].content }}", name, b"ab"),
    ):
        engine = ScriptedEngine(TEXT)
        async with connect(engine, byte_tokenizer(template)) as client:
            reply = await client.post(path, json=ENDPOINTS[path][1] | body)
        assert reply.headers.get(IGNORED_HEADER) == told
        assert bytes(engine.requests[0].prompt_token_ids) == prompt


async def test_marks_of_a_cache_are_taken_in_messages_parts_and_tools(connect: Connect) -> None:
    """As agents send them to whatever speaks OpenAI's API."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    message = {"role": "user", "content": [{"type": "text", "text": "ab", **mark}], **mark}
    tool = {"type": "function", "function": {"name": "f"}, **mark}
    engine = ScriptedEngine(TEXT)
    async with connect(engine) as client:
        for body in (
            {"messages": [message], "tools": [tool]},
            {
                "messages": [{"role": "user", "content": "ab"}],
                "tools": [tool | {"cache_control": None}],
            },
        ):
            reply = await client.post("/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert IGNORED_HEADER not in reply.headers
        message["content"] = [{"type": "text", "text": "ab", "cache_control": {"type": "lasting"}}]
        refused = await client.post("/chat/completions", json={"messages": [message]})
    first, second = (each.prompt_token_ids for each in engine.requests)
    assert first == second
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.0.content.0.cache_control"


@pytest.mark.parametrize("said", [None, True])
@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
async def test_an_effort_says_whether_to_think(
    connect: Connect, effort: str, thinks: bool, said: bool | None
) -> None:
    """Who says so in so many words has the last one, and is told that the other is without effect."""
    template = "<{{ enable_thinking }}>"
    body = {"reasoning_effort": effort} | (
        {"chat_template_kwargs": {"enable_thinking": said}} if said is not None else {}
    )
    engine = ScriptedEngine(TEXT)
    async with connect(engine, byte_tokenizer(template)) as client:
        path = "/chat/completions"
        reply = await client.post(path, json=ENDPOINTS[path][1] | body)
    shown = bytes(engine.requests[0].prompt_token_ids).decode()
    assert shown == f"<{thinks if said is None else said}>"
    assert reply.headers.get(IGNORED_HEADER) == (None if said is None else "reasoning_effort")


async def test_a_variable_said_twice_alike_is_said_once(connect: Connect) -> None:
    body = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
    engine = ScriptedEngine(TEXT)
    async with connect(engine) as client:
        path = "/chat/completions"
        reply = await client.post(path, json=ENDPOINTS[path][1] | body)
    assert reply.status_code == 200
    assert b"effort low" in bytes(
        each for each in engine.requests[0].prompt_token_ids if each < 256
    )


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_tier_that_was_asked_for_is_answered_in_streams_too(
    connect: Connect, path: str
) -> None:
    async with connect(ScriptedEngine(TEXT)) as client:
        body = ENDPOINTS[path][1] | {"service_tier": "flex", "stream": True}
        tier = "standard" if path == "/messages" else "default"
        assert f'"service_tier":"{tier}"' in (await client.post(path, json=body)).text


async def test_a_response_repeats_its_hints(connect: Connect) -> None:
    body = {"input": "a", "prompt_cache_key": "k", "safety_identifier": "s", "store": True}
    async with connect(ScriptedEngine(TEXT)) as client:
        reply = (await client.post("/responses", json=body)).json()
    assert (reply["prompt_cache_key"], reply["safety_identifier"]) == ("k", "s")
    assert (reply["store"], reply["service_tier"]) == (True, "default")


async def test_a_streamed_chat_with_all_its_hints(connect: Connect) -> None:
    asked: dict[str, Any] = {
        "model": "test/scripted",
        "messages": [{"role": "user", "content": "hi"}],
        "store": True,
        "verbosity": "low",
        "reasoning_effort": "high",
        "service_tier": "flex",
        "prompt_cache_key": "thread-1",
        "safety_identifier": "someone",
        "metadata": {"job": "7"},
        "stream_options": {"include_usage": True},
    }
    async with openai_client(connect, ScriptedEngine(TEXT)) as client:
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            completion = await stream.get_final_completion()
        raw = await client.chat.completions.with_raw_response.create(stream=True, **asked)
        async for _ in raw.parse():
            pass
    assert completion.choices[0].message.content == TEXT
    assert completion.service_tier == "default"
    assert completion.usage is not None
    assert set(raw.headers[IGNORED_HEADER].split(", ")) == {"store", "verbosity", "service_tier"}


async def test_a_cache_key_opens_no_cache(connect: Connect, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: a, key: ka}, {name: b, key: kb}]")
    engine = ScriptedEngine(TEXT)
    async with connect(engine, api_keys_file=str(keys)) as client:
        for key in ("ka", "kb", "ka"):
            body = {"prompt": "a", "prompt_cache_key": "one"}
            headers = {"authorization": f"Bearer {key}"}
            await client.post("/completions", json=body, headers=headers)
    first, other, again = (each.cache_salt for each in engine.requests)
    assert first == again != other
