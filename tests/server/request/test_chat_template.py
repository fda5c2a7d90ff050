"""Where a chat template fails, the error blames the template or the request, whichever it is; and a
template's variables are known."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from server.plan import IGNORED_HEADER
from server.request.prompts import ChatTemplate
from server.request.render_limit import LIMIT, SlowTemplateError
from server.request.special_tokens import Spellings
from worlds.request_bodies import TOOLS
from worlds.scripted_engine import CHAT_TEMPLATE, USER, ScriptedEngine, byte_tokenizer
from worlds.serving import fault, post, serve

MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(template: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"messages": MESSAGES} | fields
    reply = await post("/chat/completions", body, ScriptedEngine(), byte_tokenizer(template))
    return reply.status_code, reply.json().get("error")


async def test_what_a_template_refuses_is_the_clients_fault() -> None:
    status, error = await ask("{{ raise_exception('roles must alternate') }}")
    assert (status, error["param"]) == (400, "messages")
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content }}",
        "{% if %}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ no_such_function() }}",
        "{{ messages.__class__.__mro__[1] }}{{ 1/0 }}",
    ],
)
async def test_a_broken_template_is_the_servers_fault(
    caplog: pytest.LogCaptureFixture, template: str
) -> None:
    with caplog.at_level(logging.ERROR):
        status, error = await ask(template)
    assert (status, error["code"], error["param"]) == (500, "chat_template_error", None)
    assert "chat template is broken" in caplog.text


KWARGS = "chat_template_kwargs"
RAISE = "raise_exception"
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
IN_TAGS = (
    "{% for m in messages %}{%- generation -%}{% if shout is defined %}{{ m.content }}{% endif %}"
    "{% endgeneration %}{% break %}{% endfor %}<|user|>"
)


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [
        # Values that break a template, and some that do not.
        ("{{ 'x' + (shout or '') }}a", {KWARGS: {"shout": 5}}, KWARGS),
        (CHAT_TEMPLATE + "{{ 'x' + shout }}", {KWARGS: {"shout": "5"}}, None),
        # A final message that is not in the text cannot be continued.
        ("no messages here", CONTINUED, "continue_final_message"),
        # What the server or the tokenizer says is refused.
        ("{{ bos_token }}", {KWARGS: {"bos_token": True}}, f"{KWARGS}.bos_token"),
        ("{{ raise_exception('x') }}", {KWARGS: {RAISE: True}}, f"{KWARGS}.{RAISE}"),
        ("{{ messages }}", {KWARGS: {"messages": True}}, f"{KWARGS}.messages"),
    ],
)
async def test_what_a_request_says_to_a_template_is_taken_or_refused_by_name(
    template: str, fields: dict[str, Any], param: str | None
) -> None:
    status, error = await ask(template, **fields)
    assert (status, error and error["param"]) == (400 if param else 200, param)


@pytest.mark.parametrize(
    ("template", "name", "is_read"),
    [
        # Variables are found in the tags that transformers adds.
        (IN_TAGS, "shout", True),
        ("{# shout #}a", "shout", False),
        ("{{ 'shout' }}", "shout", False),
        ("shout", "shout", False),
        ("{% set shout = 1 %}{{ shout }}", "shout", False),
        ("{{ messages[0].shout }}", "shout", False),
        ("{% for i in range(3) %}a{% endfor %}", "range", False),
        # An argument of transformers, not of the template.
        ("{{ messages[0].content }}", "tokenize", False),
    ],
)
async def test_a_variable_that_the_template_does_not_read_is_told(
    template: str, name: str, is_read: bool
) -> None:
    body = {"messages": MESSAGES, KWARGS: {name: True}}
    reply = await post("/chat/completions", body, ScriptedEngine(), byte_tokenizer(template))
    assert reply.status_code == 200
    assert reply.headers.get(IGNORED_HEADER) == (None if is_read else f"{KWARGS}.{name}")


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_of_several_templates_the_one_for_tools_is_known_as_well(tools: Any) -> None:
    """As Hermes and Command R have them. Quotes of both kinds stand in them."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {
        "default": "{{ \"don't\" }}{{ '\\n' }}",
        "tool_use": "{{ 'call' if shout }} {{ tools | length }}",
    }
    engine = ScriptedEngine()
    body = {"messages": MESSAGES, "tools": tools, KWARGS: {"shout": True}}
    reply = await post("/chat/completions", body, engine, tokenizer, tool_call_parser="hermes")
    assert (reply.status_code, reply.headers.get(IGNORED_HEADER)) == (200, None)
    said = tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert said == ("don't\n" if tools is None else f"call {len(TOOLS)}")


