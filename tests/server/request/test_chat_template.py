"""Who is to blame where a chat template makes nothing of a request, and which variables it has."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from worlds.scripted_engine import CHAT_TEMPLATE, ScriptedEngine, byte_tokenizer
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(connect: Connect, template: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with connect(ScriptedEngine(), byte_tokenizer(template)) as client:
        reply = await client.post("/chat/completions", json={"messages": MESSAGES} | fields)
    return reply.status_code, reply.json().get("error")


async def test_what_a_template_refuses_is_the_clients_fault(connect: Connect) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    status, error = await ask(connect, template)
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
    connect: Connect, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    with caplog.at_level(logging.ERROR):
        status, error = await ask(connect, template)
    assert (status, error["code"], error["param"]) == (500, "chat_template_error", None)
    assert "chat template is broken" in caplog.text


async def test_values_that_break_a_template_are_named(connect: Connect) -> None:
    shout, continued = (
        {"shout": 5},
        {"continue_final_message": True, "add_generation_prompt": False},
    )
    status, error = await ask(connect, "{{ 'x' + (shout or '') }}a", chat_template_kwargs=shout)
    assert (status, error["param"]) == (400, "chat_template_kwargs")
    fine = {"chat_template_kwargs": {"shout": "5"}}
    assert await ask(connect, CHAT_TEMPLATE + "{{ 'x' + shout }}", **fine) == (200, None)
    # A final message that is not in the text cannot be continued.
    status, error = await ask(connect, "no messages here", **continued)
    assert (status, error["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{# shout #}a", "shout"),
        ("{{ 'shout' }}", "shout"),
        ("shout", "shout"),
        ("{% set shout = 1 %}{{ shout }}", "shout"),
        ("{{ messages[0].shout }}", "shout"),
        ("{{ bos_token }}", "bos_token"),
        ("{{ raise_exception('x') }}", "raise_exception"),
        ("{% for i in range(3) %}{% endfor %}", "range"),
        ("{{ messages }}", "messages"),
    ],
)
async def test_a_name_that_is_no_variable_of_the_clients_is_refused(
    connect: Connect, template: str, name: str
) -> None:
    status, error = await ask(connect, template, chat_template_kwargs={name: True})
    assert (status, error["param"]) == (400, f"chat_template_kwargs.{name}")


async def test_variables_are_found_in_the_tags_that_transformers_adds(connect: Connect) -> None:
    template = (
        "{% for m in messages %}{%- generation -%}{% if shout is defined %}{{ m.content }}{% endif %}"
        "{% endgeneration %}{% break %}{% endfor %}<|user|>"
    )
    assert (await ask(connect, template, chat_template_kwargs={"shout": True}))[0] == 200
