"""Grammars over the API, before a real engine: refused with the field and the reason, or served."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from worlds.client_servers import WAIT_SECONDS
from worlds.engine_servers import Served

pytestmark = pytest.mark.slow

OWN_KIND = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
CHAIN = "\n".join(f"r{at}: r{at + 1}" for at in range(4000)) + '\nr4000: "a"\nstart: r0'


@pytest.fixture
def url(served: Served) -> str:
    return served.url


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 24, "temperature": 0, "seed": 1} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_SECONDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("way", "given", "reason"),
    [
        # One of each kind; which grammars are at fault is told by tests/engine/grammar.
        ("regex", r"[^\s\S]", "it matches nothing"),
        ("grammar", "root ::= root", "it matches nothing"),
        ("json", CYCLE, "it matches nothing"),
        ("json", {"enum": []}, "Unsatisfiable"),
        ("json", {"type": "integer", "multipleOf": 1000003}, "does not compile within"),
        ("grammar", CHAIN, "nested too deeply"),
        ("grammar", 'start: a{100,200}\na: "x"{100,200}', "Too many items"),
    ],
)
def test_what_can_write_nothing_or_is_too_large_is_a_400(
    url: str, stream: bool, way: str, given: Any, reason: str
) -> None:
    reply = ask(url, structured_outputs={way: given}, stream=stream)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == f"structured_outputs.{way}"
    assert error["message"].startswith(f"structured_outputs.{way} cannot be used: ")
    assert reason in error["message"]
    assert "\n" not in error["message"]


def test_a_schema_of_a_format_is_named(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": OWN_KIND}}
    reply = ask(url, response_format=form)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format.json_schema.schema"


def test_the_tool_at_fault_is_named(url: str) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("good", {"type": "object", "properties": {}}), ("bad", OWN_KIND))
    ]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    body["tool_choice"] = "required"  # type: ignore[assignment]
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools.1.function.parameters"


@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("regex", "((x?){500}){500}"),
        ("regex", "(x{1,500}){1,500}"),
        ("regex", "(.*a.*b){100}.*"),
        ("grammar", 'start: "x"{0,1000000}'),
        ("json", {"type": "object", "properties": {"n": {"$ref": "#"}}}),
        (
            "json",
            {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(400)}},
        ),
    ],
)
def test_what_is_large_but_possible_is_served_the_same_with_and_without_drafts(
    url: str, way: str, given: Any
) -> None:
    texts = set()
    for drafter in ("none", "ngram", "grammar"):
        speculative = {"draft_strategy": drafter}
        if drafter != "none":
            speculative["adaptive_depth"] = "fixed"
        reply = ask(url, structured_outputs={way: given}, speculative=speculative)
        assert reply.status_code == 200, reply.text
        texts.add(reply.json()["choices"][0]["text"])
    assert len(texts) == 1


def test_a_text_that_its_grammar_leaves_no_way_on_ends_as_one_that_was_cut(url: str) -> None:
    """Its field is fine as far as a look at it and its first tokens can tell."""
    walk = "".join("abcdefgh"[at % 8] for at in range(60))
    grammar = f'start: "q" "{walk}" X | "r"' + "\nX: /a/ & /b/"
    for drafter in ("none", "ngram"):
        reply = ask(
            url,
            structured_outputs={"grammar": grammar},
            max_tokens=200,
            speculative={"draft_strategy": drafter},
        )
        if reply.status_code == 400:
            assert "no way to end" in reply.json()["error"]["message"]
            continue
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] == ("stop" if choice["text"] == "r" else "length")
