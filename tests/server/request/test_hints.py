"""Hints are taken, and the answer's header names those that nothing comes of."""

from __future__ import annotations

from typing import Any

import pytest

from server.reply.streaming import IGNORED_HEADER
from server.request.large_bodies import LARGE
from worlds.request_bodies import (
    CHAT_IGNORED,
    ENDPOINTS,
    MESSAGES_IGNORED,
    RESPONSE_IGNORED,
    SAMPLED_IGNORED,
    TEXT,
)
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

IGNORED = {
    "/completions": SAMPLED_IGNORED,
    "/chat/completions": CHAT_IGNORED,
    "/responses": RESPONSE_IGNORED,
    "/messages": MESSAGES_IGNORED,
}


def nested(paths: dict[str, Any]) -> dict[str, Any]:
    """A body with these values at these paths."""
    body: dict[str, Any] = {}
    for path, value in paths.items():
        *parts, name = path.split(".")
        inside = body
        for part in parts:
            inside = inside.setdefault(part, {})
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
        told = await client.post(path, json=body | nested(ignored))
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
    assert (reply["store"], reply["service_tier"]) == (False, "default")
