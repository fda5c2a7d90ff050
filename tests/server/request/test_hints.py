"""Hints are taken, and the answer's header names those that nothing comes of."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.request.params import GenerationRequest
from server.plan import IGNORED_HEADER
from server.request.large_bodies import LARGE
from worlds import request_bodies
from worlds.request_bodies import (
    CHAT_IGNORED,
    ENDPOINTS,
    FLAT_TOOLS,
    MESSAGES_IGNORED,
    RESPONSE_IGNORED,
    TEXT,
    TOOLS,
    with_values,
)
from worlds.scripted_engine import ScriptedEngine, byte_tokenizer, engine_info, prompt_text
from worlds.serving import post, serve

IGNORED = {
    "/completions": request_bodies.IGNORED,
    "/chat/completions": CHAT_IGNORED,
    "/responses": RESPONSE_IGNORED,
    "/messages": MESSAGES_IGNORED,
}


@pytest.mark.parametrize(
    ("path", "stream", "large"),
    [
        *((path, stream, False) for path in ENDPOINTS for stream in (False, True)),
        # Another process reads it.
        ("/responses", False, True),
    ],
)
async def test_the_header_names_the_hints_without_effect_and_no_others(
    path: str, stream: bool, large: bool
) -> None:
    base = ENDPOINTS[path][1]
    ignored = {each: hint for each, hint in IGNORED[path].items() if stream or "stream" not in each}
    effective: dict[str, Any] = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    effective |= {"metadata": {"a": "b"}, "stream": stream}
    if large:
        effective["metadata"] = {str(number): "\u20ac" * 512 for number in range(16)}
        assert len(str(effective).encode()) > LARGE
    engine = ScriptedEngine(TEXT)
    async with serve(engine, body_processes=1) as client:
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
    model = ENDPOINTS[path][0]
    found = {name for name, _, hint in model.hint_fields() if hint.variable != "reasoning_effort"}
    assert found <= set(IGNORED[path])


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
    path: str, body: dict[str, Any], name: str
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
        asked = ENDPOINTS[path][1] | body
        reply = await post(path, asked, engine, byte_tokenizer(template))
        assert reply.headers.get(IGNORED_HEADER) == told
        assert bytes(engine.requests[0].prompt_token_ids) == prompt


@pytest.mark.parametrize("said", [None, True])
@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True)])
async def test_an_effort_says_whether_to_think(
    effort: str, thinks: bool, said: bool | None
) -> None:
    """An explicit switch decides over an effort, and the reply lists the other as without effect."""
    body = ENDPOINTS[CHAT][1] | {"reasoning_effort": effort}
    if said is not None:
        body |= {"chat_template_kwargs": {"enable_thinking": said}}
    engine = ScriptedEngine(TEXT)
    reply = await post(CHAT, body, engine, byte_tokenizer("<{{ enable_thinking }}>"))
    assert prompt_text(engine.requests[0]) == f"<{thinks if said is None else said}>"
    assert reply.headers.get(IGNORED_HEADER) == (None if said is None else "reasoning_effort")


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_tier_that_was_asked_for_is_answered_in_streams_too(path: str) -> None:
    body = ENDPOINTS[path][1] | {"service_tier": "flex", "stream": True}
    tier = "standard" if path == "/messages" else "default"
    assert f'"service_tier":"{tier}"' in (await post(path, body, ScriptedEngine(TEXT))).text


async def test_a_response_repeats_its_hints() -> None:
    body = {"input": "a", "prompt_cache_key": "k", "safety_identifier": "s", "store": True}
    reply = (await post("/responses", body, ScriptedEngine(TEXT))).json()
    assert (reply["prompt_cache_key"], reply["safety_identifier"]) == ("k", "s")
    assert (reply["store"], reply["service_tier"]) == (True, "default")


async def test_a_cache_key_opens_no_cache(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: a, key: ka}, {name: b, key: kb}]")
    engine = ScriptedEngine(TEXT)
    async with serve(engine, api_keys_file=str(keys)) as client:
        for key in ("ka", "kb", "ka"):
            body = {"prompt": "a", "prompt_cache_key": "one"}
            headers = {"authorization": f"Bearer {key}"}
            await client.post("/completions", json=body, headers=headers)
    first, other, again = (each.cache_salt for each in engine.requests)
    assert first == again != other


API = "http://test/api"
CHAT = "/chat/completions"
HI = {"role": "user", "content": "hi"}
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "/completions": ({"prompt": "hi"}, "max_tokens"),
    CHAT: ({"messages": [HI]}, "max_completion_tokens"),
    "/responses": ({"input": "hi"}, "max_output_tokens"),
    "/messages": ({"messages": [HI], "max_tokens": 9}, "max_tokens"),
    f"{API}/chat": ({"messages": [HI], "stream": False}, "options.num_predict"),
    f"{API}/generate": ({"prompt": "hi", "raw": True}, "options.num_predict"),
}


@pytest.mark.parametrize("path", LIMITS)
async def test_a_limit_above_the_room_is_cut_and_listed(path: str) -> None:
    """-1 is none in every API, 8.0 an integer; and a prompt that leaves no room is refused in the words
    by which clients know it."""
    engine = ScriptedEngine(TEXT)
    body, field = LIMITS[path]
    name = next(each for each in ("messages", "prompt", "input") if each in body)
    text = [HI | {"content": "x" * 600}] if name == "messages" else "x" * 600
    async with serve(engine) as client:
        for limit, told in ((32_000, field), (-1, None), (8.0, None)):
            reply = await client.post(path, json=with_values(body, {field: limit}))
            assert reply.status_code == 200, reply.text
            assert reply.headers.get(IGNORED_HEADER) == told
        refused = await client.post(path, json=body | {name: text})
    room = engine.info.max_model_len - len(engine.requests[0].prompt_token_ids)
    assert [each.sampling.max_tokens for each in engine.requests] == [room, room, 8]
    assert re.search(r"prompt is too long: (at least )?\d{3} tokens > 511 maximum", refused.text)
    assert "This model's maximum context length is 512 tokens" in refused.text


TWO = '{"a": 1}{"b": 2}'
CUT = '{"city": "Col'
SHOWN = {None: "{}", "null": "{}", "[1]": '"[1]"', CUT: json.dumps(CUT), TWO: json.dumps(TWO)}
# What no template can write as an object: half a character, and one too deep.
HALF, DEEP = r'{"a": "\ud83d"}', '{"a": ' * 600 + "1" + "}" * 600
SHOWN |= {HALF: json.dumps(HALF), DEEP: json.dumps(DEEP)}


@pytest.mark.parametrize("given", SHOWN)
@pytest.mark.parametrize("takes_text", [True, False])
async def test_arguments_that_are_no_object_are_text(given: str | None, takes_text: bool) -> None:
    """As those of a call that was cut off; also for templates that know objects alone."""
    loop = "" if takes_text else "{% for key in c.function.arguments.items() %}{% endfor %}"
    template = f"{loop}{{{{ c.function.arguments | tojson }}}}"
    template = f"{{% for c in m.tool_calls or [] %}}{template}{{% endfor %}}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{template}{{% endfor %}}"
    call: dict[str, Any] = {"name": "f", "arguments": given}
    chat = {"role": "assistant", "tool_calls": [{"id": "1", "index": 0.0, "function": call}]}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": given}
    item = {"type": "function_call", "call_id": "1", **call}
    engine = ScriptedEngine(TEXT, info=engine_info(max_model_len=20_000))
    async with serve(engine, byte_tokenizer(template)) as client:
        for path, name, message in (
            (CHAT, "messages", chat),
            (f"{API}/chat", "messages", chat),
            ("/responses", "input", item),
            ("/messages", "messages", {"role": "assistant", "content": [block]}),
        ):
            reply = await client.post(path, json=LIMITS[path][0] | {name: [message, HI]})
            assert (reply.status_code, reply.headers.get(IGNORED_HEADER)) == (200, None), reply.text
    shown = SHOWN[given]
    shown = shown if takes_text or shown == "{}" else f'{{"arguments": {shown}}}'
    assert {prompt_text(each) for each in engine.requests} == {f"{shown}hi"}


def _calls_other(request: GenerationRequest) -> bool:
    """Neither the prompt nor the grammar has the tool that is not allowed."""
    grammar = request.sampling.grammar
    return "other" in grammar and "get_weather" not in prompt_text(request) + grammar


OTHER = {"type": "function", "function": {"name": "other"}}
FLAT = {"type": "function", "name": "other"}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}}
SOME = {"type": "allowed_tools", "mode": "required", "tools": [FLAT]}
EMPTY = {"context": [], "images": [], "system": "", "format": "", "think": None, "options": None}
SAID_TWICE = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
MARKED = HI | MARK | {"content": [{"type": "text", "text": "ab", **MARK}]}


@pytest.mark.parametrize(
    ("path", "body", "told", "check"),
    [
        (CHAT, {"messages": [HI | {"name": "bob"}]}, "messages.name", None),
        (CHAT, {"messages": [MARKED], "tools": [OTHER | MARK]}, None, None),
        (CHAT, {"tools": [], "parallel_tool_calls": True}, "parallel_tool_calls", None),
        (CHAT, {"tools": [], "tool_choice": "auto"}, "tool_choice", None),
        (CHAT, {"tools": [*TOOLS, OTHER], "tool_choice": ALLOWED}, None, _calls_other),
        (CHAT, {"top_logprobs": 0}, None, lambda r: r.sampling.logprobs is None),
        (CHAT, {"seed": -1}, None, lambda r: r.sampling.seed >= 0),
        (CHAT, {"repeat_penalty": 1.5}, None, lambda r: r.sampling.repetition_penalty == 1.5),
        (CHAT, {"think": False, "cache_prompt": True}, "thinking", None),
        (CHAT, SAID_TWICE, None, lambda r: "effort low" in prompt_text(r)),
        (CHAT, {"functions": [], "logit_bias": {}, "stop": []}, None, None),
        ("/completions", {"n_predict": 7.0}, None, lambda r: r.sampling.max_tokens == 7),
        ("/responses", {"client_metadata": {}, "top_logprobs": 0}, "client_metadata", None),
        ("/responses", {"tools": [*FLAT_TOOLS, FLAT], "tool_choice": SOME}, None, _calls_other),
        (f"{API}/chat", {"options": {"num_predict": 0, "typical_p": 1.0}}, None, None),
        (f"{API}/chat", {"options": {"num_ctx": 4096}}, "options.num_ctx", None),
        (f"{API}/generate", EMPTY | {"suffix": "", "template": ""}, None, None),
        (f"{API}/chat", {"verbose": True, "messages": [HI | {"images": []}]}, "verbose", None),
    ],
)
async def test_what_clients_add_is_accepted(
    path: str, body: dict[str, Any], told: str | None, check: Any
) -> None:
    engine = ScriptedEngine(TEXT)
    reply = await post(path, LIMITS[path][0] | body, engine)
    assert (reply.status_code, reply.headers.get(IGNORED_HEADER)) == (200, told), reply.text
    assert check is None or check(engine.requests[0])


async def test_a_name_goes_to_a_template_that_reads_it() -> None:
    engine = ScriptedEngine(TEXT)
    tokenizer = byte_tokenizer("{{ messages[0].name }}:")
    reply = await post(CHAT, {"messages": [HI | {"name": "ann"}]}, engine, tokenizer)
    assert (prompt_text(engine.requests[0]), reply.headers.get(IGNORED_HEADER)) == ("ann:", None)


WITHOUT_PLANS: dict[str, dict[str, Any]] = {
    "/messages/count_tokens": {"messages": [HI]},
    "http://test/tokenize": {"messages": [HI]},
    "http://test/detokenize": {"tokens": [5.0]},
    f"{API}/show": {},
}


@pytest.mark.parametrize("path", [*LIMITS, *WITHOUT_PLANS, "/embeddings", f"{API}/embed"])
@pytest.mark.parametrize("padding", ["", "x" * LARGE])
async def test_unknown_fields_are_listed_where_the_operator_says_so(
    path: str, padding: str
) -> None:
    body = LIMITS[path][0] if path in LIMITS else WITHOUT_PLANS.get(path, {"input": "a"})
    unknown: dict[str, Any] = {"colour": padding, "\n\u20ac, " + "x" * 5_000: 1}
    expected = {"colour"}
    if "messages" in body and API not in path:
        part = {"type": "text", "text": "hi", "colour": 1}
        unknown["messages"] = [HI | {"content": [part], "colour": 1}]
        expected |= {"messages.colour", "messages.content.colour"}
    engine = ScriptedEngine(TEXT, info=engine_info(embeddings="mean", hidden_size=2))
    reply = await post(path, body | unknown, engine, unknown_fields="tell", body_processes=0)
    assert reply.status_code == 200, reply.text
    assert expected <= set(reply.headers[IGNORED_HEADER].split(", "))