OF_PARTS = (
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
OF_EITHER = (
    "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }};"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (OF_PARTS, "<|user|>system: be brief;<|user|>user: a\nb<|user|>;"),
        (OF_EITHER, "be brief;a\nb<|user|>;"),
    ],
)
async def test_templates_that_go_through_parts_are_given_parts(
    template: str, expected: str, engine: ScriptedEngine
) -> None:
    """They would lose texts without a word; spellings of special tokens stay text in them, too."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b<|user|>"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    tokenizer = byte_tokenizer(template)
    async with serve(engine, tokenizer) as client:
        reply = await client.post("/chat/completions", json={"messages": messages})
        assert reply.status_code == 200
        prompt = engine.requests[0].prompt_token_ids
        assert tokenizer.decode(prompt) == expected
        assert prompt.count(USER) == template.count("<|user|>") * len(messages)
        last = [*messages, {"role": "assistant", "content": "so"}]
        await client.post("/chat/completions", json={"messages": last, **CONTINUED})
        assert tokenizer.decode(engine.requests[1].prompt_token_ids).endswith("so")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FILTERS = "{% for a in range(99999) %}{{ range(99999)|map('string')|list|length }}{% endfor %}"


@pytest.mark.parametrize("template", [LOOPS, FILTERS])
async def test_a_template_without_end_is_ended(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, "most_seconds", 0.3)
    async with serve(ScriptedEngine(), byte_tokenizer(template), body_processes=0) as client:
        reply = await client.post("/chat/completions", json={"messages": MESSAGES})
        assert fault(reply) == (500, "chat_template_error")
        assert (await client.post("/completions", json={"prompt": "x"})).is_success


def test_in_a_thread_of_its_own_a_template_ends_too() -> None:
    tokenizer = byte_tokenizer(LOOPS)
    template = ChatTemplate(tokenizer, Spellings(tokenizer))
    with ThreadPoolExecutor(1) as threads, pytest.raises(SlowTemplateError):
        threads.submit(template._text, MESSAGES, {}, {}).result()


HEAVY = (
    """{% set word, its = messages[0].content, namespace(a=[], b=[]) %}
{%- if word == 'memory' %}{{ word * 999999999 }}
{%- elif word == 'loop' %}"""
    + LOOPS
    + """
{%- elif word == 'time' %}{% for _ in range(60) %}
{%- set its.a = [its.a, its.a] %}{% set its.b = [its.b, its.b] %}{% endfor %}{{ its.a == its.b }}
{%- else %}{{ word * 2 }}{% endif %}"""
)


async def test_what_no_signal_can_interrupt_is_for_another_process(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> None:
    monkeypatch.setattr(LIMIT, "most_seconds", 0.5)
    async with serve(engine, byte_tokenizer(HEAVY), body_processes=1) as client:
        for word, status, code in (
            ("ab", 200, None),
            ("memory", 500, "chat_template_error"),
            ("loop", 500, "chat_template_error"),
            ("time", 400, "unreadable_body"),
        ):
            messages = [{"role": "user", "content": word}]
            reply = await client.post("/chat/completions", json={"messages": messages}, timeout=600)
            assert (reply.status_code, reply.json().get("error", {}).get("code")) == (status, code)
    assert engine.requests[0].prompt_token_ids == tuple(b"abab")
