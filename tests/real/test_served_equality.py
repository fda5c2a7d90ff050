"""Promise 1 on weights that others trained, over HTTP: the official client reads the same replies whoever
drafts, alone and beside others, free text, schemas and calls of tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI

from worlds.real_engine import licence
from worlds.real_model import REAL, real_server
from worlds.served_command import HANG, Server

pytestmark = REAL

_DRAFTERS = ("ngram", "suffix", "lookahead", "stand", "jacobi", "recycling", "nasd", "auto")
"""The odd ones draft trees."""
_TREES = {"tree_strategy": "tree", "tree_width": 3, "tree_depth": 6}
_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def saying(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": _PLACE}}
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _PLACE}}
ASKED: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": saying("Name three colours of the rainbow and explain."),
        "temperature": 0,
    },
    "sampled": {
        "messages": saying("Tell me something about the sea."),
        "temperature": 0.8,
        "top_p": 0.95,
        "frequency_penalty": 0.2,
    },
    "licence": {"messages": saying(f"Repeat this text.\n\n{licence(900)}"), "temperature": 0.8},
    "schema": {
        "messages": saying("Where is it warm today? Answer as JSON."),
        "temperature": 0.8,
        "response_format": _SCHEMA,
    },
    "tools": {
        "messages": saying("What is the weather in Cologne and in Rome?"),
        "temperature": 0,
        "tools": [_TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}


@pytest.fixture(scope="module", params=["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param == "bf16":  # as it comes
        yield request.getfixturevalue("smollm2")
        return
    with real_server(tmp_path_factory.mktemp("server"), "--quantization", "int8") as found:
        yield found


async def replies(served: Server, bodies: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the replies to all bodies, sent at once, by name."""
    url = f"{served.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=HANG) as client:
        found = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="smollm2", **{"max_tokens": 48, "seed": 7} | body
                )
                for body in bodies.values()
            )
        )
    return dict(zip(bodies, found, strict=True))


def written(reply: Any) -> tuple[Any, ...]:
    """All that has to be equal."""
    (choice,) = reply.choices
    calls = [
        (each.function.name, each.function.arguments) for each in choice.message.tool_calls or ()
    ]
    return choice.message.content, calls, choice.finish_reason, reply.usage.completion_tokens


def speculation_of(reply: Any) -> dict[str, int]:
    found: dict[str, int] = reply.usage.model_extra["speculative"]
    return found


def test_replies_are_the_same_whoever_drafts(served: Server, count: Callable[[int], None]) -> None:
    plain: dict[str, Any] = {}
    for name, body in ASKED.items():
        alone = {name: body | {"extra_body": {"speculative": {"draft_strategy": "none"}}}}
        plain |= asyncio.run(replies(served, alone))
    judge(plain)
    num_accepted = dict.fromkeys(_DRAFTERS, 0)
    for index, drafter in enumerate(_DRAFTERS):
        wanted = {"draft_strategy": drafter, "adaptive_depth": False, "num_speculative_tokens": 6}
        wanted |= _TREES if index % 2 else {}
        bodies = {
            name: body | {"extra_body": {"speculative": wanted}} for name, body in ASKED.items()
        }
        for name, reply in asyncio.run(replies(served, bodies)).items():
            assert written(reply) == written(plain[name]), (drafter, name)
            num_accepted[drafter] += speculation_of(reply)["num_accepted_tokens"]
    assert all(num_accepted.values()), num_accepted
    count(len(_DRAFTERS) * len(ASKED))


def judge(plain: Mapping[str, Any]) -> None:
    """Checks that the texts written without drafts are what was asked for."""
    assert all(speculation_of(reply)["num_draft_tokens"] == 0 for reply in plain.values())
    (schema,) = plain["schema"].choices
    jsonschema.validate(json.loads(schema.message.content), _PLACE)
    (tools,) = plain["tools"].choices
    (call,) = tools.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), _PLACE)
